"""tau over draft levels: one evaluation a level, where each rule stops gaining, and the figure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..evals.plan import PLAIN
from ..evals.statistics import CONFIDENCE, Estimate, Interval, paired_difference, resamples
from ..evals.summary import LossyComparison, Row, Summary, Sums
from ..evals.table import as_numbers, inline
from ..figures import GREYS, error_bars, level_axis, new_figure, save_figure
from ..files import write_text
from ..stats import conditional_acceptance, unconditional_acceptance
from .paper import MT_BENCH_TAU

RATIOS_AT = (5, 7, 9, 11)
"""EAGLE's depths at which the ratio is told."""
NEAR = 0.99
"""Share of a rule's greatest tau from which on it counts as reached."""


@dataclass(frozen=True)
class Point:
    """All rules with trees of so many draft levels."""

    levels: int
    nodes: int
    """Of a tree, root included."""
    summary: Summary

    def row(self, group: str) -> Row:
        return next(row for row in self.summary.rows if row.group == group)

    def lossy(self, group: str) -> LossyComparison | None:
        return next((each for each in self.summary.comparisons if each.group == group), None)


@dataclass(frozen=True)
class Saturation:
    """Where a rule stops gaining."""

    group: str
    level: int | None
    """The first level after which the gain's paired interval includes 0; None where every measured
    level still gains."""
    gain: Estimate | None
    """tau one measured level further less tau there."""
    plateau: int | None
    """The first level after which all deeper ones together gain nothing: their tau less tau there
    has an interval that includes 0. It averages over what happens to the texts at single levels.
    None where even the last but one is shown to gain."""
    beyond: Estimate | None
    """That gain, at ``plateau``."""
    reached: int
    """The first level with ``NEAR`` of the rule's greatest tau."""
    reached_interval: Interval | None


def saturation(points: Sequence[Point], group: str) -> Saturation:
    """``points`` ascend; their questions are the same."""
    sums = [np.asarray(point.summary.sums[group], dtype=np.float64) for point in points]
    level, gain = _first_without_gain(points, pairwise(sums))
    deeper = np.cumsum(sums[::-1], axis=0)[::-1]
    plateau, beyond = _first_without_gain(points, zip(sums, deeper[1:], strict=False))
    questions = len(sums[0])
    index = resamples(questions)
    taus = np.stack([each[index, 0].sum(1) / each[index, 1].sum(1) for each in sums])
    near = taus >= NEAR * taus.max(0)
    levels = np.asarray([point.levels for point in points])[near.argmax(0)]
    interval = None
    if questions > 1:
        tail = 100 * (1 - CONFIDENCE) / 2
        low, high = np.percentile(levels[1:], [tail, 100 - tail], method="nearest")
        interval = Interval(float(low), float(high))
    return Saturation(group, level, gain, plateau, beyond, int(levels[0]), interval)


def _first_without_gain(
    points: Sequence[Point], pairs: Iterable[tuple[Any, Any]]
) -> tuple[int | None, Estimate | None]:
    """The first level at which the second of a pair of sums is not shown to have more tau.

    With the gain there; (None, the last gain) where all have more.
    """
    gain: Estimate | None = None
    for point, (here, further) in zip(points, pairs, strict=False):
        gain = paired_difference(
            further[:, 0].tolist(), further[:, 1].tolist(), here[:, 0].tolist(), here[:, 1].tolist()
        )
        if gain.interval is None or gain.interval.low <= 0:
            return point.levels, gain
    return None, gain


def groups_of(points: Sequence[Point]) -> list[str]:
    """The rules, in the table's order."""
    return [row.group for row in points[0].summary.rows if row.drafting]


def describe(point: Point) -> str:
    """One line of the table: what every rule does at this point."""
    cells = [f"{point.levels} ({point.levels - 1})", str(point.nodes)]
    for group in groups_of([point]):
        row, lossy = point.row(group), point.lossy(group)
        cells.append(inline(row.tau, 2))
        if lossy is not None:
            share = f"{100 * row.relaxed_share:.1f}%"
            cells += [inline(lossy.tau_ratio), inline(lossy.log_probability_cost), share]
        if PLAIN in row.speedup:
            cells.append(inline(row.speedup[PLAIN], 2))
    return "| " + " | ".join(cells) + " |"


def headings(point: Point) -> str:
    """The table's first two lines."""
    cells = ["levels (depth)", "nodes"]
    for group in groups_of([point]):
        cells.append(f"{group}: tau")
        if point.lossy(group) is not None:
            cells += ["/ exact", "nats below exact", "relaxed"]
        if PLAIN in point.row(group).speedup:
            cells.append("x plain")
    return "| " + " | ".join(cells) + " |\n|" + "--:|" * len(cells)


