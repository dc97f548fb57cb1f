"""What drafters share that grow trees over a network with a cache of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from eagle_dropmatch.cache import TreeCache, put_rows
from eagle_dropmatch.drafts.base import Drafter, Observation, TreeShape
from eagle_dropmatch.drafts.budget import TreeBudget
from eagle_dropmatch.target import PREFILL_AT_ONCE
from eagle_dropmatch.tree import BeamLevel, DraftTree, Expansion, grow


class GrowingDrafter(Drafter):
    """Reads what was committed, then grows a tree behind it, level by level.

    A slot of the cache that a tree was drafted in is forgotten when the tree has been verified:
    only what was read from committed tokens stays.

    Args:
        shape: of the trees.
        device: where the network lies.
    """

    def __init__(self, shape: TreeShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._cache: TreeCache
        self._roots: Tensor
        #: What the next tree begins with, a tensor [B, ...] a name.
        self._ends: dict[str, Tensor] = {}
        self._tree: DraftTree | None = None
        # What was committed while the budget let the draft rest: (tokens, features, counts) each.
        self._unread: list[tuple[Tensor, Tensor, list[int]]] = []

    @abstractmethod
    def _read(
        self, tokens: Tensor, features: Tensor, positions: Tensor, seen: Tensor
    ) -> dict[str, Tensor]:
        """Run the network over new slots [B, S] behind an open cache; what it says of each slot.

        Args:
            tokens: [B, S] int64.
            features: [B, S, F], the target's features.
            positions: [B, S] int64, tokens before each slot.
            seen: [B, S, keys] bool, what each slot attends to.
        """

    @abstractmethod
    def _first(self, width: int) -> Expansion:
        """The root's children, from what the last committed slot said: [B, 1, width]."""

    @abstractmethod
    def _grow_level(self, level: BeamLevel, positions: Tensor, seen: Tensor) -> Expansion:
        """The children of a beam, in slots that the cache is open for.

        Args:
            positions: [B, R] int64; seen: [B, R, keys] bool, what each beam row attends to.
        """

    def observe(self, seen: Observation) -> None:
        self._roots = seen.bonus.to(self.device)
        longest = max(seen.counts)
        path = seen.path[:, :longest].clamp(min=0)
        features = seen.features.gather(
            1, path[..., None].expand(-1, -1, seen.features.shape[-1]).to(seen.features.device)
        )
        new = (
            seen.tokens[:, :longest].to(self.device),
            features.to(self.device),
            list(seen.counts),
        )
        if self.budget is None:
            self._extend(*new)
        elif self._tree is None:
            self._rested(self.budget, new)
        else:
            on_path = torch.zeros_like(self._tree.valid)
            on_path.scatter_(1, seen.path.clamp(min=0).to(self.device), True)
            self.budget.learn(self._tree.scores, self._tree.parents >= 0, on_path, seen.counts)
            self._extend(*new)

    def propose(self) -> DraftTree:
        if self.budget is not None:
            self.budget.begin(self._cache.batch, self._cache.max_length)
        if self.budget is not None and self.budget.resting:
            self._tree = None
            return DraftTree.root_only(self._roots)
        self._tree = grow(
            self._roots,
            self._first(self.shape.top_k),
            self._expand,
            depth=self.shape.depth,
            top_k=self.shape.top_k,
            total_token=self.shape.total_token,
            policy=self.budget,
        )
        return self._tree

    def select(self, rows: Tensor) -> None:
        self._cache.select(rows)
        if self._tree is not None:
            self._tree = self._tree.rows(rows)
        kept = rows.tolist()
        self._unread = [
            (tokens[rows], features[rows], [counts[row] for row in kept])
            for tokens, features, counts in self._unread
        ]
        self._roots = self._roots[rows]
        self._ends = {name: values[rows] for name, values in self._ends.items()}

    def join(self, seats: Sequence[int], guests: Self) -> None:
        self._read_up()
        self._cache.put(seats, guests._cache)
        self._roots = put_rows(self._roots, seats, guests._roots)
        for name, values in guests._ends.items():
            self._ends[name] = put_rows(self._ends[name], seats, values)

    def pretend(self, context: int) -> None:
        self._cache.pretend(context)

    def _rested(self, budget: TreeBudget, new: tuple[Tensor, Tensor, list[int]]) -> None:
        """Put off what a step without drafts committed; at the end of the rest read all of it."""
        budget.rested()
        self._unread.append(new)
        if not budget.resting:
            self._read_up()

    def _read_up(self) -> None:
        """Read what was put off."""
        if not self._unread:
            return
        tokens, features, counts = zip(*self._unread, strict=True)
        self._unread = []
        # One slot a step and row: rows that ended have none from there on.
        totals = [sum(each) for each in zip(*counts, strict=True)]
        self._extend(torch.cat(tokens, dim=1), torch.cat(features, dim=1), totals)

    def _extend(self, tokens: Tensor, features: Tensor, counts: list[int]) -> None:
        """Read committed slots; keep what each row's last one said."""
        batch, size = tokens.shape
        # In parts: the mask of a long prompt at once would be the square of its length.
        part = max(PREFILL_AT_ONCE // batch, 1)
        rows = torch.arange(batch, device=tokens.device)
        for start in range(0, size, part):
            here = tokens[:, start : start + part]
            mine = [min(max(count - start, 0), here.shape[1]) for count in counts]
            steps = torch.arange(here.shape[1], device=tokens.device)
            self._cache.open(here.shape[1])
            slots = torch.arange(self._cache.key_length, device=tokens.device)
            positions = self._cache.lengths[:, None] + steps
            seen = slots <= positions[..., None]
            said = self._read(here, features[:, start : start + part], positions, seen)
            self._cache.commit(mine)
            last = torch.tensor(mine, device=tokens.device) - 1
            found = {name: each[rows, last.clamp(min=0)] for name, each in said.items()}
            if start:  # rows that ended before keep what they had
                ended = (last < 0)[:, None]
                found = {
                    name: torch.where(ended, self._ends[name], each) for name, each in found.items()
                }
            self._ends = found

    def _expand(self, level: BeamLevel) -> Expansion:
        """One level of growth: every beam row attends to the context and to its own ancestors."""
        width = level.tokens.shape[1]
        self._cache.open(width, behind=level.index * width)
        lengths = self._cache.lengths[:, None]
        slots = torch.arange(self._cache.key_length, device=lengths.device)
        seen = (slots < lengths)[:, None].repeat(1, width, 1)
        drafted = lengths + torch.arange(level.visible.shape[-1], device=lengths.device)
        seen.scatter_(2, drafted[:, None].expand(-1, width, -1), level.visible)
        return self._grow_level(level, (lengths + level.index).expand(-1, width), seen)


def likeliest(logits: Tensor, width: int, *, keep: bool) -> Expansion:
    """The ``width`` likeliest tokens of logits [B, R, C], with float32 log-probabilities.

    keep: also keep the logits.
    """
    logits = logits.float()
    top = logits.topk(width, dim=-1)
    log_probs = top.values - logits.logsumexp(-1, keepdim=True)
    return Expansion(top.indices, log_probs, logits if keep else None)
