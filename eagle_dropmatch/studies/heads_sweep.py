"""tau over K dropout heads and their rate: a grid of rules, an evaluation for each K, heat maps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..evals.plan import EXACT
from ..evals.statistics import Estimate
from ..evals.summary import LossyComparison, Row, Summary
from ..evals.table import as_numbers, inline
from ..figures import new_figure, save_figure
from ..files import write_text
from .equal_cost import as_markdown, equal_cost
from .paper import HEADS
from .rule_sweep import COSTS

AXES: Mapping[str, str] = {
    "p_drop": "p_drop (a fixed dropout rate)",
    "head_agreement": "head_agreement (p_drop solved on each prompt)",
}
"""Option of the dropout rules that a grid has across K -> what its axis is called."""


@dataclass(frozen=True)
class Grid:
    """Which rules are measured, on what."""

    benchmark: str
    """Name of a benchmark."""
    rule: str
    """A rule of K dropout heads, by its name."""
    heads: Sequence[int]
    """Values of K."""
    axes: Mapping[str, Sequence[float]]
    """Values of each option of ``AXES`` that is measured."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options, the same in all cells."""

    def text(self, heads: int, axis: str, value: float) -> str:
        """The cell's rule as an acceptance expression."""
        options = {"K": heads, axis: value, **self.options}
        return f"{self.rule}({', '.join(f'{name}={each}' for name, each in options.items())})"

    def rules(self, heads: int) -> list[str]:
        """All cells of one K."""
        return [self.text(heads, axis, v) for axis, values in self.axes.items() for v in values]


@dataclass(frozen=True)
class Cell:
    """One rule of the grid beside exact acceptance on the same questions."""

    heads: int
    axis: str
    value: float
    row: Row
    lossy: LossyComparison

    @property
    def above(self) -> bool:
        """Whether the paired interval of tau / exact's lies above 1."""
        interval = self.lossy.tau_ratio.interval
        return interval is not None and interval.low > 1


Measured = Mapping[int, Summary]
"""By K, what has been measured so far."""


def cells_of(grid: Grid, heads: int, summary: Summary) -> list[Cell]:
    """All cells of one K, in the order of ``Grid.rules``."""
    rows = {row.group: row for row in summary.rows}
    lossy = {each.group: each for each in summary.comparisons}
    return [
        Cell(heads, axis, value, rows[rule], lossy[rule])
        for axis, values in grid.axes.items()
        for value in values
        for rule in [grid.text(heads, axis, value)]
    ]


def all_cells(grid: Grid, measured: Measured) -> list[Cell]:
    return [cell for K, summary in measured.items() for cell in cells_of(grid, K, summary)]


def headings(grid: Grid) -> str:
    """The first two lines of the table that grows by a line a K."""
    columns = [f"{axis} {value:g}" for axis, values in grid.axes.items() for value in values]
    return f"| K | exact | {' | '.join(columns)} |\n|--:|--:|{'--:|' * len(columns)}"


def describe(grid: Grid, heads: int, summary: Summary) -> str:
    """Its line of one K: exact's tau, then tau and its ratio to exact's cell by cell."""
    exact = _row(summary, EXACT).tau
    told = []
    for cell in cells_of(grid, heads, summary):
        text = f"{cell.row.tau.value:.2f} x{cell.lossy.tau_ratio.value:.3f}"
        told.append(text if cell.above else f"({text})")
    return f"| {heads} | {exact.value:.2f} | {' | '.join(told)} |"


LEGEND = (
    "Cells hold tau and its ratio to exact's; in brackets where the paired 95% interval of the "
    "ratio does not lie above 1."
)


def conclusions(grid: Grid, measured: Measured) -> list[str]:
    """What the whole grid says."""
    cells = all_cells(grid, measured)
    above = [cell for cell in cells if cell.above]
    best = max(cells, key=lambda cell: cell.lossy.tau_ratio.value)
    rule = grid.text(best.heads, best.axis, best.value)
    return [
        f"tau is shown to lie above exact's in {len(above)} of {len(cells)} cells.",
        f"The longest accepted runs: {rule}, tau {inline(best.row.tau, 2)}, "
        f"{inline(best.lossy.tau_ratio)} times exact's, at "
        f"{inline(best.lossy.log_probability_cost)} nats a token below exact.",
    ]


def at_equal_cost(grid: Grid, measured: Measured) -> str:
    """Every K's curve over each axis, read where it costs the same: Markdown.

    Every K was measured beside exact acceptance on the same questions, and greedy exact answers are
    the same each time: the first K's stand for all.
    """
    first = next(iter(measured.values()))
    sums = {group: rows for summary in measured.values() for group, rows in summary.sums.items()}
    joined = replace(first, sums={**sums, EXACT: first.sums[EXACT]})
    curves = {
        f"K = {K}, {axis}": [grid.text(K, axis, value) for value in values]
        for axis, values in grid.axes.items()
        for K in measured
    }
    known = [name for name in curves if name.startswith(f"K = {HEADS},")]
    reference = next(iter(known or curves))
    return as_markdown(equal_cost(joined, curves, COSTS, reference), reference)


