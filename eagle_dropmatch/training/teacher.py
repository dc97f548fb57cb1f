"""The frozen target as a teacher: feature taps and its distribution over the draft's vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_dropmatch.taps import FeatureTaps, backbone, decoder_layers
from eagle_dropmatch.target import logits_finisher
from eagle_dropmatch.training.batches import Batch
from eagle_dropmatch.training.ttt import TeacherBatch


class Teacher:
    """Runs the target over whole sequences, without a cache and without its full LM head.

    Args:
        model: a transformers causal model.
        tap_layers: indices into ``hidden_states``.
        d2t: [V_draft] int64 offsets, the draft's vocabulary.
        chunk: positions whose float32 logits exist at once.
    """

    def __init__(
        self, model: Any, tap_layers: tuple[int, ...], d2t: Tensor, chunk: int = 512
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.taps = FeatureTaps(decoder_layers(model), tap_layers)
        ids = d2t + torch.arange(d2t.shape[0], device=d2t.device)
        module = model.get_output_embeddings()
        head = module.weight
        self.head = head.detach()[ids.to(head.device)].contiguous()
        bias = getattr(module, "bias", None)
        self.bias = None if bias is None else bias.detach()[ids.to(bias.device)]
        self.finish = logits_finisher(model.config.get_text_config())
        self.to_draft = torch.full((head.shape[0],), -1, dtype=torch.int64)
        self.to_draft[ids.cpu()] = torch.arange(d2t.shape[0])
        self.to_draft = self.to_draft.to(head.device)
        self.chunk = chunk

    @torch.no_grad()
    def __call__(self, batch: Batch) -> TeacherBatch:
        """Teach one batch. Right padding needs no mask: causal rows never see it."""
        tokens = batch.tokens.to(self.head.device)
        with self.taps:
            hidden = backbone(self.model)(input_ids=tokens, use_cache=False).last_hidden_state
        flat = hidden.flatten(0, 1).to(self.head.device)
        probs = torch.empty(flat.shape[0], self.head.shape[0], dtype=flat.dtype, device=flat.device)
        for start in range(0, flat.shape[0], self.chunk):
            logits = F.linear(flat[start : start + self.chunk], self.head, self.bias)
            if self.finish is not None:
                logits = self.finish(logits)
            probs[start : start + self.chunk] = logits.float().softmax(-1)
        following = torch.full_like(tokens, -1)
        following[:, :-1] = self.to_draft[tokens[:, 1:]]
        return TeacherBatch(
            tokens, batch.supervised.to(tokens.device), self.taps.joined(), probs, following
        )
