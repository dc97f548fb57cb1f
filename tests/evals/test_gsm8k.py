"""GSM8K from its own file, and which answers are correct."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_dropmatch.evals import BENCHMARKS
from eagle_dropmatch.evals.gsm8k import GSM8K, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [("so 1,234.50 it is.", "1234.50"), ("3 or -7", "-7"), ("none", None), ("18.", "18")],
)
def test_the_last_number_of_an_answer_counts(text: str, number: str | None) -> None:
    found = last_number(text)
    assert (None if found is None else str(found)) == number


def test_gsm8k_is_read_and_scored(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    rows = [{"question": "How many?", "answer": "Count.\n#### 1,200"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    benchmark = BENCHMARKS["gsm8k"]()
    assert isinstance(benchmark, GSM8K)
    with pytest.raises(ValueError, match="as --questions"):
        benchmark.load()
    (question,) = benchmark.load(path)
    assert benchmark.prompt(question, 0, []) == [{"role": "user", "content": "How many?"}]
    assert benchmark.score(question, ["5, so 1200.0"]) == {"correct": 1.0}
    assert benchmark.score(question, ["1200, or 7"]) == {"correct": 0.0}
    assert benchmark.score(question, ["no idea"]) == {"correct": 0.0}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("not json", 'line 1: expected a JSON object with "question" and "answer"'),
        ('{"question": "?"}', 'line 1: expected a JSON object with "question" and "answer"'),
        ('{"question": "?", "answer": 4}', 'line 1: expected a JSON object with "question"'),
        ('{"question": "?", "answer": "4"}', "line 1: its answer has no number behind ####"),
        ('{"question": "?", "answer": "#### x"}', "line 1: its answer has no number behind ####"),
        ("", "holds no question"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=told):
        GSM8K().load(path)
