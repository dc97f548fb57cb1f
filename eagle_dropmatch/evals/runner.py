"""All arms answer all questions, in one process and in turn.

Speed is compared inside one process because two processes on one machine differ by more than most
speed-ups, and question by question because the machine itself drifts. Which arm goes first rotates
with the question, so that no arm always meets the caches as another one left them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from .arms import Arm, BatchArm, Turn
from .base import Benchmark, Question
from .chat import ChatSettings, render, strip_thinking
from .folder import RunFolder
from .quality import TurnQuality
from .records import Choice, QuestionResult, make_record, read_record

BLOCK = 4
"""Questions a seat that an arm answers before the next arm does, in batches."""

Judge = Callable[[Sequence[int], Sequence[int]], TurnQuality]
"""From an answer's prompt and ids to the target's view of it."""


@dataclass(frozen=True)
class RunSettings:
    """What every arm is asked alike."""

    max_new_tokens: int
    model_id: str
    chat: ChatSettings = field(default_factory=ChatSettings)
    batch_size: int = 1
    """Conversations that an arm holds at the same time."""
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
        _warm_up(benchmark, questions, arms, tokenizer, settings, progress)
    # A block is answered by one arm after the other: long enough that seats are filled again.
    size = 1 if settings.batch_size == 1 else BLOCK * settings.batch_size
    for index, block in enumerate(questions[i : i + size] for i in range(0, len(questions), size)):
        turns = rotated(arms, index)
        left = {
            arm.spec.name: [q for q in block if q.question_id not in results[arm.spec.name]]
            for arm in turns
        }
        pending = [arm for arm in turns if left[arm.spec.name]]
        choices: dict[tuple[str, int | str], list[Choice]] = {}
        for repeat in range(settings.repeats):
            for arm in rotated(pending, repeat):
                name = arm.spec.name
                answers = _converse(benchmark, left[name], arm, tokenizer, settings, judge)
                for question, choice in answers:
                    qid = question.question_id
                    mine = choices.setdefault((name, qid), [])
                    mine.append(choice)
                    if len(mine) == settings.repeats:
                        record = make_record(arm.spec, question, mine, settings.model_id)
                        folder.append(name, record)
                        results[name][qid] = read_record(record)
                        progress.answered(name, results[name][qid])
        for _ in block:
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


@dataclass
class _Conversation:
    """One question on its way. The arm's own answers are its history."""

    question: Question
    prompt: Sequence[int] = ()
    turns: list[Turn] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    qualities: list[TurnQuality] = field(default_factory=list)

    @property
    def seed(self) -> int:
        return turn_seed(self.question, len(self.turns))

    @property
    def over(self) -> bool:
        return len(self.turns) == len(self.question.turns)

    def ask(self, benchmark: Benchmark, tokenizer: Any, chat: ChatSettings) -> Sequence[int]:
        """The next turn's prompt."""
        history = [strip_thinking(text) for text in self.texts]
        messages = benchmark.prompt(self.question, len(self.turns), history)
        self.prompt = render(tokenizer, messages, chat).ids
        return self.prompt

    def hear(self, turn: Turn, tokenizer: Any, judge: Judge) -> None:
        self.turns.append(turn)
        self.qualities.append(judge(self.prompt, turn.output_ids))
        self.texts.append(tokenizer.decode(turn.output_ids, skip_special_tokens=True).strip())

    def choice(self) -> Choice:
        return Choice(tuple(self.turns), tuple(self.texts), tuple(self.qualities))


def _converse(
    benchmark: Benchmark,
    questions: Sequence[Question],
    arm: Arm,
    tokenizer: Any,
    settings: RunSettings,
    judge: Judge,
) -> Iterator[tuple[Question, Choice]]:
    """All turns of all questions, each question as soon as its last turn has ended."""
    talks = [_Conversation(question) for question in questions]
    if settings.batch_size == 1:
        for talk in talks:
            while not talk.over:
                prompt = talk.ask(benchmark, tokenizer, settings.chat)
                turn = arm.answer(prompt, max_new_tokens=settings.max_new_tokens, seed=talk.seed)
                talk.hear(turn, tokenizer, judge)
            yield talk.question, talk.choice()
        return
    queue = cast(BatchArm, arm).queue(settings.batch_size, max_new_tokens=settings.max_new_tokens)
    for talk in talks:
        queue.submit(talk.ask(benchmark, tokenizer, settings.chat), seed=talk.seed, tag=talk)
    for talk, turn in queue:
        talk.hear(turn, tokenizer, judge)
        if talk.over:
            yield talk.question, talk.choice()
        else:
            queue.submit(talk.ask(benchmark, tokenizer, settings.chat), seed=talk.seed, tag=talk)


def _warm_up(
    benchmark: Benchmark,
    questions: Sequence[Question],
    arms: Sequence[Arm],
    tokenizer: Any,
    settings: RunSettings,
    progress: Progress,
) -> None:
    """Let every arm, under its own acceptor, pay for its first calls outside the times."""
    first = [Question(q.question_id, q.category, q.turns[:1]) for q in questions]
    short = replace(settings, max_new_tokens=min(settings.warmup_tokens, settings.max_new_tokens))
    for arm in arms:
        progress.warming_up(arm.spec.name)
        for _ in range(settings.warmup):
            some = first[: settings.batch_size]
            for _ in _converse(benchmark, some, arm, tokenizer, short, _no_judge):
                pass


def _no_judge(prompt: Sequence[int], answer: Sequence[int]) -> TurnQuality:
    return TurnQuality(0.0, ())
