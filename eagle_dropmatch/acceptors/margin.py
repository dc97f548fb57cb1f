"""Rules that compare a draft token's probability with the likeliest token's."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, Options, StepContext
from eagle_dropmatch.acceptors.checks import number, one_of
from eagle_dropmatch.acceptors.scores import Score, Scores, all_hold
from eagle_dropmatch.acceptors.top_n import rank_below


def at_least(context: StepContext, share: float) -> Tensor:
    """p(x) >= share * max p, or x is the target's choice: [B, N] bool."""
    if share == math.inf:
        return context.exact
    if share <= 0:
        return torch.ones_like(context.exact)
    return context.exact | near_best(context, share).holds


def near_best(context: StepContext, share: float) -> Score:
    """p(x) against share * max p, both as logarithms; below 0 a share is as good as 0."""
    parents = context.parents
    factor = math.log(share) if share > 0 else -math.inf
    return Score(parents.child_log_probs, ">=", parents.to_children(parents.best) + factor)


class MinPAcceptor(Acceptor):
    """Accept x iff p(x) >= (1 - alpha) max p: min-p, or the token cascade of SpecCascade.

    Args:
        alpha: at most 1, where everything passes. 0 relaxes to ties with the argmax alone,
            ``-inf`` is exact.
    """

    name = "min_p"
    strict: ClassVar[Options] = {"alpha": -math.inf}

    def __init__(self, alpha: float = 0.7) -> None:
        self.alpha = number("alpha", alpha, high=1)

    def accept(self, context: StepContext) -> Tensor:
        return at_least(context, 1 - self.alpha)

    def explain(self, context: StepContext) -> Scores:
        return {"ln p(x)": near_best(context, 1 - self.alpha)}


class MarginAcceptor(Acceptor):
    """Accept x iff p(x) / max p >= kappa (probability margin, arXiv 2609.02897).

    Args:
        kappa: at least 0. Above 1 it is exact.
    """

    name = "margin"
    strict: ClassVar[Options] = {"kappa": math.inf}

    def __init__(self, kappa: float = 0.3) -> None:
        self.kappa = number("kappa", kappa, 0)

    def accept(self, context: StepContext) -> Tensor:
        return at_least(context, self.kappa)

    def explain(self, context: StepContext) -> Scores:
        return {"ln p(x)": near_best(context, self.kappa)}


class MarsAcceptor(Acceptor):
    """Accept x iff it is the target's choice, or its second and z2 / z1 > theta (MARS, 2601.15498).

    Tokens that tie with the argmax count as its second, with a ratio of 1. The ratio of raw logits
    changes when all of them are shifted, which no distribution notices, and means nothing where
    z1 <= 0: nothing is relaxed there.

    Args:
        theta: 1 is exact.
        variant: ``"paper"``: Algorithm 1 at every temperature. ``"released"``: what the authors'
            code does: never relaxes at temperature 0, and above it takes the first of the siblings
            that is among the target's two likeliest, whatever the ratio.
    """

    name = "mars"
    strict: ClassVar[Options] = {"theta": 1.0}

    def __init__(self, theta: float = 0.9, variant: str = "paper") -> None:
        self.theta = number("theta", theta, 0)
        self.variant = one_of("variant", variant, ("paper", "released"))

    def accept(self, context: StepContext) -> Tensor:
        scores = self.explain(context)
        return context.exact | all_hold(scores) if scores else context.exact

    def explain(self, context: StepContext) -> Scores:
        parents, second_best = context.parents, rank_below(context, 2)
        if self.variant == "released":
            if context.sampler.greedy:
                return {}
            fits = second_best.holds & (context.tree.parents >= 0)
            earlier = Score(siblings_before(context, fits), "<", 1)
            return {"likelier tokens": second_best, "earlier siblings in the top 2": earlier}
        if not parents.count:
            return {}
        first, second = parents.logits.topk(2, dim=-1).values.float().unbind(-1)
        return {
            "likelier tokens": second_best,
            "z1": Score(parents.to_children(first), ">", 0.0),
            "z2": Score(parents.to_children(second), ">", parents.to_children(self.theta * first)),
        }


def siblings_before(context: StepContext, fits: Tensor) -> Tensor:
    """How many siblings with a lower id fit: [B, N] int64. ``fits``: [B, N] bool."""
    parents = context.tree.parents
    ids = torch.arange(parents.shape[1], device=parents.device)
    earlier = (parents[:, :, None] == parents[:, None]) & (ids < ids[:, None])
    return (earlier & fits[:, None]).sum(-1)