def conclusions(points: Sequence[Point]) -> list[str]:
    """Where each rule stops gaining, and the ratios beside the paper's."""
    told = []
    for group in groups_of(points):
        found = saturation(points, group)
        if found.level is None:
            text = f"{group}: every measured level still gains"
        else:
            assert found.gain is not None
            text = (
                f"{group}: saturates at {found.level} levels, the first after which the gain's "
                f"interval includes 0 ({inline(found.gain)})"
            )
        if found.plateau is not None:
            assert found.beyond is not None
            text += (
                f"; at {found.plateau} all deeper levels together gain no more "
                f"({inline(found.beyond)})"
            )
        text += f"; {NEAR:.0%} of its greatest tau is reached at {found.reached} levels"
        if found.reached_interval is not None:
            low, high = found.reached_interval
            text += f" [{low:.0f}, {high:.0f}]"
        told.append(text + ".")
    by_depth = {point.levels - 1: point for point in points}
    for group in groups_of(points):
        ratios = [
            f"depth {depth}: {inline(lossy.tau_ratio)}{_paper(group, depth)}"
            for depth in RATIOS_AT
            if depth in by_depth and (lossy := by_depth[depth].lossy(group)) is not None
        ]
        if ratios:
            told.append(f"tau of {group} / exact at {', '.join(ratios)}.")
    return told


def _paper(group: str, depth: int) -> str:
    known = group == "naive" and depth in MT_BENCH_TAU
    return f" (paper {MT_BENCH_TAU[depth].ratio:.3f})" if known else ""


def write(points: Sequence[Point], folder: Path, command: str) -> None:
    """sweep.md, sweep.json and the figures, each whole or not at all."""
    lines = [
        headings(points[0]),
        *map(describe, points),
        "",
        *(f"- {t}" for t in conclusions(points)),
    ]
    write_text(folder / "sweep.md", "\n".join([f"`{command}`", "", *lines]) + "\n")
    rows: list[dict[str, Any]] = []
    for point in points:
        for group in groups_of([point]):
            row, lossy = point.row(group), point.lossy(group)
            histogram = list(row.histogram)
            rows.append(
                {
                    "levels": point.levels,
                    "depth": point.levels - 1,
                    "nodes": point.nodes,
                    "rule": group,
                    "tau": row.tau,
                    "strict_tau": row.strict_tau,
                    "relaxed_share": row.relaxed_share,
                    "tau_ratio": None if lossy is None else lossy.tau_ratio,
                    "cost": None if lossy is None else lossy.log_probability_cost,
                    "speedup": row.speedup.get(PLAIN),
                    "tokens_per_second": row.tokens_per_second,
                    "acceptance": unconditional_acceptance(histogram),
                    "conditional_acceptance": conditional_acceptance(histogram),
                    "questions": [Sums(*each)._asdict() for each in point.summary.sums[group]],
                }
            )
    write_text(folder / "sweep.json", json.dumps(as_numbers(rows), indent=1) + "\n")
    draw(points, folder)


def draw(points: Sequence[Point], folder: Path) -> None:
    """tau over levels, below it what the lossy rules cost and, with arm plain, every speed-up."""
    groups = groups_of(points)
    timed = all(PLAIN in point.row(group).speedup for point in points for group in groups)
    figure = new_figure(7.5, 8 if timed else 6.2)
    upper, cost, *rest = figure.subplots(
        2 + timed, 1, sharex=True, height_ratios=(2.2, 1, 1)[: 2 + timed]
    )
    levels = [point.levels for point in points]
    for (color, marker, dashes), group in zip(_styles(), groups, strict=False):
        style = {"color": color, "marker": marker, "linestyle": dashes, "markersize": 4}
        _line(upper, levels, [point.row(group).tau for point in points], group, style)
        found = [point.lossy(group) for point in points]
        if all(each is not None for each in found):
            costs = [each.log_probability_cost for each in found if each is not None]
            _line(cost, levels, costs, group, style)
        for speed in rest:
            ratios = [point.row(group).speedup[PLAIN] for point in points]
            _line(speed, levels, ratios, group, style)
    upper.set_ylabel("tau (tokens a step)")
    upper.legend(fontsize=8, frameon=False, loc="lower right")
    cost.axhline(0, color="0.8", linewidth=0.8)
    cost.set_ylabel("nats a token\nbelow exact's")
    for speed in rest:
        speed.axhline(1, color="0.8", linewidth=0.8)
        speed.set_ylabel("tokens/s\nover plain")
    level_axis(rest[-1] if rest else cost, levels)
    save_figure(figure, folder, "depth")


def _styles() -> list[tuple[str, str, str]]:
    return [*GREYS, *((color, "x", dashes) for color, _, dashes in GREYS)]


def _line(
    panel: Any, levels: Sequence[int], values: Sequence[Estimate], label: str, style: Any
) -> None:
    middle = [each.value for each in values]
    panel.errorbar(
        levels,
        middle,
        yerr=error_bars(middle, [each.interval for each in values]),
        elinewidth=0.7,
        linewidth=1.3,
        label=label,
        **style,
    )
