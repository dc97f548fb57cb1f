"""What all figures of the evaluation share: matplotlib without a display, png and pdf."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .errors import UserError
from .files import replacing


def require_matplotlib() -> None:
    """UserError where figures could not be drawn: better before the run than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the figures need matplotlib: run `pip install eagle-dropmatch[plot]`")


GREYS = (("black", "o", "-"), ("0.35", "s", "--"), ("0.6", "^", "-."), ("0.75", "D", ":"))
"""Colour, marker and dashes of a figure's lines, told apart without colour."""


class Style(NamedTuple):
    """How a rule or a curve looks: every part alone tells it from the others."""

    color: str
    marker: str
    dashes: Any
    hatch: str


STYLES = (
    Style("#0072B2", "s", "--", "//"),
    Style("#D55E00", "^", "-.", "\\\\"),
    Style("#009E73", "D", ":", ".."),
    Style("#CC79A7", "v", (0, (5, 1)), "xx"),
    Style("#56B4E9", "P", (0, (3, 1, 1, 1)), "--"),
    Style("#E69F00", "X", (0, (1, 1)), "++"),
    Style("#8C510A", "*", (0, (6, 2, 1, 2)), "||"),
    Style("#4B2E83", "p", (0, (8, 3)), "oo"),
)
"""Okabe's and Ito's colours, which the colour-blind tell apart, and two more."""
EXACT_STYLE = Style("0.45", "o", "-", "")
SMALLEST = 8
"""Points of the smallest letters, at the size that a figure is drawn at."""


def error_bars(
    values: Sequence[float], intervals: Sequence[tuple[float, float] | None]
) -> list[list[float]]:
    """What lies below and above each value, as matplotlib takes it; 0 without an interval."""
    bounds = [interval or (value, value) for value, interval in zip(values, intervals, strict=True)]
    return [
        [max(value - low, 0.0) for value, (low, _) in zip(values, bounds, strict=True)],
        [max(high - value, 0.0) for value, (_, high) in zip(values, bounds, strict=True)],
    ]


def level_axis(panel: Any, levels: Sequence[int], size: float | None = None) -> None:
    """Draft levels to the right, EAGLE's --depth in brackets. ``size``: of the axis' name."""
    panel.set_xticks(levels, [f"{level}\n[{level - 1}]" for level in levels], fontsize=SMALLEST)
    panel.set_xlabel("draft levels [EAGLE's --depth]", fontsize=size)


def new_figure(width: float, height: float) -> Any:
    """A figure of this size in inches that no window belongs to."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, folder: Path, name: str) -> None:
    """``name``.png and ``name``.pdf, each whole or not at all."""
    for ending in ("png", "pdf"):
        with replacing(folder / f"{name}.{ending}", "wb") as file:
            figure.savefig(file, dpi=130, format=ending)
