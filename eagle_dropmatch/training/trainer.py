"""Training an EAGLE-3 draft by training-time test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle_dropmatch.drafts.checkpoint import save_draft
from eagle_dropmatch.drafts.eagle3 import Eagle3Draft
from eagle_dropmatch.taps import default_tap_layers
from eagle_dropmatch.training.batches import Batch
from eagle_dropmatch.training.card import DraftCard, write_card
from eagle_dropmatch.training.corpus import Example
from eagle_dropmatch.training.options import TrainOptions
from eagle_dropmatch.training.teacher import Teacher
from eagle_dropmatch.training.training_run import TrainingRun, Worker
from eagle_dropmatch.training.ttt import ChunkLoss, chunk_loss, matched_lengths, ttt_loss


class Trainer(TrainingRun):
    """Trains ``draft`` against the frozen target ``model``."""

    def __init__(
        self,
        draft: Eagle3Draft,
        model: Any,
        examples: Sequence[Example],
        out: Path,
        options: TrainOptions,
        *,
        stop_ids: Sequence[int],
        worker: Worker | None = None,
        card: DraftCard | None = None,
        kernel: ChunkLoss = chunk_loss,
    ) -> None:
        super().__init__(examples, out, options, stop_ids=stop_ids, worker=worker, card=card)
        self.draft, self.kernel, self.device = draft, kernel, draft.device
        layers = model.config.get_text_config().num_hidden_layers
        taps = draft.config.tap_layers or default_tap_layers(layers)
        self.teacher = Teacher(model, taps, draft.d2t)
        if draft.embed_tokens is not None:
            draft.embed_tokens.requires_grad_(False)
        self._prepare([p for p in draft.parameters() if p.requires_grad], model)

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return ttt_loss(
            self.draft,
            self.teacher(batch),
            steps=self.options.ttt_steps_at(self.step),
            decay=self.options.ttt_decay,
            block=self.options.attention_block,
            kernel=self.kernel,
        )

    def _matched(self, batch: Batch, steps: int) -> Tensor:
        return matched_lengths(self.draft, self.teacher(batch), steps, self.options.attention_block)

    def _export(self, folder: Path, card: DraftCard) -> None:
        save_draft(self.draft, folder, extra_config={"training": card.summary()})
        write_card(folder, card, self.draft.config)

    def _identity(self) -> dict[str, Tensor]:
        return {"draft vocabulary": self.draft.d2t}
