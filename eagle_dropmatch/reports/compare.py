"""Finished runs and depth sweeps side by side: pictures, and a table of the numbers drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..evals.plan import EXACT
from ..evals.statistics import CONFIDENCE
from ..evals.table import as_numbers, inline
from ..files import check_writable, write_text
from .bar_figure import draw_bars
from .cost_figure import draw_costs
from .histogram_figure import draw_histograms
from .rule_numbers import NAMES, RuleNumbers, numbers_of
from .stored_run import StoredRun, read_run
from .stored_sweep import StoredSweep, is_sweep, read_sweep, require_same_questions
from .sweep_figure import draw_sweeps

BARS, HISTOGRAM, COST, DEPTH = "bars", "histogram", "cost", "depth"
FIGURES = (BARS, HISTOGRAM, COST, DEPTH)

Numbers = Sequence[tuple[StoredRun, Sequence[RuleNumbers]]]


def compare(
    folders: Sequence[Path],
    output: Path,
    figures: Sequence[str] | None = None,
    *,
    partial: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Read every folder again, draw, and write compare.md and compare.json.

    Args:
        folders: of runs and of depth sweeps, in the order in which they are drawn.
        figures: some of ``FIGURES``; None: all that the folders have numbers for.
        partial: draw what is complete of runs that have not ended.
        say: takes a line about everything that is left out.

    UserError before anything is written if a folder cannot be read or a chosen figure has nothing
    to show.
    """
    if len(set(folders)) != len(folders):
        raise UserError(f"{' '.join(map(str, folders))}: the same folder twice")
    sweeps = [read_sweep(path, partial=partial) for path in folders if is_sweep(path)]
    runs = [read_run(path, partial=partial) for path in folders if not is_sweep(path)]
    if sweeps:
        require_same_questions(sweeps)
    numbers = [(run, numbers_of(run)) for run in runs]
    for run, rules in numbers:
        if not rules:
            raise UserError(f"{run.path} has no arm that drafts, so there is nothing to compare")
    chosen = _chosen(figures, numbers, sweeps, say)
    check_writable(output)
    blocks = {_title(run, runs): rules for run, rules in numbers}
    if BARS in chosen:
        for run, rules in numbers:
            if rules[0].speed is None:
                say(f"{run.path}: no plain arm and no exact arm, so no speed is drawn")
        draw_bars(blocks, output)
    if HISTOGRAM in chosen:
        draw_histograms(blocks, output)
    if COST in chosen:
        draw_costs(blocks, output)
    if DEPTH in chosen:
        draw_sweeps(sweeps, output)
    write_text(output / "compare.md", as_markdown(numbers, sweeps))
    write_text(output / "compare.json", as_json(numbers, sweeps))


def _chosen(
    figures: Sequence[str] | None,
    numbers: Numbers,
    sweeps: Sequence[StoredSweep],
    say: Callable[[str], None],
) -> list[str]:
    """The figures to draw; one that was asked for by name and cannot be drawn is an error."""
    lacking: dict[str, str] = {}
    if not numbers:
        lacking |= dict.fromkeys((BARS, HISTOGRAM, COST), "no run is given")
    elif not any(each.lossy for _, rules in numbers for each in rules):
        lacking[COST] = "no run has a lossy rule"
    if not sweeps:
        lacking[DEPTH] = "no folder of sweep_depth.py is given"
    for name in figures or ():
        if name in lacking:
            raise UserError(f"--figures {name}: {lacking[name]}; leave it out, or give one")
    if figures is not None:
        return list(figures)
    if numbers and COST in lacking:
        say(f"no {COST} figure: {lacking[COST]}")
    return [name for name in FIGURES if name not in lacking]


def _title(run: StoredRun, runs: Sequence[StoredRun]) -> str:
    """Told by the whole path where two folders have one name."""
    same = sum(other.path.name == run.path.name for other in runs)
    return run.title if same == 1 else run.title.replace(run.path.name, str(run.path), 1)


def as_markdown(numbers: Numbers, sweeps: Sequence[StoredSweep]) -> str:
    """The numbers of the bars and of the depth sweeps; compare.json has all others."""
    lines: list[str] = []
    if numbers:
        lines += [
            "| run | rule | tau | tokens/s | nats a token below exact | relaxed share | front |",
            "|---|---|--:|--:|--:|--:|---|",
        ]
    for run, rules in numbers:
        lines += [f"| {run.title} | {' | '.join(_cells(each))} |" for each in rules]
    for sweep in sweeps:
        lines += [
            "",
            f"{sweep.title}: {sweep.benchmark}, {sweep.questions} questions",
            "",
            "| levels (depth) | nodes | rule | tau | nats a token below exact |",
            "|--:|--:|---|--:|--:|",
        ]
        lines += [
            f"| {point.levels} ({point.levels - 1}) | {point.nodes} | {rule} "
            f"| {inline(point.tau, 2)} | {'-' if point.cost is None else inline(point.cost)} |"
            for rule, points in sweep.curves.items()
            for point in points
        ]
    return "\n".join(lines).lstrip() + "\n"


def _cells(each: RuleNumbers) -> list[str]:
    speed = "-"
    if each.speed is not None and each.baseline is not None:
        speed = f"{inline(each.speed)} x {NAMES[each.baseline]}"
    return [
        each.name,
        inline(each.tau, 2),
        speed,
        "-" if each.cost is None else "0" if each.rule == EXACT else inline(each.cost),
        f"{100 * each.relaxed_share:.1f}%",
        "yes" if each.on_front else "",
    ]


def as_json(numbers: Numbers, sweeps: Sequence[StoredSweep]) -> str:
    """Every number drawn; null where there is none."""
    content = {
        "confidence": CONFIDENCE,
        "runs": [
            {
                "folder": run.path.as_posix(),
                "benchmark": run.benchmark,
                "questions": len(run.summary.question_ids),
                "unfinished": run.unfinished,
                "rules": [_fields(each) for each in rules],
            }
            for run, rules in numbers
        ],
        "sweeps": [
            {
                "folder": sweep.path.as_posix(),
                "benchmark": sweep.benchmark,
                "questions": sweep.questions,
                "shape": sweep.shape,
                "unfinished": sweep.unfinished,
                "curves": {
                    rule: [_fields(point) for point in points]
                    for rule, points in sweep.curves.items()
                },
            }
            for sweep in sweeps
        ],
    }
    return json.dumps(as_numbers(content), ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _fields(value: Any) -> Mapping[str, Any]:
    """A dataclass's fields, its estimates as they are: asdict would take named tuples apart."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
