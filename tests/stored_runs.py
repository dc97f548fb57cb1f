"""Run folders with known numbers, as the eval scripts leave them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval_fakes import EOS, grouped, spec

from eagle_dropmatch.evals.arms import Turn
from eagle_dropmatch.evals.base import Question
from eagle_dropmatch.evals.folder import FORMAT
from eagle_dropmatch.evals.quality import TurnQuality
from eagle_dropmatch.evals.records import Choice, make_record
from eagle_dropmatch.stats import RowStats

STEPS = {"plain": 1, "exact": 2, "naive": 3, "margin(kappa=0.5)": 4}
"""Tokens that an arm's steps commit."""


def write_run(
    path: Path,
    arms: Sequence[str] = ("plain", "exact", "naive"),
    *,
    questions: int = 4,
    benchmark: str = "mt_bench",
    finished: bool = True,
    answered: Mapping[str, int] | None = None,
    steps: Mapping[str, int] = STEPS,
    cost: float = 0.1,
) -> Path:
    """A run in which every step of an arm commits ``steps`` tokens at 10 a second, and every lossy
    rule costs ``cost`` nats a token. ``answered``: how many questions an arm has answers to.
    """
    path.mkdir(parents=True, exist_ok=True)
    rules = [arm for arm in arms if arm not in ("plain", "exact")]
    for arm in arms:
        name = arm.replace("(kappa=0.5)", "-kappa-0.5")
        known = spec(name, group=arm, lossy=arm in rules)
        lines = [
            json.dumps(_record(known, qid, steps[arm], cost if arm in rules else 0.0))
            for qid in range((answered or {}).get(arm, questions))
        ]
        (path / f"answers-{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    (path / "run.json").write_text(json.dumps(_header(arms, rules, questions, benchmark, finished)))
    return path


def _header(
    arms: Sequence[str], rules: Sequence[str], questions: int, benchmark: str, finished: bool
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "arguments": {
            "benchmark": benchmark,
            "arms": list(arms),
            "acceptors": list(rules),
            "acceptor_options": {},
            "seeds": [],
            "trees": [],
            "controls": False,
            "sampling": {},
            "question_ids": list(range(questions)),
            "questions_sha256": f"{questions} questions",
        },
        "finished": 1.0 if finished else None,
    }


def _record(known: Any, qid: int, step: int, cost: float) -> dict[str, Any]:
    """24 tokens behind the prefill's, two more a question; half of the accepted are relaxed."""
    lengths = grouped(24 + 2 * qid, step)
    count = 1 + sum(lengths)
    row = RowStats(
        accept_lengths=lengths,
        strict_accept_lengths=[1] * len(lengths),
        relaxed_tokens=[(n - 1) // 2 if cost else 0 for n in lengths],
        draft_nodes=[8] * len(lengths),
        prompt_tokens=5,
        output_tokens=count,
        finish_reason="stop",
    )
    seconds = 0.1 * len(lengths)
    turn = Turn([*range(50, 49 + count), EOS], seconds, row, 0.01, seconds - 0.01)
    quality = TurnQuality(-(0.5 + cost) * count, ())
    return make_record(
        known, Question(qid, "c", ("q",)), [Choice((turn,), ("a",), (quality,))], "m"
    )


def write_sweep(path: Path, nodes: dict[int, int], *, questions: int = 4) -> Path:
    """tau 1 + levels / 4 for exact and a fifth more for naive, at 0.1 nats."""
    rows = []
    for levels, count in nodes.items():
        write_run(path / f"levels-{levels:02}", questions=questions)
        for name, tau in (("exact", 1 + levels / 4), ("naive", 1.2 + levels / 4)):
            rows.append(
                {
                    "levels": levels,
                    "nodes": count,
                    "rule": name,
                    "tau": {"value": tau, "interval": [tau - 0.1, tau + 0.1]},
                    "relaxed_share": 0.1 * (name == "naive"),
                    "cost": {"value": 0.1, "interval": None} if name == "naive" else None,
                    "questions": [{}] * questions,
                }
            )
    (path / "sweep.json").write_text(json.dumps(rows))
    return path
