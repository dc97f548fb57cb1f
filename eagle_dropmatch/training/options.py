"""What decides a training run; plain values, known before torch is imported."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TrainOptions:
    """Everything that decides a run. ``fixed`` must not change on resume."""

    steps: int = 4000
    positions: int = 4096  # padded positions a step, all workers together
    learning_rate: float = 1e-3
    warmup: int = 100
    decay_steps: int = 800
    ttt_steps: int = 5
    ttt_start: int = 3  # steps of training-time test before ``ttt_full_at``
    ttt_full_at: int = 0
    ttt_decay: float = 0.8
    clip: float = 0.5
    seed: int = 0
    held_out: int = 64
    eval_every: int = 400
    save_every: int = 100
    eval_steps: int = 7
    attention_block: int = 64  # rows that attend together; 0: the whole sequence

    @property
    def fixed(self) -> dict[str, Any]:
        """The part that must be the same when a run is resumed."""
        free = ("steps", "decay_steps", "eval_every", "save_every", "attention_block")
        return {k: v for k, v in asdict(self).items() if k not in free}

    def ttt_steps_at(self, step: int) -> int:
        return self.ttt_steps if step >= self.ttt_full_at else min(self.ttt_start, self.ttt_steps)


@dataclass(frozen=True)
class RunSpec:
    """What a training run is made of; plain values, so that it crosses to worker processes."""

    target: str  # folder or hub id; empty for the reference target
    data: tuple[str, ...]
    out: str
    options: TrainOptions
    draft_vocab: int = 8192
    max_length: int = 768
    init_draft: str | None = None
    workers: int = 1  # 0, and auto below: what ``launch.settle`` finds
    threads: int = 1
    dtype: str = "bfloat16"
    device: str = "cpu"
    attn_implementation: str | None = None  # of the frozen target; None: transformers' choice
    compile: bool = False  # fuse the small operations with torch.compile
    base_model: str | None = None  # the target's public name, for the draft's card
    layers: int | None = None  # of a small language model to distil; None: an EAGLE-3 draft
