"""A tokenizer, a decoder and arms that behave like the real ones and cost nothing.

The text of an answer is a function of its prompt, so an arm that lost its history, or got another
arm's, answers something else.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from eagle_dropmatch.answer_queue import QueuedAnswer
from eagle_dropmatch.drafts.base import TreeShape
from eagle_dropmatch.evals.arms import Turn
from eagle_dropmatch.evals.base import Question
from eagle_dropmatch.evals.plan import ArmSpec
from eagle_dropmatch.evals.quality import TurnQuality
from eagle_dropmatch.stats import GenerationStats, RowStats

BOS, EOS, PAD = 1, 2, 3


class CharTokenizer:
    """One id a character (its code point + 10); a template with its own BOS."""

    chat_template = "{{ bos }}{{ messages }}"
    name_or_path = "char"
    bos_token_id, eos_token_id, pad_token_id = BOS, EOS, PAD

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, **extra):
        assert not tokenize
        assert add_generation_prompt
        text = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
        return f"<s>{text}<assistant>"

    def __call__(self, text, add_special_tokens=True):
        body = [ord(c) + 10 for c in text.removeprefix("<s>")]
        own = [BOS] if text.startswith("<s>") else []
        return {"input_ids": [*([BOS] if add_special_tokens else []), *own, *body]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i - 10) for i in ids if i >= 10)


def answer_ids(prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """What the fake target answers: letters that depend on the whole prompt, then a stop token."""
    state = zlib.crc32(repr(list(prompt_ids)).encode())
    length = 3 + state % 9
    letters = [ord("a") + 10 + (state >> i) % 26 for i in range(length)]
    return [*letters, EOS][:max_new_tokens]


def grouped(count: int, size: int) -> list[int]:
    """``count`` tokens committed in steps of ``size``, the last one cut."""
    full, rest = divmod(count, size)
    return [size] * full + ([rest] if rest else [])


def make_row(ids: Sequence[int], prompt: int, step: int, *, relaxed: int = 0) -> RowStats:
    lengths = grouped(len(ids) - 1, step)
    return RowStats(
        accept_lengths=lengths,
        strict_accept_lengths=[max(1, n - relaxed) for n in lengths],
        relaxed_tokens=[min(relaxed, n - 1) for n in lengths],
        draft_nodes=[step * 2] * len(lengths),
        prompt_tokens=prompt,
        output_tokens=len(ids),
        finish_reason="stop" if ids[-1] == EOS else "length",
    )


@dataclass
class FakeQueue:
    """Answers in another order than they were asked for, several of them waiting."""

    arm: FakeArm
    seats: int
    max_new_tokens: int
    waiting: list[Any] = field(default_factory=list)

    def submit(self, prompt_ids, *, seed, tag):
        self.waiting.append((prompt_ids, seed, tag))

    def __iter__(self):
        while self.waiting:
            seated = self.waiting[: self.seats]
            asked = min(seated, key=lambda each: len(each[0]))
            self.waiting.remove(asked)
            prompt, seed, tag = asked
            turn = self.arm.answer(prompt, max_new_tokens=self.max_new_tokens, seed=seed)
            yield tag, turn._replace(latency=2 * turn.wall_seconds)


@dataclass
class FakeArm:
    """An arm of known speed: every token takes ``seconds``."""

    spec: ArmSpec
    seconds: float = 0.01
    step: int = 1
    log: list[str] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    suffix: str = ""
    kill_after: int | None = None
    queues: list[int] = field(default_factory=list)

    def answer(self, prompt_ids, *, max_new_tokens, seed):
        if self.kill_after is not None and len(self.log) >= self.kill_after:
            raise KeyboardInterrupt
        self.log.append(self.spec.name)
        self.prompts.append(list(prompt_ids))
        ids = answer_ids(prompt_ids, max_new_tokens)
        if self.suffix:
            ids = [*ids[:-1], *(ord(c) + 10 for c in self.suffix), EOS]
        row = make_row(ids, len(prompt_ids), self.step)
        return Turn(ids, self.seconds * len(ids), row, 0.001, self.seconds * len(ids) - 0.001)

    def queue(self, batch_size, *, max_new_tokens):
        self.queues.append(batch_size)
        return FakeQueue(self, batch_size, max_new_tokens)


def spec(name: str, *, group: str | None = None, lossy: bool = False, seed: int | None = None):
    acceptance = "none" if name in ("plain", "hf") else (group or name)
    return ArmSpec(name, group or name, f"label {group or name}", acceptance, lossy, seed)


def make_questions(count: int) -> list[Question]:
    return [Question(100 + i, "writing", (f"첫 질문 {i}", f"follow-up {i}")) for i in range(count)]


def fake_judge(prompt_ids, output_ids) -> TurnQuality:
    """A nat a token, and the answer's third token strays."""
    strays = ((2, 0.25, 3),) if len(output_ids) > 2 else ()
    return TurnQuality(-1.0 * len(output_ids), strays)


