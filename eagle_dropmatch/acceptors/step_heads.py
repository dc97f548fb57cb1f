"""The K dropout heads of one step, at the nodes of its trees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import StepContext
from eagle_dropmatch.acceptors.few_heads import few_heads
from eagle_dropmatch.acceptors.heads import NOISES, head_choices, mask_uniforms, normal
from eagle_dropmatch.sampling import first_argmax, place_uniforms, rows_at_once

if TYPE_CHECKING:
    from eagle_dropmatch.acceptors.dropmatch import DropoutRule

_SWAG_TOKENS = 512


class Heads:
    """The K heads of one step, at the M nodes that have children; what no rule asks for is not
    computed."""

    def __init__(self, rule: DropoutRule, context: StepContext) -> None:
        self._rule, self.context = rule, context
        self.parents = context.parents
        self.noise = NOISES.get(rule.noise)
        self.rates = context.state["p_drop"][self.parents.row]
        if rule.adapt != "none":
            self.rates = self.rates * self._certainty()[:, None]

    @cached_property
    def uniforms(self) -> Tensor:
        """[M, K, D]: what the masks are made of."""
        return self._at_parents(self.drawn)

    @cached_property
    def drawn(self) -> Tensor:
        """[B, N or 1, K, D]: ``uniforms`` as they are drawn, of every node or one for all."""
        return self._draw(self.context.output.hidden.shape[-1])

    def _draw(self, size: int) -> Tensor:
        rule, context = self._rule, self.context
        nodes = context.tree.num_nodes if rule.mask == "node" else 1
        return mask_uniforms(
            context.row_keys,
            rule.seed,
            context.steps,
            (nodes, rule.K, size),
            context.output.hidden.device,
            machine_code=context.head.native,
        )

    def _at_parents(self, drawn: Tensor) -> Tensor:
        row, node = self.parents.row, self.parents.node
        return drawn[row, node if self._rule.mask == "node" else torch.zeros_like(node)]

    def _certainty(self) -> Tensor:
        """[M] float32 in [0, 1]."""
        if self._rule.adapt == "entropy":
            size = self.context.logits.shape[-1]
            return (1 - self.parents.entropy / math.log(size)).clamp(0, 1)
        top = self.parents.top_log_probs(2).exp()
        # One token that may be chosen is as sure as can be.
        return top[:, 0] - top[:, 1:].sum(-1)

    @cached_property
    def choices(self) -> Tensor:
        """[M, K] int64: what each head says: its argmax, or at a temperature above 0 its sample."""
        sampler, parents, context = self.context.sampler, self.parents, self.context
        if self.noise is None:
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
        assert self.noise is not None
        return head_choices(
            self.parents.hidden[index],
            self.uniforms[index],
            self.rates[index],
            self.context.head,
            self.context.logits.shape[-1],
            self.noise,
        )

    def logits(self) -> Iterator[tuple[Tensor, slice]]:
        """The heads' logits [m, K, V], penalised, for some of the M nodes after the other.

        In parts, so that memory stays bounded: K = 16 at 60 nodes and a vocabulary of 152k are 146M
        numbers.
        """
        heads, size = self.rates.shape[1], self.context.logits.shape[-1]
        at_once = max(1, rows_at_once(size) // heads)
        for start in range(0, self.parents.count, at_once):
            part = slice(start, start + at_once)
            logits = self.context.head(self._noisy(part))
            if self.context.before is not None:
                before = self.context.before[self.parents.row[part], self.parents.node[part]]
                before = before.repeat_interleave(heads, 0)
                flat = self.context.sampler.penalise(logits.flatten(0, 1), before)
                logits = flat.view_as(logits)
            yield logits, part

    def _disturbed_weights(self) -> Tensor:
        """[M, K]: what the heads say whose weights are disturbed, not their inputs."""
        top = self.parents.logits.topk(min(_SWAG_TOKENS, self.parents.logits.shape[-1]))
        spread = self.parents.hidden.float().square() @ self.context.head.column_variance
        spread = (self.rates / (1 - self.rates)).sqrt() * spread.sqrt()[:, None]
        shaken = top.values[:, None].float() + spread[..., None] * normal(
            self._at_parents(self._draw(top.values.shape[-1]))
        )
        return top.indices.gather(1, self._say(shaken, slice(None)))

    @cached_property
    def noisy(self) -> Tensor:
        """[M, K, D]: the heads' inputs, in the model's dtype."""
        return self._noisy(slice(None))

    def _noisy(self, part: slice) -> Tensor:
        assert self.noise is not None
        hidden = self.parents.hidden[part, None]
        return self.noise(hidden, self.uniforms[part], self.rates[part, :, None])

    def picks(self, also: Tensor | None = None, eligible: Tensor | None = None) -> Tensor:
        """Whether some head says each node at its parent: [B, N] bool.

        Args:
            also: [B, N] bool, nodes that are accepted for other reasons, and here without a look.
            eligible: [B, N] bool, nodes that may be on a path. Given, nodes off the longest path of
                accepted nodes may be refused without a look.
        """
        sampler, head = self.context.sampler, self.context.head
        plain = sampler.greedy and not sampler.penalises and head.finish is None
        if plain and self.noise is not None and self.parents.count:
            return few_heads(self, also, eligible)
        picked = self.votes() > 0
        return picked if also is None else also | picked

    def votes(self) -> Tensor:
        """How many heads say each node at its parent: [B, N] int64."""
        said = self.parents.to_children(self.choices)
        return (said == self.context.tree.tokens[..., None]).sum(-1)

    def _say(self, logits: Tensor, part: slice) -> Tensor:
        sampler, context = self.context.sampler, self.context
        if sampler.greedy:
            return first_argmax(logits)
        # One number for each (step, node, head), from the masks' side: the sampling stream of the
        # answer itself must not notice that heads are there.
        keys = [
            f"heads {self._rule.seed} {context.row_keys[row]} {context.steps[row]} {node}"
            for row, node in zip(
                self.parents.row[part].tolist(), self.parents.node[part].tolist(), strict=True
            )
        ]
        uniforms = place_uniforms(keys, [0] * len(keys), logits.shape[1], logits.device)
        chosen = sampler.choose(sampler.scores(logits.flatten(0, 1)), uniforms.flatten())
        return chosen.view(logits.shape[:2])
