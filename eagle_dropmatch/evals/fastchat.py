"""Benchmarks in FastChat's format: conversations of several turns that a judge model scores.

One JSON object a line: ``question_id``, ``category``, ``turns``, optionally ``reference``. EAGLE's
question files have it too. The questions come from a file, or from the hub through ``datasets``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..errors import UserError
from .base import Message, Question, chat_turns


class FastChatBenchmark:
    """What such benchmarks share. Their answers are scored by a judge model, never by a rule."""

    name: ClassVar[str]
    hub_id: ClassVar[str]

    def load(self, source: Path | str | None = None) -> list[Question]:
        """``source``: a file, the hub id of the set, or None for where it lies by default."""
        source = self.default_source() if source is None else source
        return (
            _from_hub(self.hub_id) if str(source) == self.hub_id else read_questions(Path(source))
        )

    def default_source(self) -> Path | str:
        """A file, or the hub id."""
        return self.hub_id

    def prompt(self, question: Question, turn: int, history: Sequence[str]) -> list[Message]:
        return chat_turns(question, turn, history)

    def score(self, question: Question, answers: Sequence[str]) -> Mapping[str, float]:
        """Empty: an open answer has no score until a judge has read it."""
        return {}


def read_questions(path: Path) -> list[Question]:
    """Read a question file; UserError names the line that cannot be used."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"question file {path} does not exist; give a FastChat jsonl file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"question file {path} cannot be read: {error}") from None
    questions: list[Question] = []
    # Not splitlines(): it also cuts at U+2028 and its like, which JSON strings may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            questions.append(_parse_line(line, f"{path}, line {number}"))
    if not questions:
        raise UserError(f"question file {path} holds no question")
    seen: set[int | str] = set()
    for question in questions:
        if question.question_id in seen:
            raise UserError(f"question file {path} holds question_id {question.question_id} twice")
        seen.add(question.question_id)
    return questions


def _parse_line(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return _question(row, where)


def _question(row: Mapping[str, Any], where: str) -> Question:
    for key in ("question_id", "turns"):
        if key not in row:
            raise UserError(f'{where}: no "{key}"; a line needs "question_id" and "turns"')
    if not isinstance(row["question_id"], int | str) or isinstance(row["question_id"], bool):
        raise UserError(f'{where}: "question_id" must be a number or a string')
    return Question(
        question_id=row["question_id"],
        category=str(row.get("category", "")),
        turns=_strings(row["turns"], '"turns"', where, required=True),
        reference=_strings(row.get("reference") or [], '"reference"', where, required=False),
    )


def _strings(value: object, name: str, where: str, *, required: bool) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UserError(f"{where}: {name} must be a list of strings")
    if required and not value:
        raise UserError(f"{where}: {name} is empty")
    return tuple(value)


def _from_hub(hub_id: str) -> list[Question]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"{hub_id} needs the package datasets, which is not installed: pip install datasets, "
            "or give the questions as a file with --questions"
        ) from None
    try:
        rows = list(load_dataset(hub_id, split="train"))
    except Exception as error:
        # datasets raises whatever its file system layer does; for a user it is one thing.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{hub_id} cannot be loaded from the hub: {reason}; --questions takes a file"
        ) from None
    return [
        _question(
            {
                **row,
                "question_id": row.get("question_id", row.get("prompt_id")),
                "turns": row.get("turns", row.get("prompt")),
            },
            f"{hub_id}, row {number}",
        )
        for number, row in enumerate(rows, start=1)
    ]
