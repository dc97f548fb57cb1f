"""A folder of sweep_depth.py read back for figures: tau by draft levels, rule by rule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..evals.folder import header_in
from ..evals.plan import EXACT
from ..evals.statistics import Estimate, Interval

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class SweepPoint:
    """One rule with trees of so many draft levels."""

    levels: int
    nodes: int
    """Of a tree, root included."""
    tau: Estimate
    cost: Estimate | None
    """Nats a token below exact's; None for lossless rules."""


@dataclass(frozen=True)
class StoredSweep:
    """A curve for each rule."""

    path: Path
    benchmark: str
    questions: int
    curves: dict[str, tuple[SweepPoint, ...]]
    """By rule; points ascend in their levels."""
    unfinished: bool

    @property
    def shape(self) -> str:
        """How the trees grow with their levels, from the nodes that they have."""
        points = next(iter(self.curves.values()))
        if all(point.nodes == 1 + point.levels for point in points):
            return "chain"
        *_, last = points
        each = {(point.nodes - 1) / point.levels for point in points[-2:]}
        if len(points) > 1 and len(each) == 1:
            return f"tree, growing by {each.pop():g} nodes a level"
        return f"tree, {last.nodes} nodes"

    @property
    def title(self) -> str:
        told = f"{self.path.name} ({self.shape})"
        return f"{told}, unfinished" if self.unfinished else told


def is_sweep(path: Path) -> bool:
    return (path / SWEEP_FILE).is_file()


def read_sweep(path: Path, *, partial: bool = False) -> StoredSweep:
    """The curves in ``path``.

    UserError for a file that is none of sweep_depth.py's, an unfinished sweep without ``partial``
    and a lossy rule without what it costs.
    """
    headers = [header_in(each) for each in sorted(path.glob("levels-*"))]
    unfinished = any(header is None or not header["finished"] for header in headers)
    if unfinished and not partial:
        raise UserError(
            f"{path} is not finished; go on with the command that began it, or take what is "
            "complete with --partial"
        )
    arguments = next((header["arguments"] for header in headers if header is not None), None)
    if arguments is None:
        raise UserError(
            f"{path} holds no levels-*/run.json, which say what the sweep asked; expected the "
            "whole output folder of sweep_depth.py"
        )
    try:
        rows = json.loads((path / SWEEP_FILE).read_text(encoding="utf-8"))
        curves: dict[str, list[SweepPoint]] = {}
        for row in rows:
            curves.setdefault(row["rule"], []).append(_point(path, row))
        questions = len(rows[0]["questions"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path / SWEEP_FILE} is not a sweep's ({type(error).__name__}: {error}); make it "
            "again with the command that began it"
        ) from None
    ascending = {
        rule: tuple(sorted(points, key=lambda point: point.levels))
        for rule, points in curves.items()
    }
    return StoredSweep(path, arguments["benchmark"], questions, ascending, unfinished)


def require_same_questions(sweeps: Sequence[StoredSweep]) -> None:
    """Curves of different questions in one panel would show the questions' difference."""
    asked = {
        sweep.path: (header["arguments"]["questions_sha256"], sweep.questions)
        for sweep in sweeps
        for header in [header_in(next(iter(sorted(sweep.path.glob("levels-*")))))]
        if header is not None
    }
    first, *others = asked
    for path in others:
        if asked[path] != asked[first]:
            raise UserError(
                f"{first} and {path} asked different questions, so their curves cannot be "
                "compared; measure both with the same --questions and --limit"
            )


def _point(path: Path, row: dict[str, Any]) -> SweepPoint:
    cost = row["cost"]
    if row["rule"] != EXACT and row["relaxed_share"] and (cost is None or cost["value"] is None):
        raise UserError(
            f"{path}: {row['rule']} is lossy and has no cost at {row['levels']} levels, and a "
            f"lossy rule is not drawn without its quality; sweep again with {EXACT} among the arms"
        )
    return SweepPoint(row["levels"], row["nodes"], _estimate(row["tau"]), _estimate_or_none(cost))


def _estimate(told: dict[str, Any]) -> Estimate:
    bounds = told["interval"]
    return Estimate(float(told["value"]), None if bounds is None else Interval(*bounds))


def _estimate_or_none(told: dict[str, Any] | None) -> Estimate | None:
    return None if told is None else _estimate(told)
