"""DropMatch (arXiv 2603.03333) on trees and chains: naive matching, majority, JS, Algorithm 1."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import (
    Acceptor,
    Options,
    PromptContext,
    RowState,
    StepContext,
    Verdict,
)
from eagle_dropmatch.acceptors.checks import number, one_of
from eagle_dropmatch.acceptors.divergence import js_divergence, js_from_draft
from eagle_dropmatch.acceptors.heads import NOISES, solve_p_drop
from eagle_dropmatch.acceptors.scores import Score, Scores
from eagle_dropmatch.acceptors.step_heads import Heads
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.sampling import first_argmax

#: The paper's dropout rate, and the most that ``auto`` ever chooses.
PAPER_P_DROP = 0.3
_FOLLOW, _LEAST_RATE = 0.25, 1e-3  # of a running rate: its pace, and what it never falls below


class DropoutRule(Acceptor):
    """What the rules of K dropout heads share: their options and the heads themselves.

    At a temperature above 0 each head draws a token of its own, as the paper has it. So the rules
    do not tend to exact acceptance as the rate tends to 0 (at 0 they are exact): what loosens them
    there is K.

    Args:
        K: number of heads (the paper: 5).
        p_drop: dropout rate in [0, 1), K rates, one for each head, or ``"auto"``: solved on each
            prompt so that a head agrees with the clean argmax at ``head_agreement`` of its
            positions, at most 0.3. ``"running"`` starts there and goes on: after each step the rate
            grows or shrinks with how often heads agreed along the accepted path.
        head_agreement: the share that ``auto`` solves for, in (0, 1]. 0.8 is the lowest at which,
            on the reference target, the median token that a head lets in beside the clean argmax
            still has a tenth of the clean probability (results/agreement).
        include_clean: keep the target's own choice too; acceptance from the same prefix is then
            never shorter than exact.
        mask: ``"node"`` draws masks for every node, ``"step"`` one set for all nodes of a step.
        noise: ``"dropout"``; ``"gaussian"`` of the same mean and variance; or ``"swag"``: normal
            noise on the LM head's weights, as if they were drawn around their values with p / (1 -
            p) times the variance of their column. No training trajectory is there to estimate it
            from, so the spread of the head's own rows stands in. Each token's logit then moves by
            itself; the 512 likeliest take part.
        adapt: ``"none"``; or the rate of a node shrinks with what the target knows there, by the
            factor 1 - H / ln V of its ``"entropy"`` H, or by the ``"margin"`` between its two
            likeliest tokens' probabilities.
        seed: of the masks' own generators.
    """

    strict: ClassVar[Options] = {"p_drop": 0.0}
    #: What ``noise`` may be.
    noises: ClassVar[tuple[str, ...]] = (*NOISES, "swag")

    def __init__(
        self,
        K: int = 5,
        p_drop: float | Sequence[float] | Literal["auto", "running"] = "auto",
        head_agreement: float = 0.8,
        include_clean: bool = False,
        mask: Literal["node", "step"] = "node",
        noise: Literal["dropout", "gaussian", "swag"] = "dropout",
        adapt: Literal["none", "entropy", "margin"] = "none",
        seed: int = 0,
    ) -> None:
        if p_drop == "running" and noise == "swag":
            raise UserError("p_drop is 'running': that follows heads of noise dropout or gaussian")
        if not isinstance(K, int) or K < 1:
            raise UserError(f"K is {K!r}: expected a whole number of at least one dropout head")
        if isinstance(p_drop, list | tuple):
            if len(p_drop) != K:
                raise UserError(f"p_drop has {len(p_drop)} rates for K = {K} heads: give K of them")
            rates: tuple[object, ...] = tuple(p_drop)
        else:
            rates = (p_drop,) if p_drop not in ("auto", "running") else ()
        for rate in rates:
            if not (
                isinstance(rate, int | float)
                and not isinstance(rate, bool)
                and math.isfinite(rate)
                and 0 <= rate < 1
            ):
                raise UserError(
                    f"p_drop is {rate!r}: expected a number in [0, 1), 'auto' or 'running'"
                )
        self.K, self.p_drop = K, p_drop
        self.head_agreement = number("head_agreement", head_agreement, 0, 1, open_low=True)
        self.mask = one_of("mask", mask, ("node", "step"))
        self.noise = one_of("noise", noise, self.noises)
        self.adapt = one_of("adapt", adapt, ("none", "entropy", "margin"))
        self.include_clean, self.seed = include_clean, seed

    def start(self, context: PromptContext) -> RowState:
        """Each row's rates [B, K]: those given, or the one that fits the row's prompt."""
        hidden = context.prefill.hidden
        if self.p_drop in ("auto", "running"):
            solved = torch.stack(
                [
                    solve_p_drop(
                        row[:length],
                        context.head,
                        target_agreement=self.head_agreement,
                        ceiling=PAPER_P_DROP,
                    )
                    for row, length in zip(hidden, context.lengths, strict=True)
                ]
            )
            return {"p_drop": solved[:, None].repeat(1, self.K)}
        rates = torch.tensor(self.p_drop, device=hidden.device, dtype=torch.float32)
        return {"p_drop": rates.expand(hidden.shape[0], self.K).clone()}

    def verify(self, context: StepContext) -> Verdict:
        verdict = super().verify(context)
        if self.p_drop == "running":
            self._follow(context, verdict.path)
        return verdict

    def _follow(self, context: StepContext, path: Tensor) -> None:
        """Move each row's rate towards ``head_agreement``, by its heads along the path [B, A]."""
        parents, rates = context.parents, context.state["p_drop"]
        on_path = torch.zeros_like(context.tree.valid)
        on_path.scatter_(1, path.clamp(min=0), True)  # the root is on every path
        index = on_path[parents.row, parents.node].nonzero()[:, 0]
        said = Heads(self, context).argmaxes(index)
        row = parents.row[index]
        agreed = (said == first_argmax(parents.logits[index])[:, None]).float().mean(-1)
        total = torch.zeros(len(rates), device=rates.device)
        count = torch.zeros_like(total).index_add_(0, row, torch.ones_like(agreed))
        share = total.index_add_(0, row, agreed) / count.clamp(min=1)
        turn = torch.where(count > 0, share - self.head_agreement, 0.0)
        moved = rates * (_FOLLOW * turn).exp()[:, None]
        # In place: the loop keeps this very tensor for the row's next step.
        rates.copy_(moved.clamp(_LEAST_RATE, PAPER_P_DROP))

    def accept(self, context: StepContext) -> Tensor:
        accepted = self.match(Heads(self, context), context)
        return accepted | context.exact if self.include_clean else accepted

    @abstractmethod
    def match(self, heads: Heads, context: StepContext) -> Tensor:
        """Whether the heads let each node in: [B, N] bool."""

    @abstractmethod
    def measure(self, heads: Heads, context: StepContext) -> Scores:
        """What ``match`` compares."""

    def explain(self, context: StepContext) -> Scores:
        """What ``match`` compares, each head's token and its rate."""
        heads = Heads(self, context)
        if not heads.parents.count:
            return {}
        rates = heads.parents.to_children(heads.rates).unbind(-1)
        told = {"p_drop": Score(rates[0])}
        if isinstance(self.p_drop, list | tuple):
            told = {f"p_drop of head {i + 1}": Score(rate) for i, rate in enumerate(rates)}
        return {**self.measure(heads, context), **told, **self.votes(heads)}

    def votes(self, heads: Heads) -> Scores:
        """The token that each head says at the node's parent."""
        said = heads.parents.to_children(heads.choices).unbind(-1)
        return {f"head {i + 1}": Score(each, token=True) for i, each in enumerate(said)}