class SilentProgress:
    def __init__(self) -> None:
        self.warmed: list[str] = []
        self.answers: list[tuple[str, Any]] = []

    def warming_up(self, arm):
        self.warmed.append(arm)

    def answered(self, arm, result):
        self.answers.append((arm, result.question_id))

    def question_done(self):
        pass


class FakeModel:
    """The part of a transformers model that the evaluation touches."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.generation_config = SimpleNamespace(eos_token_id=[EOS])
        self.configs: list[Any] = []

    def generate(self, ids, *, attention_mask, generation_config):
        assert attention_mask.shape == ids.shape
        self.configs.append(generation_config)
        new = answer_ids(ids[0].tolist(), generation_config.max_new_tokens)
        return torch.cat([ids, torch.tensor([new])], dim=1)


@dataclass
class FakeAnswers:
    """The decoder's queue: one answer after the other."""

    decoder: FakeDecoder
    seats: int
    max_new_tokens: int
    draft: bool
    waiting: list[Any] = field(default_factory=list)

    def submit(self, prompt_ids, *, seed, tag):
        self.waiting.append((prompt_ids, seed, tag))

    def __iter__(self):
        while self.waiting:
            prompt, seed, tag = self.waiting.pop(0)
            out = self.decoder.generate(
                torch.tensor([prompt]),
                max_new_tokens=self.max_new_tokens,
                eos_token_id=EOS,
                repetition_penalty=1.0,
                return_dict_in_generate=True,
                seed=seed,
                draft=self.draft,
            )
            (row,) = out.stats.rows
            ids = out.sequences[0, len(prompt) : len(prompt) + row.output_tokens].tolist()
            yield QueuedAnswer(tag, ids, row, 0.001, 0.01 * len(ids), 0.05 * len(ids))


class FakeDecoder:
    """The decoder's interface: steps of one token without drafts, of three with them."""

    def __init__(self) -> None:
        self.tokenizer = CharTokenizer()
        self.target = SimpleNamespace(model=FakeModel(), modules="fused")
        self.tree = TreeShape(24, 3, 4)
        self.adaptive = False
        self.acceptor: Any = None
        self.calls: list[tuple[Any, bool, int]] = []
        self.drafted_by: list[tuple[Any, Any]] = []
        self.interrupt_at: int | None = None

    @staticmethod
    def drafter(shape):
        return SimpleNamespace(vocabulary=None)

    def language_model(self, source):
        return lambda shape: SimpleNamespace(vocabulary=None, source=source)

    def queue(self, batch_size, *, max_new_tokens, eos_token_id, repetition_penalty, draft):
        return FakeAnswers(self, batch_size, max_new_tokens, draft)

    def generate(
        self,
        input_ids,
        *,
        max_new_tokens,
        eos_token_id,
        repetition_penalty,
        return_dict_in_generate,
        seed,
        draft,
        **sampling,
    ):
        assert return_dict_in_generate
        assert repetition_penalty == 1.0
        self.sampling = sampling
        if self.interrupt_at is not None and len(self.calls) >= self.interrupt_at:
            raise KeyboardInterrupt
        self.calls.append((self.acceptor, draft, seed))
        self.drafted_by.append((self.drafter(self.tree), self.tree))
        prompt = input_ids[0].tolist()
        ids = answer_ids(prompt, max_new_tokens)
        row = make_row(ids, len(prompt), 3 if draft else 1)
        # Padding after the stop token, as a batched output has it.
        new = torch.tensor([[*ids, PAD]])
        return SimpleNamespace(
            sequences=torch.cat([input_ids, new], dim=1),
            stats=GenerationStats((row,), prefill_seconds=0.001, decode_seconds=0.002 * len(ids)),
        )


def lay_out(folder: Path, models: Sequence[str] = ("target", "draft")) -> None:
    """q.jsonl with three questions, and checkpoints that nobody loads."""
    rows = [{"question_id": i, "category": "c", "turns": [f"a {i}", f"b {i}"]} for i in range(3)]
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in models:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"hidden_size": 64}')
        (folder / name / "model.safetensors").write_bytes(name.encode())
