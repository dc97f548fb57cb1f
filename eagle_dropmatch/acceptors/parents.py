"""The target's distributions where a tree branches: what rules compare a draft token with.

Only nodes with children need one. They are listed once a step, [M, ...], and every value of theirs
can be handed to their children, [B, N].
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from eagle_dropmatch.sampling import Sampler, Scores
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

    @cached_property
    def scores(self) -> Tensor:
        """[M, C] float32, unnormalised log-probabilities of the tokens ``ids`` (or of all V)."""
        return self._scores.values

    @cached_property
    def _scores(self) -> Scores:
        if self.sampler.greedy:
            return Scores(self.logits.float(), None)
        return self.sampler.scores(self.logits)

    @property
    def ids(self) -> Tensor | None:
        """[M, C] int64, or None where column c is token c."""
        return self._scores.ids

    @cached_property
    def log_z(self) -> Tensor:
        """[M] float32: the scores' log-sum-exp."""
        return self.scores.logsumexp(-1)

    @cached_property
    def log_probs(self) -> Tensor:
        """[M, C] float32."""
        return self.scores - self.log_z[:, None]

    @cached_property
    def entropy(self) -> Tensor:
        """[M] float32, in nats."""
        return torch.special.entr(self.log_probs.exp()).sum(-1)

    @cached_property
    def best(self) -> Tensor:
        """[M] float32: the greatest log-probability."""
        return self.scores.amax(-1) - self.log_z

    def to_children(self, values: Tensor) -> Tensor:
        """Values [M, ...] of the parents, at each of their children: [B, N, ...]."""
        if not self.count:  # trees of a root alone
            return values.new_zeros(*self.slot.shape, *values.shape[1:])
        return values[self.slot]

    @cached_property
    def child_scores(self) -> Tensor:
        """[B, N] float32: each node's score at its parent, -inf where it cannot be chosen."""
        tokens = self.tree.tokens
        if not self.count:
            return torch.zeros(tokens.shape, device=tokens.device)
        if self.ids is None:
            return self.scores[self.slot, tokens]
        same = self.ids[self.slot] == tokens[..., None]
        return self.scores[self.slot].masked_fill(~same, -torch.inf).amax(-1)

    @cached_property
    def child_log_probs(self) -> Tensor:
        """[B, N] float32: the target's log-probability of each node after its parent."""
        return self.child_scores - self.to_children(self.log_z)

    @cached_property
    def child_ranks(self) -> Tensor:
        """[B, N] int64: how many tokens are likelier than the node at its parent; 0 is the best."""
        if not self.count:
            return torch.zeros_like(self.tree.tokens)
        slots, scores = self.slot.flatten(), self.child_scores.flatten()
        # In parts: all nodes' whole rows at once would be B * N * V.
        ranks = [
            (self.scores[slot] > score[:, None]).sum(-1)
            for slot, score in zip(slots.split(_AT_ONCE), scores.split(_AT_ONCE), strict=True)
        ]
        return torch.cat(ranks).view_as(self.slot)
