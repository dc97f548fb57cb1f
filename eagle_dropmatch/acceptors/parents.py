"""The target's distributions where a tree branches: what rules compare a draft token with.

Only nodes with children need one. They are listed once a step, [M, ...], and every value of theirs
can be handed to their children, [B, N].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from eagle_dropmatch.sampling import Sampler, Scores, rows_at_once
from eagle_dropmatch.tree import DraftTree

_AT_ONCE = 64  # nodes whose whole rows are compared together


class Parents:
    """The M nodes of a batch of trees that have children.

    Attributes:
        row, node: [M] int64, where they stand, row by row.
        slot: [B, N] int64, which of the M each node's parent is; 0 at roots and padding, whose
            values nobody reads.
        hidden: [M, D], the LM head's input there.
    """

    def __init__(self, tree: DraftTree, hidden: Tensor, logits: Tensor, sampler: Sampler) -> None:
        self.tree, self.sampler = tree, sampler
        above = tree.parents.clamp(min=0)
        is_child = tree.valid & (tree.parents >= 0)
        has_child = torch.zeros_like(above).scatter_add_(1, above, is_child.long()) > 0
        self.row, self.node = has_child.nonzero(as_tuple=True)
        number = (has_child.flatten().cumsum(0) - 1).view_as(above).clamp(min=0)
        self.slot = number.gather(1, above).where(is_child, 0)
        self._hidden, self._logits = hidden, logits

    @property
    def count(self) -> int:
        """M."""
        return self.row.shape[0]

    @cached_property
    def hidden(self) -> Tensor:
        return self._hidden[self.row, self.node]

    @cached_property
    def logits(self) -> Tensor:
        """[M, V], the clean logits in the model's dtype."""
        return self._logits[self.row, self.node]

    def parts(self) -> Iterator[tuple[slice, Scores]]:
        """The M nodes in parts, with what may be said there: unnormalised log-probabilities in
        float32 [m, C] of the tokens ``ids`` (None: of all).

        In parts, so that float32 copies of many nodes' whole rows never exist together.
        """
        size = rows_at_once(self._logits.shape[-1])
        if self.count <= size:
            yield slice(0, self.count), self._scores
            return
        for start in range(0, self.count, size):
            part = slice(start, start + size)
            yield part, self._scores_of(self.logits[part])

    @cached_property
    def _scores(self) -> Scores:
        return self._scores_of(self.logits)

    def _scores_of(self, logits: Tensor) -> Scores:
        if self.sampler.greedy:
            return Scores(logits.float(), None)
        return self.sampler.scores(logits)

    @cached_property
    def log_z(self) -> Tensor:
        """[M] float32: the scores' log-sum-exp."""
        return torch.cat([scores.values.logsumexp(-1) for _, scores in self.parts()])

    @cached_property
    def entropy(self) -> Tensor:
        """[M] float32, in nats."""
        found = [
            torch.special.entr((scores.values - self.log_z[part, None]).exp_()).sum(-1)
            for part, scores in self.parts()
        ]
        return torch.cat(found)

    @cached_property
    def best(self) -> Tensor:
        """[M] float32: the greatest log-probability."""
        return torch.cat([scores.values.amax(-1) for _, scores in self.parts()]) - self.log_z

    @cached_property
    def likeliest(self) -> Tensor:
        """[M] int64: the likeliest token."""
        found = []
        for _, scores in self.parts():
            column = scores.values.max(dim=-1).indices
            ids = scores.ids
            found.append(column if ids is None else ids.gather(1, column[:, None])[:, 0])
        return torch.cat(found)

    def top_log_probs(self, count: int) -> Tensor:
        """[M, count] float32: of the likeliest tokens, or of all where fewer may be said."""
        found = []
        for part, scores in self.parts():
            top = scores.values.topk(min(count, scores.values.shape[-1]), dim=-1).values
            found.append(top - self.log_z[part, None])
        return torch.cat(found)

    def to_children(self, values: Tensor) -> Tensor:
        """Values [M, ...] of the parents, at each of their children: [B, N, ...]."""
        if not self.count:  # trees of a root alone
            return values.new_zeros(*self.slot.shape, *values.shape[1:])
        return values[self.slot]

    @cached_property
    def child_scores(self) -> Tensor:
        """[B, N] float32: each node's score at its parent, -inf where it cannot be chosen."""

        def score(scores: Scores, slot: Tensor, tokens: Tensor) -> Tensor:
            if scores.ids is None:
                return scores.values[slot, tokens]
            same = scores.ids[slot] == tokens[:, None]
            return scores.values[slot].masked_fill(~same, -torch.inf).amax(-1)

        return self._of_children(score, torch.float32)

    @cached_property
    def child_log_probs(self) -> Tensor:
        """[B, N] float32: the target's log-probability of each node after its parent."""
        return self.child_scores - self.to_children(self.log_z)

    @cached_property
    def child_ranks(self) -> Tensor:
        """[B, N] int64: how many tokens are likelier than the node at its parent; 0 is the best."""
        own = self.child_scores.flatten()

        def rank(scores: Scores, slot: Tensor, places: Tensor) -> Tensor:
            # In parts: all nodes' whole rows at once would be B * N * V.
            found = [
                (scores.values[which] > own[place, None]).sum(-1)
                for which, place in zip(slot.split(_AT_ONCE), places.split(_AT_ONCE), strict=True)
            ]
            return torch.cat(found)

        return self._of_children(rank, torch.int64, places=True)

    def _of_children(
        self,
        value: Callable[[Scores, Tensor, Tensor], Tensor],
        dtype: torch.dtype,
        *,
        places: bool = False,
    ) -> Tensor:
        """A value of each node: [B, N]. 0 where trees are roots alone.

        Args:
            value: from the scores of some parents, which of them are asked for, and the children's
                tokens or, with ``places``, where they stand among all B * N nodes.
        """
        tokens, slots = self.tree.tokens.flatten(), self.slot.flatten()
        out = torch.zeros(tokens.shape, dtype=dtype, device=tokens.device)
        asked = torch.arange(len(tokens), device=tokens.device) if places else tokens
        for part, scores in self.parts():
            if part.start == 0 and part.stop >= self.count:
                if self.count:
                    out = value(scores, slots, asked)
                break
            mine = ((slots >= part.start) & (slots < part.stop)).nonzero()[:, 0]
            out[mine] = value(scores, slots[mine] - part.start, asked[mine])
        return out.view_as(self.slot)
