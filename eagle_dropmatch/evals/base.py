"""What a benchmark is: questions, the prompt of each turn, and a score of the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..errors import UserError

Message = dict[str, str]
"""One chat message, {"role": ..., "content": ...}, as chat templates take it."""


@dataclass(frozen=True)
class Question:
    """One item of a benchmark. A benchmark of single questions has one turn."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = field(default=())


class Benchmark(Protocol):
    """Three methods and a name. Register it in :data:`eagle_dropmatch.evals.BENCHMARKS`."""

    @property
    def name(self) -> str:
        """Short name, used in folder names and records."""
        ...

    def load(self, source: Path | None = None) -> list[Question]:
        """All questions: of ``source`` if given. UserError for a source that cannot be read."""
        ...

    def prompt(self, question: Question, turn: int, history: Sequence[str]) -> list[Message]:
        """Chat messages that ask for turn ``turn``; ``history`` holds the answers before it."""
        ...

    def score(self, question: Question, answers: Sequence[str]) -> Mapping[str, float]:
        """Named scores of the answers to all turns; empty when only a judge can score them."""
        ...


def select(
    questions: Sequence[Question],
    *,
    limit: int | None = None,
    begin: int | None = None,
    end: int | None = None,
) -> list[Question]:
    """Cut to [begin, end) and take ``limit`` questions spread evenly over the rest.

    Benchmarks are sorted by category, so the first ``limit`` questions would all be of one kind.
    Number i of n is at floor(i * len / n): the sample is fixed by its size. UserError where no
    question is left.
    """
    chosen = list(questions[begin:end])
    if not chosen:
        raise UserError(
            f"no question is left: {len(questions)} questions, --question-begin {begin}, "
            f"--question-end {end}; give a range inside 0..{len(questions)}"
        )
    if limit is None or limit >= len(chosen):
        return chosen
    return [chosen[i * len(chosen) // limit] for i in range(limit)]


def chat_turns(question: Question, turn: int, history: Sequence[str]) -> list[Message]:
    """User and assistant messages in turn, ending with the user's turn ``turn``."""
    messages: list[Message] = []
    for said, answered in zip(question.turns[:turn], history[:turn], strict=True):
        messages.append({"role": "user", "content": said})
        messages.append({"role": "assistant", "content": answered})
    messages.append({"role": "user", "content": question.turns[turn]})
    return messages
