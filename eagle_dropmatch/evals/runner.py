"""All arms answer all questions, in one process and in turn.

Speed is compared inside one process because two processes on one machine differ by more than most
speed-ups, and question by question because the machine itself drifts. Which arm goes first rotates
with the question, so that no arm always meets the caches as another one left them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .arms import Arm, Turn
from .base import Benchmark, Question
from .chat import ChatSettings, render, strip_thinking
from .folder import RunFolder
from .quality import TurnQuality
from .records import Choice, QuestionResult, make_record, read_record

Judge = Callable[[Sequence[int], Sequence[int]], TurnQuality]
"""From an answer's prompt and ids to the target's view of it."""


@dataclass(frozen=True)
class RunSettings:
    """What every arm is asked alike."""

    max_new_tokens: int
    model_id: str
    chat: ChatSettings = field(default_factory=ChatSettings)
    repeats: int = 1
    """Answers to every question by every arm; times are medians over them."""
    warmup: int = 1
    """Untimed answers of every arm before the first timed one."""
    warmup_tokens: int = 16
    """Length of an untimed answer."""


class Progress(Protocol):
    """Told of what happens; see :mod:`.progress`."""

    def warming_up(self, arm: str) -> None: ...

    def answered(self, arm: str, result: QuestionResult) -> None: ...

    def question_done(self) -> None: ...


def run(
    benchmark: Benchmark,
    questions: Sequence[Question],
    arms: Sequence[Arm],
    tokenizer: Any,
    settings: RunSettings,
    folder: RunFolder,
    progress: Progress,
    judge: Judge,
) -> dict[str, dict[int | str, QuestionResult]]:
    """Answer what ``folder`` does not hold yet; returns all results by arm and question.

    ``judge`` reads each answer once, outside the times. A record is appended as soon as its arm has
    answered the question, all turns and repeats.
    """
    results = stored_results(folder, [arm.spec.name for arm in arms])
    wanted = [question.question_id for question in questions]
    if any(qid not in results[arm.spec.name] for arm in arms for qid in wanted):
        _warm_up(benchmark, questions[0], arms, tokenizer, settings, progress)
    for index, question in enumerate(questions):
        pending = [
            arm
            for arm in rotated(arms, index)
            if question.question_id not in results[arm.spec.name]
        ]
        choices: dict[str, list[Choice]] = {arm.spec.name: [] for arm in pending}
        for repeat in range(settings.repeats):
            for arm in rotated(pending, repeat):
                name = arm.spec.name
                choices[name].append(
                    _converse(benchmark, question, arm, tokenizer, settings, judge)
                )
                if len(choices[name]) == settings.repeats:
                    record = make_record(arm.spec, question, choices[name], settings.model_id)
                    folder.append(name, record)
                    results[name][question.question_id] = read_record(record)
                    progress.answered(name, results[name][question.question_id])
        progress.question_done()
    return results


def stored_results(
    folder: RunFolder, arms: Sequence[str]
) -> dict[str, dict[int | str, QuestionResult]]:
    """What the folder holds already."""
    return {
        name: {qid: read_record(record) for qid, record in folder.answers(name).items()}
        for name in arms
    }


def rotated(arms: Sequence[Arm], by: int) -> list[Arm]:
    """The arms in order, starting with number ``by`` (modulo their number)."""
    start = by % len(arms) if arms else 0
    return [*arms[start:], *arms[:start]]


def turn_seed(question: Question, turn: int) -> int:
    """The seed of a turn: fixed by the question alone, whatever was answered before it."""
    return zlib.crc32(f"{question.question_id}/{turn}".encode())


def _converse(
    benchmark: Benchmark,
    question: Question,
    arm: Arm,
    tokenizer: Any,
    settings: RunSettings,
    judge: Judge,
) -> Choice:
    """All turns of one question. The arm's own answers are its history."""
    turns: list[Turn] = []
    qualities: list[TurnQuality] = []
    texts: list[str] = []
    for number in range(len(question.turns)):
        history = [strip_thinking(text) for text in texts]
        prompt = render(tokenizer, benchmark.prompt(question, number, history), settings.chat)
        turn = arm.answer(
            prompt.ids,
            max_new_tokens=settings.max_new_tokens,
            seed=turn_seed(question, number),
        )
        turns.append(turn)
        qualities.append(judge(prompt.ids, turn.output_ids))
        texts.append(tokenizer.decode(turn.output_ids, skip_special_tokens=True).strip())
    return Choice(tuple(turns), tuple(texts), tuple(qualities))


def _warm_up(
    benchmark: Benchmark,
    question: Question,
    arms: Sequence[Arm],
    tokenizer: Any,
    settings: RunSettings,
    progress: Progress,
) -> None:
    """Let every arm, under its own acceptor, pay for its first calls outside the times."""
    prompt = render(tokenizer, benchmark.prompt(question, 0, []), settings.chat)
    for arm in arms:
        progress.warming_up(arm.spec.name)
        for _ in range(settings.warmup):
            arm.answer(
                prompt.ids,
                max_new_tokens=min(settings.warmup_tokens, settings.max_new_tokens),
                seed=turn_seed(question, 0),
            )
