"""Rules that accept whatever ranks high with the target."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, Options, StepContext
from eagle_dropmatch.acceptors.checks import count, number
from eagle_dropmatch.acceptors.scores import Score, Scores, all_hold


class TopKAcceptor(Acceptor):
    """Accept x iff fewer than k tokens are likelier, or it is the target's choice.

    Args:
        k: 1 is exact, but for tokens that tie with the argmax.
    """

    name = "top_k"
    strict: ClassVar[Options] = {"k": 1}

    def __init__(self, k: int = 2) -> None:
        self.k = count("k", k)

    def accept(self, context: StepContext) -> Tensor:
        return context.exact | in_top(context, self.k)

    def explain(self, context: StepContext) -> Scores:
        return {} if self.k == 1 else {"likelier tokens": rank_below(context, self.k)}


class RelaxedTopNAcceptor(Acceptor):
    """Accept x iff it is in the target's top N and p(x) > max p - delta (TensorRT-LLM).

    Args:
        n: 1 is exact.
        delta: in [0, 1].
    """

    name = "relaxed_top_n"
    strict: ClassVar[Options] = {"n": 1}

    def __init__(self, n: int = 10, delta: float = 0.6) -> None:
        self.n = count("n", n)
        self.delta = number("delta", delta, 0, 1)

    def accept(self, context: StepContext) -> Tensor:
        return context.exact if self.n == 1 else context.exact | all_hold(self.explain(context))

    def explain(self, context: StepContext) -> Scores:
        if self.n == 1:
            return {}
        parents = context.parents
        bound = parents.to_children(parents.best.exp()) - self.delta
        return {
            "likelier tokens": rank_below(context, self.n),
            "p(x)": Score(parents.child_log_probs.exp(), ">", bound),
        }


def in_top(context: StepContext, n: int) -> Tensor:
    """Fewer than ``n`` tokens are likelier, and x can be said at all: [B, N] bool.

    The top 1 is the target's choice and no token that ties with it.
    """
    return context.exact if n == 1 else rank_below(context, n).holds


def rank_below(context: StepContext, n: int) -> Score:
    """How many tokens are likelier than x (inf where it cannot be said) against ``n``."""
    parents = context.parents
    can_be_said = parents.child_scores.isfinite()
    return Score(parents.child_ranks.float().masked_fill(~can_be_said, torch.inf), "<", n)
