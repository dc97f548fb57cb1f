"""GSM8K (Cobbe et al., 2021, arXiv 2110.14168): grade-school word problems with a number to find.

A correct answer is one whose last number is the reference's. The questions come from a file in the
data set's own format, a JSON object a line with ``question`` and ``answer``, the number behind the
answer's ``####``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import ClassVar

from ..errors import UserError
from .base import Message, Question, chat_turns

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class GSM8K:
    """Questions as they stand, one turn, no examples before them."""

    name: ClassVar[str] = "gsm8k"

    def load(self, source: Path | None = None) -> list[Question]:
        if source is None:
            raise UserError("GSM8K comes from a file: give its test.jsonl as --questions")
        try:
            lines = source.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"question file {source} cannot be read ({error}); give GSM8K's jsonl"
            ) from None
        found = [
            _question(number, line, f"{source}, line {number}")
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
        if not found:
            raise UserError(f"question file {source} holds no question")
        return found

    def prompt(self, question: Question, turn: int, history: Sequence[str]) -> list[Message]:
        return chat_turns(question, turn, history)

    def score(self, question: Question, answers: Sequence[str]) -> Mapping[str, float]:
        """``correct``: 1.0 or 0.0."""
        wanted, said = last_number(question.reference[0]), last_number(answers[0])
        return {"correct": float(said is not None and said == wanted)}


def last_number(text: str) -> Decimal | None:
    """The last number of a text, thousands separators left out; None where there is none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


def _question(number: int, line: str, where: str) -> Question:
    try:
        row = json.loads(line)
        question, answer = row["question"], row["answer"]
        reference = answer.rpartition("####")[2]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f'{where}: expected a JSON object with "question" and "answer"') from None
    if "####" not in answer or last_number(reference) is None:
        raise UserError(f"{where}: its answer has no number behind ####")
    return Question(number, "math", (str(question),), (reference,))
