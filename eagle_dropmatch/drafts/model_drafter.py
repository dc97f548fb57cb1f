"""Drafting with a separate, smaller language model: chains as in speculative decoding, or trees."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_dropmatch.drafts.base import DraftPrompt, TreeShape
from eagle_dropmatch.drafts.growing import GrowingDrafter, likeliest
from eagle_dropmatch.target import TargetModel
from eagle_dropmatch.tree import BeamLevel, Expansion, additive


class ModelDrafter(GrowingDrafter):
    """Keeps the small model's keys and values of all committed tokens, the root included.

    Args:
        model: the small model, of the target's vocabulary.
        shape: of the trees; a top_k of 1 drafts chains.
        vocab_size: of the target: tokens beyond it are never proposed.
    """

    def __init__(self, model: TargetModel, shape: TreeShape, vocab_size: int) -> None:
        super().__init__(shape, model.device)
        self.model = model
        self._size = min(vocab_size, model.vocab_size)

    @property
    def vocabulary(self) -> Tensor:
        return torch.arange(self._size, device=self.device)

    def describe(self) -> str:
        return f"{self.model.config.to_json_string()} {self.model.modules}"

    def start(self, prompt: DraftPrompt) -> None:
        batch, size = prompt.tokens.shape
        room = size + 64 + self.shape.levels * self.shape.top_k
        self._cache = self.model.new_cache(batch, room)
        self._roots = prompt.roots.to(self.device)
        tokens = F.pad(prompt.tokens, (0, 1)).to(self.device)
        ends = torch.tensor(prompt.lengths, device=self.device)
        tokens.scatter_(1, ends[:, None], self._roots[:, None])
        # The features are read by nobody.
        none = tokens[..., None]
        self._extend(tokens, none, [length + 1 for length in prompt.lengths])

    def _read(
        self, tokens: Tensor, features: Tensor, positions: Tensor, seen: Tensor
    ) -> dict[str, Tensor]:
        return {"hidden": self._forward(tokens, positions, seen)}

    def _first(self, width: int) -> Expansion:
        return self._best(self._ends["hidden"][:, None], width)

    def _grow_level(self, level: BeamLevel, positions: Tensor, seen: Tensor) -> Expansion:
        return self._best(self._forward(level.tokens, positions, seen), level.tokens.shape[1])

    def _forward(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        mask = additive(seen, self.model.dtype)[:, None]
        return self.model.read(tokens, mask, positions, self._cache)[0]

    def _best(self, hidden: Tensor, width: int) -> Expansion:
        logits = self.model.head(hidden)[..., : self._size]
        return likeliest(logits, width, keep=self.keep_logits)
