"""Drafting with an EAGLE-3 network: extend by true features, then grow a tree level by level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_dropmatch.cache import TreeCache, put_rows
from eagle_dropmatch.drafts.base import Drafter, DraftPrompt, Observation, TreeShape
from eagle_dropmatch.drafts.budget import TreeBudget
from eagle_dropmatch.drafts.eagle3 import Eagle3Draft, grouped_attention
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.target import PREFILL_AT_ONCE
from eagle_dropmatch.tree import BeamLevel, DraftTree, Expansion, grow


class Eagle3Drafter(Drafter):
    """Keeps the draft's keys and values of committed slots and grows trees behind them.

    Slot t holds the feature of target position t and the token at t + 1, at rotary position t.
    Only slots built from the target's own features stay; a drafted slot is forgotten when its
    tree has been verified (contract of the public reference, and what keeps acceptance up).
    """

    def __init__(self, draft: Eagle3Draft, shape: TreeShape) -> None:
        if shape.top_k > draft.config.draft_vocab_size:
            raise UserError(
                f"top_k is {shape.top_k}, but the draft's vocabulary has only "
                f"{draft.config.draft_vocab_size} tokens: give a smaller top_k"
            )
        self.draft = draft
        self.shape = shape
        # Each row's last output, from which it drafts: [B, H].
        self._feature: Tensor
        self._head_input: Tensor
        self._tree: DraftTree | None = None
        # What was committed while the budget let the draft rest: (tokens, features, counts) each.
        self._unread: list[tuple[Tensor, Tensor, list[int]]] = []

    @property
    def vocabulary(self) -> Tensor:
        return self.draft.target_ids

    def start(self, prompt: DraftPrompt) -> None:
        batch, size = prompt.tokens.shape
        config, device = self.draft.config, self.draft.device
        self._cache = TreeCache(
            [device],
            batch,
            config.num_key_value_heads,
            config.head_dim,
            size + 64 + self.shape.levels * self.shape.top_k,
            self.draft.dtype,
        )
        self._roots = prompt.roots.to(device)
        tokens = F.pad(prompt.tokens[:, 1:], (0, 1)).to(device)
        last = torch.tensor(prompt.lengths, device=device) - 1
        tokens.scatter_(1, last[:, None], self._roots[:, None])
        self._extend(tokens, prompt.features.to(device), list(prompt.lengths))

    def observe(self, seen: Observation) -> None:
        device = self.draft.device
        self._roots = seen.bonus.to(device)
        longest = max(seen.counts)
        path = seen.path[:, :longest].clamp(min=0)
        features = seen.features.gather(
            1, path[..., None].expand(-1, -1, seen.features.shape[-1]).to(seen.features.device)
        )
        new = seen.tokens[:, :longest].to(device), features.to(device), list(seen.counts)
        if self.budget is None:
            self._extend(*new)
        elif self._tree is None:
            self._rested(self.budget, new)
        else:
            on_path = torch.zeros_like(self._tree.valid)
            on_path.scatter_(1, seen.path.clamp(min=0).to(device), True)
            self.budget.learn(self._tree.scores, self._tree.parents >= 0, on_path, seen.counts)
            self._extend(*new)

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

    def select(self, rows: Tensor) -> None:
        self._cache.select(rows)
        if self._tree is not None:
            self._tree = self._tree.rows(rows)
        kept = rows.tolist()
        self._unread = [
            (tokens[rows], features[rows], [counts[row] for row in kept])
            for tokens, features, counts in self._unread
        ]
        self._roots, self._feature = self._roots[rows], self._feature[rows]
        self._head_input = self._head_input[rows]

    def join(self, seats: Sequence[int], guests: Self) -> None:
        self._read_up()
        self._cache.put(seats, guests._cache)
        self._roots = put_rows(self._roots, seats, guests._roots)
        self._feature = put_rows(self._feature, seats, guests._feature)
        self._head_input = put_rows(self._head_input, seats, guests._head_input)

    def pretend(self, context: int) -> None:
        self._cache.pretend(context)

    def propose(self) -> DraftTree:
        if self.budget is not None:
            self.budget.begin(self._cache.batch, self._cache.max_length)
        if self.budget is not None and self.budget.resting:
            self._tree = None
            return DraftTree.root_only(self._roots)
        width = self.shape.top_k
        self._beam = self._feature[:, None].expand(-1, width, -1)
        self._tree = grow(
            self._roots,
            self._best(self._head_input[:, None], width),
            self._expand,
            depth=self.shape.depth,
            top_k=width,
            total_token=self.shape.total_token,
            policy=self.budget,
        )
        return self._tree

    def _extend(self, tokens: Tensor, features: Tensor, counts: list[int]) -> None:
        """Append slots with true features; keep each row's last output, from which it drafts."""
        batch, size = tokens.shape
        # In parts: the mask of a long prompt at once would be the square of its length.
        part = max(PREFILL_AT_ONCE // batch, 1)
        rows = torch.arange(batch, device=tokens.device)
        for start in range(0, size, part):
            here = tokens[:, start : start + part]
            mine = [min(max(count - start, 0), here.shape[1]) for count in counts]
            positions = self._cache.lengths[:, None] + torch.arange(
                here.shape[1], device=tokens.device
            )
            self._cache.open(here.shape[1])
            slots = torch.arange(self._cache.key_length, device=tokens.device)
            seen = slots <= positions[..., None]
            fused = self.draft.fuse(features[:, start : start + part])
            feature, head_input = self._forward(here, fused, positions, seen)
            self._cache.commit(mine)
            last = torch.tensor(mine, device=tokens.device) - 1
            found = feature[rows, last.clamp(min=0)], head_input[rows, last.clamp(min=0)]
            if start:  # rows that ended before keep what they had
                ended = (last < 0)[:, None]
                found = (
                    torch.where(ended, self._feature, found[0]),
                    torch.where(ended, self._head_input, found[1]),
                )
            self._feature, self._head_input = found

    def _expand(self, level: BeamLevel) -> Expansion:
        """One level of growth: every beam row attends to the context and to its own ancestors."""
        width = level.tokens.shape[1]
        if level.index > 0:
            rows = level.parent_rows[..., None].expand(-1, -1, self._beam.shape[-1])
            self._beam = self._beam.gather(1, rows)
        self._cache.open(width, behind=level.index * width)
        lengths = self._cache.lengths[:, None]
        slots = torch.arange(self._cache.key_length, device=lengths.device)
        seen = (slots < lengths)[:, None].repeat(1, width, 1)
        drafted = lengths + torch.arange(level.visible.shape[-1], device=lengths.device)
        seen.scatter_(2, drafted[:, None].expand(-1, width, -1), level.visible)
        positions = (lengths + level.index).expand(-1, width)
        self._beam, head_input = self._forward(level.tokens, self._beam, positions, seen)
        return self._best(head_input, width)

    def _forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The network over new slots; ``seen`` [B, S, keys] says what each attends to."""
        mask = torch.zeros(seen.shape, dtype=self.draft.dtype, device=seen.device)
        mask.masked_fill_(~seen, torch.finfo(self.draft.dtype).min)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.write(k.device, 0, k, v)
            return grouped_attention(q, keys, values, mask)

        embeds, features = self.draft.embed(tokens), features.to(self.draft.dtype)
        if self.draft.compiled is not None:
            return self.draft.compiled(embeds, features, positions, mask, self._cache)
        return self.draft(embeds, features, positions, attend)

    def _best(self, head_input: Tensor, width: int) -> Expansion:
        """The ``width`` likeliest children, as target ids, with float32 log-probabilities."""
        logits = self.draft.logits(head_input).float()
        top = logits.topk(width, dim=-1)
        log_probs = top.values - logits.logsumexp(-1, keepdim=True)
        kept = logits if self.keep_logits else None
        return Expansion(self.draft.to_target_ids(top.indices), log_probs, kept)
