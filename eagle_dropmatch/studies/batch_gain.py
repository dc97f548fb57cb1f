"""Throughput of naive over exact acceptance in batches: DropMatch, table 5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..evals.statistics import Estimate
from ..evals.summary import Summary
from ..evals.table import inline
from . import paper

LEVELS = 10
"""Draft levels of the paper's table, EAGLE's depth + 1."""


class Gain(NamedTuple):
    """What one batch size gives."""

    batch_size: int
    exact: float
    """Tokens/s, prefill included."""
    naive: float
    ratio: Estimate
    """Of tokens/s."""
    tau_ratio: Estimate
    questions: int


def gain(batch_size: int, summary: Summary, rule: str) -> Gain:
    """From an evaluation of exact and the rule."""
    rows = {row.group: row for row in summary.rows}
    (lossy,) = [each for each in summary.comparisons if each.group == rule]
    return Gain(
        batch_size,
        rows["exact"].tokens_per_second,
        rows[rule].tokens_per_second,
        lossy.speed_ratio,
        lossy.tau_ratio,
        len(summary.question_ids),
    )


def markdown(gains: Sequence[Gain], rule: str, levels: int) -> list[str]:
    """The paper's table 5, a line a batch size."""
    published: Mapping[int, float] = paper.BATCH_RATIO if levels == LEVELS else {}
    lines = [
        f"**Table 5, tokens/s of {rule} over exact's**, trees of {levels} draft levels (EAGLE's "
        f"depth {levels - 1}); both arms in one process and in turn.",
        "",
        "| batch | questions | exact, tok/s | naive, tok/s | ratio (95%) | tau ratio (95%) | "
        "paper: over SD, GSM8K |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for each in gains:
        known = published.get(each.batch_size)
        told = "" if known is None else f"{known:.2f}"
        lines.append(
            f"| {each.batch_size} | {each.questions} | {each.exact:.1f} | {each.naive:.1f} | "
            f"{inline(each.ratio)} | {inline(each.tau_ratio)} | {told} |"
        )
    return lines
