"""DropMatch (arXiv 2603.03333) on trees and chains: naive matching, majority, JS, Algorithm 1."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
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
from eagle_dropmatch.acceptors.divergence import js_divergence, js_from_draft
from eagle_dropmatch.acceptors.heads import (
    NOISES,
    head_choices,
    mask_uniforms,
    normal,
    solve_p_drop,
)
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.sampling import first_argmax, place_uniforms
from eagle_dropmatch.tree import reachable

#: The paper's dropout rate, and the most that ``auto`` ever chooses.
PAPER_P_DROP = 0.3
_ROWS_AT_ONCE = 256  # whole heads computed together
_SWAG_TOKENS = 512
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
        if not 0 < head_agreement <= 1:
            raise UserError(f"head_agreement is {head_agreement}: expected a share in (0, 1]")
        for name, value, known in (
            ("mask", mask, ("node", "step")),
            ("noise", noise, self.noises),
            ("adapt", adapt, ("none", "entropy", "margin")),
        ):
            if value not in known:
                raise UserError(
                    f"{name} is {value!r}: expected {' or '.join(repr(each) for each in known)}"
                )
        self.K, self.p_drop, self.head_agreement = K, p_drop, head_agreement
        self.include_clean, self.mask, self.seed = include_clean, mask, seed
        self.noise, self.adapt = noise, adapt

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


class Heads:
    """The K heads of one step, at the M nodes that have children; what no rule asks for is not
    computed."""

    def __init__(self, rule: DropoutRule, context: StepContext) -> None:
        self._rule, self._context = rule, context
        self.parents = context.parents
        self._noise = NOISES.get(rule.noise)
        self.rates = context.state["p_drop"][self.parents.row]
        if rule.adapt != "none":
            self.rates = self.rates * self._certainty()[:, None]

    @cached_property
    def _uniforms(self) -> Tensor:
        """[M, K, D]: what the masks are made of."""
        return self._numbers(self.parents.hidden.shape[-1])

    def _numbers(self, size: int) -> Tensor:
        """[M, K, size] uniform numbers."""
        rule, context = self._rule, self._context
        nodes = context.tree.num_nodes if rule.mask == "node" else 1
        uniforms = mask_uniforms(
            context.row_keys,
            rule.seed,
            context.step,
            (nodes, rule.K, size),
            context.output.hidden.device,
        )
        row, node = self.parents.row, self.parents.node
        return uniforms[row, node if rule.mask == "node" else torch.zeros_like(node)]

    def _certainty(self) -> Tensor:
        """[M] float32 in [0, 1]."""
        if self._rule.adapt == "entropy":
            size = self._context.logits.shape[-1]
            return (1 - self.parents.entropy / math.log(size)).clamp(0, 1)
        top = self.parents.log_probs.topk(min(2, self.parents.log_probs.shape[-1]), dim=-1).values
        top = top.exp()
        # One token that may be chosen is as sure as can be.
        return top[:, 0] - top[:, 1:].sum(-1)

    @cached_property
    def choices(self) -> Tensor:
        """[M, K] int64: what each head says: its argmax, or at a temperature above 0 its sample."""
        sampler, parents, context = self._context.sampler, self.parents, self._context
        if self._noise is None:
            found = self._disturbed_weights()
        elif sampler.greedy and not sampler.penalises:
            found = head_choices(
                parents.hidden,
                self._uniforms,
                self.rates,
                context.head,
                context.logits.shape[-1],
                self._noise,
            )
        else:
            none = parents.slot.new_zeros(0, self.rates.shape[1])  # trees of a root alone
            said = [self._say(logits, part) for logits, part in self.logits()]
            found = torch.cat([none, *said])
        # Without dropout a head is the clean one. Its product has another shape here, and in half
        # precision that rounds near ties otherwise: p_drop 0 must equal exact to the bit.
        clean = context.choice[parents.row, parents.node][:, None]
        return torch.where(self.rates == 0, clean, found)

    def argmaxes(self, index: Tensor) -> Tensor:
        """[m, K] int64: the argmax of every head at some of the M nodes, at any temperature."""
        assert self._noise is not None
        return head_choices(
            self.parents.hidden[index],
            self._uniforms[index],
            self.rates[index],
            self._context.head,
            self._context.logits.shape[-1],
            self._noise,
        )

    def logits(self, max_elements: int = 2**24) -> Iterator[tuple[Tensor, slice]]:
        """The heads' logits [m, K, V], penalised, for some of the M nodes after the other.

        In parts, so that memory stays bounded: K = 16 at 60 nodes and a vocabulary of 152k are 146M
        numbers.
        """
        heads, size = self.rates.shape[1], self._context.logits.shape[-1]
        at_once = max(1, max_elements // (heads * size))
        for start in range(0, self.parents.count, at_once):
            part = slice(start, start + at_once)
            logits = self._context.head(self._noisy(part))
            if self._context.before is not None:
                before = self._context.before[self.parents.row[part], self.parents.node[part]]
                before = before.repeat_interleave(heads, 0)
                flat = self._context.sampler.penalise(logits.flatten(0, 1), before)
                logits = flat.view_as(logits)
            yield logits, part

    def _disturbed_weights(self) -> Tensor:
        """[M, K]: what the heads say whose weights are disturbed, not their inputs."""
        top = self.parents.logits.float().topk(min(_SWAG_TOKENS, self.parents.logits.shape[-1]))
        spread = self.parents.hidden.float().square() @ self._context.head.column_variance
        spread = (self.rates / (1 - self.rates)).sqrt() * spread.sqrt()[:, None]
        shaken = top.values[:, None] + spread[..., None] * normal(
            self._numbers(top.values.shape[-1])
        )
        return top.indices.gather(1, self._say(shaken, slice(None)))

    def _noisy(self, part: slice = slice(None)) -> Tensor:
        """[m, K, D]: the head's inputs, disturbed, in the model's dtype."""
        assert self._noise is not None
        hidden = self.parents.hidden[part, None]
        return self._noise(hidden, self._uniforms[part], self.rates[part, :, None])

    def picks(self, also: Tensor | None = None, *, prune: bool = False) -> Tensor:
        """Whether some head says each node at its parent: [B, N] bool.

        Greedy, hardly any product over the vocabulary is needed. A head can only say a drafted
        token that beats its siblings and the clean argmax, which takes their few rows of W. Where
        one does, that one head is computed whole: first one for each node, then the rest of those
        that are still open. So verdicts are those of all heads over all tokens, at the cost of
        about one head for each accepted node. (A bound on the tail of all other tokens would do
        without even these, but on the reference target it takes hundreds of candidates.)

        Args:
            also: [B, N] bool, nodes that are accepted for other reasons, and here without a look.
            prune: refuse nodes that cannot be on an accepted path, without a look.
        """
        context, parents, tree = self._context, self.parents, self._context.tree
        accepted = torch.zeros_like(tree.valid) if also is None else also.clone()
        whole = not context.sampler.greedy or context.sampler.penalises or self._noise is None
        if whole or context.head.finish is not None or not parents.count:
            said = parents.to_children(self.choices)
            return accepted | (said == tree.tokens[..., None]).any(-1)
        slot, noisy = parents.slot, self._noisy()
        child = (tree.parents >= 0)[..., None]
        values = context.head.at(noisy[slot], tree.tokens).masked_fill(~child, -torch.inf)
        best = context.head.at(noisy, context.choice[parents.row, parents.node])
        index = slot.flatten()[:, None].expand(-1, best.shape[1])
        best = best.scatter_reduce(0, index, values.flatten(0, 1), "amax")[slot]
        # Whole products are rounded to the model's dtype, and ties go to the lower id: what is this
        # near may win there.
        slack = 2 * torch.finfo(noisy.dtype).eps * best.abs().clamp(min=1.0)
        still = (self.rates == 0)[slot]  # without dropout a head says what the target says
        accepted |= context.exact & still.any(-1)
        maybe = child & ~still & (values >= best - slack)
        for last in (False, True):
            waiting = maybe & ~accepted[..., None]
            if prune:
                waiting &= reachable(tree, accepted | maybe.any(-1))[..., None]
            if not last:
                waiting &= waiting.cumsum(-1) == 1
            row, node, number = waiting.nonzero(as_tuple=True)
            for part in torch.arange(len(row), device=row.device).split(_ROWS_AT_ONCE):
                at = row[part], node[part]
                hit = first_argmax(context.head(noisy[slot[at], number[part]])) == tree.tokens[at]
                accepted[at[0][hit], at[1][hit]] = True
            maybe &= ~waiting
        return accepted

    def _say(self, logits: Tensor, part: slice) -> Tensor:
        sampler, context = self._context.sampler, self._context
        if sampler.greedy:
            return first_argmax(logits)
        # One number for each (step, node, head), from the masks' side: the sampling stream of the
        # answer itself must not notice that heads are there.
        keys = [
            f"heads {self._rule.seed} {context.row_keys[row]} {context.step} {node}"
            for row, node in zip(
                self.parents.row[part].tolist(), self.parents.node[part].tolist(), strict=True
            )
        ]
        uniforms = place_uniforms(keys, [0] * len(keys), logits.shape[1], logits.device)
        chosen = sampler.choose(sampler.scores(logits.flatten(0, 1)), uniforms.flatten())
        return chosen.view(logits.shape[:2])


class NaiveAcceptor(DropoutRule):
    """Accept a node iff it is what at least one of K dropout heads says at its parent (eq. 4).

    Greedy, a head says its argmax; at a temperature above 0 each head draws its own token, after
    the settings of sampling. Options: see ``DropoutRule``.
    """

    name = "naive"

    def match(self, heads: Heads, context: StepContext) -> Tensor:
        return heads.picks()

    def accept_reachable(self, context: StepContext) -> Tensor:
        also = context.exact if self.include_clean else None
        return Heads(self, context).picks(also, prune=True)


class MajorityAcceptor(DropoutRule):
    """Accept a node iff it is what most of the K dropout heads say at its parent.

    Tokens with equally many heads are decided by the higher clean logit. Options: see
    ``DropoutRule``.
    """

    name = "majority"

    def match(self, heads: Heads, context: StepContext) -> Tensor:
        winner = majority(heads.choices, heads.parents.logits)
        return heads.parents.to_children(winner) == context.tree.tokens


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
        return heads.parents.to_children(inside_radius(heads, context))


class DropMatchAcceptor(DropoutRule):
    """DropMatch's Algorithm 1: JS, and where that fails majority.

    Options: see ``DropoutRule``.
    """

    name = "dropmatch"
    noises = tuple(NOISES)
    needs_draft = True

    def match(self, heads: Heads, context: StepContext) -> Tensor:
        parents = heads.parents
        inside = parents.to_children(inside_radius(heads, context))
        winner = majority(heads.choices, parents.logits)
        return inside | (parents.to_children(winner) == context.tree.tokens)


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


def inside_radius(heads: Heads, context: StepContext) -> Tensor:
    """JS(q, c) <= max over i of JS(p_i, c) at each of the M nodes: [M] bool."""
    tree, sampler, parents = context.tree, context.sampler, heads.parents
    if not parents.count:
        return parents.row.bool()
    if tree.draft_logits is None or context.draft_ids is None:
        raise UserError(
            "this rule compares the draft's distribution with the target's, and this drafter has "
            "none to show"
        )
    draft = tree.draft_logits[parents.row, parents.node].float()
    draft_log_probs = (draft if sampler.greedy else draft / sampler.temperature).log_softmax(-1)
    inside = []
    for logits, part in heads.logits():
        logits = logits.float()
        centre, each = logits.mean(1), logits
        if not sampler.greedy:
            size = logits.shape[-1]
            centre = sampler.scores(centre).over(size)
            each = sampler.scores(each.flatten(0, 1)).over(size).view_as(each)
        centre = centre.log_softmax(-1)
        radius = js_divergence(each.log_softmax(-1), centre[:, None]).amax(-1)
        distance = js_from_draft(draft_log_probs[part], context.draft_ids, centre)
        inside.append(distance <= radius)
    moved = (heads.rates > 0).any(-1)
    return torch.cat(inside) & moved if inside else moved