class NaiveAcceptor(DropoutRule):
    """Accept a node iff it is what at least one of K dropout heads says at its parent (eq. 4).

    Greedy, a head says its argmax; at a temperature above 0 each head draws its own token, after
    the settings of sampling. Options: see ``DropoutRule``.
    """

    name = "naive"

    def match(self, heads: Heads, context: StepContext) -> Tensor:
        return heads.picks()

    def measure(self, heads: Heads, context: StepContext) -> Scores:
        return {"heads that say x": Score(heads.votes(), ">=", 1)}

    def accept_path(self, context: StepContext, eligible: Tensor) -> Tensor:
        also = context.exact if self.include_clean else None
        return Heads(self, context).picks(also, eligible)


class MajorityAcceptor(DropoutRule):
    """Accept a node iff it is what most of the K dropout heads say at its parent.

    Tokens with equally many heads are decided by the higher clean logit. Options: see
    ``DropoutRule``.
    """

    name = "majority"

    def match(self, heads: Heads, context: StepContext) -> Tensor:
        return elected(heads, context).holds

    def measure(self, heads: Heads, context: StepContext) -> Scores:
        return {"heads that say x": Score(heads.votes()), "most say": elected(heads, context)}


class JSAcceptor(DropoutRule):
    """Accept a node iff the draft's distribution at its parent lies inside the heads' radius.

    JS(q, c) <= max over i of JS(p_i, c), where c = softmax of the heads' mean logits. It looks at
    distributions alone: where it holds every child passes, where it does not none does, not even
    the clean argmax (``include_clean`` adds that). An EAGLE-3 draft's q lives on the draft's
    vocabulary and is 0 elsewhere, so JS(q, c) is at least c's mass outside times ln 2 / 2: where
    the target wants a token that the draft cannot say, the rule cannot hold. Rates of 0 leave no
    radius, and nothing passes. At a temperature above 0 all of them are tempered, and the heads
    truncated as sampling is. Options: see ``DropoutRule``.
    """

    name = "js"
    strict: ClassVar[Options] = {"p_drop": 0.0, "include_clean": True}
    noises = tuple(NOISES)
    needs_draft = True

    def match(self, heads: Heads, context: StepContext) -> Tensor:
        return to_centre(heads, context).holds

    def measure(self, heads: Heads, context: StepContext) -> Scores:
        return {"JS(q, c)": to_centre(heads, context)}


