"""What all figures of the evaluation share: matplotlib without a display, png and pdf."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import replacing


def require_matplotlib() -> None:
    """UserError where figures could not be drawn: better before the run than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the figures need matplotlib: run `pip install eagle-dropmatch[plot]`")


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
