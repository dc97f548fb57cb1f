"""The K dropout heads of one step, at the nodes of its trees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import StepContext
from eagle_dropmatch.acceptors.heads import NOISES, head_choices, mask_uniforms, normal
from eagle_dropmatch.sampling import first_argmax, place_uniforms
from eagle_dropmatch.tree import reachable

if TYPE_CHECKING:
    from eagle_dropmatch.acceptors.dropmatch import DropoutRule

_ROWS_AT_ONCE = 256  # whole heads computed together
_SWAG_TOKENS = 512


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
            found = self.argmaxes(slice(None))
        else:
            none = parents.slot.new_zeros(0, self.rates.shape[1])  # trees of a root alone
            said = [self._say(logits, part) for logits, part in self.logits()]
            found = torch.cat([none, *said])
        # Without dropout a head is the clean one. Its product has another shape here, and in half
        # precision that rounds near ties otherwise: p_drop 0 must equal exact to the bit.
        clean = context.choice[parents.row, parents.node][:, None]
        return torch.where(self.rates == 0, clean, found)

    def argmaxes(self, index: Tensor | slice) -> Tensor:
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