class DropMatchAcceptor(DropoutRule):
    """DropMatch's Algorithm 1: JS, and where that fails majority.

    Options: see ``DropoutRule``.
    """

    name = "dropmatch"
    noises = tuple(NOISES)
    needs_draft = True

    def match(self, heads: Heads, context: StepContext) -> Tensor:
        return to_centre(heads, context).holds | elected(heads, context).holds

    def measure(self, heads: Heads, context: StepContext) -> Scores:
        return {
            "JS(q, c)": to_centre(heads, context),
            "heads that say x": Score(heads.votes()),
            "most say": elected(heads, context),
        }


def elected(heads: Heads, context: StepContext) -> Score:
    """What most heads say at each node's parent, against the node's own token."""
    winner = majority(heads.choices, heads.parents.logits)
    return Score(heads.parents.to_children(winner), "=", context.tree.tokens, token=True)


def majority(choices: Tensor, logits: Tensor) -> Tensor:
    """The most frequent of each row's choices; ties by the higher clean logit, then the lower id.

    Args:
        choices: [M, K] int64.
        logits: [M, V], clean.

    Returns:
        [M] int64.
    """
    votes = (choices[:, :, None] == choices[:, None, :]).sum(-1)
    most = votes == votes.amax(-1, keepdim=True)
    clean = logits.gather(1, choices).float().masked_fill(~most, -torch.inf)
    best = most & (clean == clean.amax(-1, keepdim=True))
    return choices.masked_fill(~best, logits.shape[-1]).amin(-1)


def to_centre(heads: Heads, context: StepContext) -> Score:
    """JS(q, c) at each node's parent, against the radius max over i of JS(p_i, c)."""
    sampler, parents = context.sampler, heads.parents
    if not parents.count:
        return Score(context.tree.scores, "<=", torch.nan)
    log_q, ids = context.draft
    distances, radii = [], []
    for logits, part in heads.logits():
        logits = logits.float()
        centre, each = logits.mean(1), logits
        if not sampler.greedy:
            size = logits.shape[-1]
            centre = sampler.scores(centre).over(size)
            each = sampler.scores(each.flatten(0, 1)).over(size).view_as(each)
        centre = centre.log_softmax(-1)
        radii.append(js_divergence(each.log_softmax(-1), centre[:, None]).amax(-1))
        distances.append(js_from_draft(log_q[part], ids, centre))
    # Without dropout there is no radius.
    radius = torch.cat(radii).where((heads.rates > 0).any(-1), torch.nan)
    return Score(parents.to_children(torch.cat(distances)), "<=", parents.to_children(radius))
