"""tau over draft levels, all sweeps in one figure, and the paper's own points beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evals.statistics import Estimate
from ..figures import (
    EXACT_STYLE,
    SMALLEST,
    STYLES,
    Style,
    error_bars,
    level_axis,
    new_figure,
    save_figure,
)
from ..studies import paper
from .stored_sweep import StoredSweep

PAPER_LINES = (("EAGLE-3", "exact", EXACT_STYLE), ("+ DropMatch", "naive", STYLES[0]))
"""Label, number of a pair, style."""


def draw_sweeps(sweeps: Sequence[StoredSweep], folder: Path) -> None:
    """depth.png and .pdf: tau, and below it what the lossy curves cost, over draft levels.

    The paper's points (DropMatch, table 7) are of another target and another measure of quality,
    so they have panels of their own.
    """
    lossy = any(
        point.cost is not None
        for sweep in sweeps
        for curve in sweep.curves.values()
        for point in curve
    )
    lines = 2 if lossy else 1
    figure = new_figure(10, 5.8 if lossy else 3.9)
    panels = figure.subplots(
        lines, 2, squeeze=False, sharex="col", width_ratios=(2.6, 1), height_ratios=(1.7, 1)[:lines]
    )
    numbered = [(sweep, rule, points) for sweep in sweeps for rule, points in sweep.curves.items()]
    for number, (sweep, rule, points) in enumerate(numbered):
        levels = [point.levels for point in points]
        label = f"{rule}: {sweep.title}"
        _line(panels[0, 0], levels, [point.tau for point in points], number, label)
        costs = [point.cost for point in points if point.cost is not None]
        if len(costs) == len(points):
            _line(panels[1, 0], levels, costs, number, label)
    panels[0, 0].set_ylabel("tau (tokens a step)", fontsize=SMALLEST)
    # Below the panels, where no number of curves can run through it.
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        loc="outside lower left",
        ncols=2,
        fontsize=SMALLEST,
        frameon=False,
    )
    counts = sorted({f"{sweep.benchmark}, {sweep.questions} questions" for sweep in sweeps})
    panels[0, 0].set_title("; ".join(counts), fontsize=SMALLEST + 1)
    measured = sorted({point.levels for _, _, points in numbered for point in points})
    _paper(panels[:, 1])
    for line, (left, right) in enumerate(panels):
        for panel in (left, right):
            panel.tick_params(labelsize=SMALLEST)
            panel.spines[["top", "right"]].set_visible(False)
        if line == lines - 1:
            level_axis(left, measured, SMALLEST)
            level_axis(right, [depth + 1 for depth in paper.MT_BENCH_TAU], SMALLEST)
    if lossy:
        panels[1, 0].axhline(0, color="0.8", linewidth=0.8)
        panels[1, 0].set_ylabel("nats a token\nbelow exact's", fontsize=SMALLEST)
    save_figure(figure, folder, "depth")


def _paper(panels: Sequence[Any]) -> None:
    """Without intervals: the paper gives none. The lossy curve only beside its quality."""
    told = [each for each in PAPER_LINES if len(panels) > 1 or each[2] is EXACT_STYLE]
    for panel, table, axis in zip(
        panels,
        (paper.MT_BENCH_TAU, paper.MT_BENCH_SCORE),
        ("tau (tokens a step)", "MT-Bench score"),
        strict=False,
    ):
        for name, which, style in told:
            panel.plot(
                [depth + 1 for depth in table],
                [getattr(pair, which) for pair in table.values()],
                color=style.color,
                marker=style.marker,
                linestyle=style.dashes,
                markersize=5,
                linewidth=1.3,
                label=name,
            )
        panel.set_ylabel(axis, fontsize=SMALLEST)
    panels[0].set_title(
        "the paper's: Llama-3.3-70B, MT-Bench,\ntable 7, no intervals given", fontsize=SMALLEST
    )
    panels[0].legend(fontsize=SMALLEST, frameon=False)


def _line(
    panel: Any, levels: Sequence[int], values: Sequence[Estimate], number: int, label: str
) -> None:
    style: Style = STYLES[number % len(STYLES)]
    middle = [each.value for each in values]
    panel.errorbar(
        levels,
        middle,
        yerr=error_bars(middle, [each.interval for each in values]),
        color=style.color,
        marker=style.marker,
        # The second round of styles has hollow markers.
        markerfacecolor="white" if number >= len(STYLES) else style.color,
        linestyle=style.dashes,
        markersize=5,
        linewidth=1.3,
        elinewidth=0.8,
        label=label,
    )
