"""Drafting with an EAGLE-3 network: extend by true features, then grow a tree level by level."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_dropmatch.cache import TreeCache
from eagle_dropmatch.drafts.base import DraftPrompt, TreeShape
from eagle_dropmatch.drafts.eagle3 import Eagle3Draft, grouped_attention
from eagle_dropmatch.drafts.growing import GrowingDrafter, likeliest
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.tree import BeamLevel, Expansion, additive


class Eagle3Drafter(GrowingDrafter):
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
        super().__init__(shape, draft.device)
        self.draft = draft

    @property
    def vocabulary(self) -> Tensor:
        return self.draft.target_ids

    def describe(self) -> str:
        return repr(self.draft.config)

    def start(self, prompt: DraftPrompt) -> None:
        batch, size = prompt.tokens.shape
        config = self.draft.config
        self._cache = TreeCache(
            [self.device],
            batch,
            config.num_key_value_heads,
            config.head_dim,
            size + 64 + self.shape.levels * self.shape.top_k,
            self.draft.dtype,
        )
        self._roots = prompt.roots.to(self.device)
        tokens = F.pad(prompt.tokens[:, 1:], (0, 1)).to(self.device)
        last = torch.tensor(prompt.lengths, device=self.device) - 1
        tokens.scatter_(1, last[:, None], self._roots[:, None])
        self._extend(tokens, prompt.features.to(self.device), list(prompt.lengths))

    def _read(
        self, tokens: Tensor, features: Tensor, positions: Tensor, seen: Tensor
    ) -> dict[str, Tensor]:
        feature, head_input = self._forward(tokens, self.draft.fuse(features), positions, seen)
        return {"feature": feature, "head_input": head_input}

    def _first(self, width: int) -> Expansion:
        self._beam = self._ends["feature"][:, None].expand(-1, width, -1)
        return self._best(self._ends["head_input"][:, None], width)

    def _grow_level(self, level: BeamLevel, positions: Tensor, seen: Tensor) -> Expansion:
        if level.index > 0:
            rows = level.parent_rows[..., None].expand(-1, -1, self._beam.shape[-1])
            self._beam = self._beam.gather(1, rows)
        self._beam, head_input = self._forward(level.tokens, self._beam, positions, seen)
        return self._best(head_input, level.tokens.shape[1])

    def _forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The network over new slots; ``seen`` [B, S, keys] says what each attends to."""
        mask = additive(seen, self.draft.dtype)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.write(k.device, 0, k, v)
            return grouped_attention(q, keys, values, mask)

        embeds, features = self.draft.embed(tokens), features.to(self.draft.dtype)
        if self.draft.compiled is not None:
            return self.draft.compiled(embeds, features, positions, mask, self._cache)
        return self.draft(embeds, features, positions, attend)

    def _best(self, head_input: Tensor, width: int) -> Expansion:
        """The ``width`` likeliest children, as target ids."""
        found = likeliest(self.draft.logits(head_input), width, keep=self.keep_logits)
        return found._replace(tokens=self.draft.to_target_ids(found.tokens))