def write(grid: Grid, measured: Measured, folder: Path, command: str, about: str) -> None:
    """heads.md, heads.json and the heat maps, each whole or not at all.

    Args:
        about: what was asked, in a sentence.
    """
    lines = [f"`{command}`", "", about, "", headings(grid)]
    lines += [describe(grid, K, summary) for K, summary in measured.items()]
    lines += ["", LEGEND, ""]
    lines += [f"- {told}" for told in conclusions(grid, measured)]
    lines += ["", at_equal_cost(grid, measured), *_all_intervals(grid, measured)]
    write_text(folder / "heads.md", "\n".join(lines) + "\n")
    rows = [
        {
            "rule": cell.row.group,
            "K": cell.heads,
            "axis": cell.axis,
            "value": cell.value,
            **{quantity.key: quantity.of(cell) for quantity in QUANTITIES},
            "strict_tau": cell.row.strict_tau,
            "tokens_per_second_ratio": cell.lossy.speed_ratio,
            "above_exact": cell.above,
            "exact_tau": _row(measured[cell.heads], EXACT).tau,
            "questions": [each._asdict() for each in measured[cell.heads].sums[cell.row.group]],
        }
        for cell in all_cells(grid, measured)
    ]
    write_text(folder / "heads.json", json.dumps(as_numbers(rows), indent=1) + "\n")
    draw(grid, measured, folder)


def _all_intervals(grid: Grid, measured: Measured) -> list[str]:
    lines = [
        "| rule | tau (95%) | / exact (95%) | relaxed share | nats a token below exact (95%) | "
        "tokens/s / exact's (95%) |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {cell.row.group} | {inline(cell.row.tau, 2)} | {inline(cell.lossy.tau_ratio)} | "
        f"{cell.row.relaxed_share:.1%} | {inline(cell.lossy.log_probability_cost)} | "
        f"{inline(cell.lossy.speed_ratio)} |"
        for cell in all_cells(grid, measured)
    ]
    return lines


def _row(summary: Summary, group: str) -> Row:
    return next(row for row in summary.rows if row.group == group)


class Quantity(NamedTuple):
    """What a heat map shows."""

    key: str
    title: str
    form: str
    of: Callable[[Cell], Estimate | float]


QUANTITIES = (
    Quantity("tau", "tau (tokens a step)", ".2f", lambda cell: cell.row.tau),
    Quantity("tau_ratio", "tau / exact's tau", ".3f", lambda cell: cell.lossy.tau_ratio),
    Quantity(
        "relaxed_share",
        "share of accepted draft tokens\nthat are not the target's argmax",
        ".1%",
        lambda cell: cell.row.relaxed_share,
    ),
    Quantity(
        "cost",
        "log-probability of an answer's token\nbelow exact's, nats",
        ".3f",
        lambda cell: cell.lossy.log_probability_cost,
    ),
)


def draw(grid: Grid, measured: Measured, folder: Path) -> None:
    """A figure an axis, png and pdf: a heat map for each of ``QUANTITIES``."""
    cells = all_cells(grid, measured)
    questions = len(next(iter(measured.values())).question_ids)
    exact = _row(next(iter(measured.values())), EXACT).tau
    for axis, values in grid.axes.items():
        mine = [cell for cell in cells if cell.axis == axis]
        figure = new_figure(3.2 + 1.3 * len(values), 2.4 + 0.8 * len(grid.heads))
        for panel, quantity in zip(figure.subplots(2, 2).flat, QUANTITIES, strict=True):
            _heat_map(panel, grid, values, mine, quantity)
        figure.suptitle(
            f"{grid.rule} on {questions} questions of {grid.benchmark}; exact's tau "
            f"{inline(exact, 2)}.\nIn brackets: tau not shown to lie above exact's (paired 95% "
            "interval over questions)",
            fontsize=10,
        )
        figure.supxlabel(AXES[axis], fontsize=10)
        figure.supylabel("K (dropout heads)", fontsize=10)
        save_figure(figure, folder, f"heads-{axis.replace('_', '-')}")


def _heat_map(
    panel: Any, grid: Grid, values: Sequence[float], cells: Sequence[Cell], quantity: Quantity
) -> None:
    """K downwards, the axis' values to the right; cells not measured yet are white."""
    shown = np.full((len(grid.heads), len(values)), math.nan)
    marked: dict[tuple[int, int], str] = {}
    for cell in cells:
        place = list(grid.heads).index(cell.heads), list(values).index(cell.value)
        value = quantity.of(cell)
        shown[place] = value.value if isinstance(value, Estimate) else value
        text = format(shown[place], quantity.form)
        marked[place] = text if cell.above else f"({text})"
    # cividis ascends in luminance alone, so it reads the same in grey and to the colour-blind.
    image = panel.imshow(shown, cmap="cividis", aspect="auto")
    for (row, column), text in marked.items():
        panel.text(
            column,
            row,
            text,
            ha="center",
            va="center",
            fontsize=8,
            color=_readable_on(image.to_rgba(shown[row, column])),
        )
    panel.set_title(quantity.title, fontsize=9)
    panel.set_xticks(range(len(values)), [f"{value:g}" for value in values], fontsize=8)
    panel.set_yticks(range(len(grid.heads)), [str(K) for K in grid.heads], fontsize=8)


def _readable_on(color: Sequence[float]) -> str:
    """Black or white, whichever has more contrast with an sRGB colour (WCAG 2's luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # (1 + 0.05) / (L + 0.05) > (L + 0.05) / (0 + 0.05)
    return "white" if (luminance + 0.05) ** 2 < 1.05 * 0.05 else "black"
