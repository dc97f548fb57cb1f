"""Bars of finished runs: tau, speed and cost of every rule beside exact, with intervals."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..evals.plan import EXACT
from ..evals.statistics import Estimate
from ..evals.table import inline
from ..figures import SMALLEST, error_bars, new_figure, save_figure
from .rule_numbers import NAMES, Blocks, RuleNumbers, families_of, style_of

LABEL_WIDTH = 36
"""Characters of a line of a rule's label."""
ROOM_FOR_NUMBERS = 1.75
"""The axis' length over the longest bar's: numbers stand behind the bars."""

Column = tuple[str, Callable[[RuleNumbers], Estimate | None], float, int]
"""Axis label, what is drawn, the value of no effect, digits."""


def draw_bars(blocks: Blocks, folder: Path) -> None:
    """bars.png and .pdf: a block of bars for each run, a column for each measure.

    Bars lie, so that the rules' names have room. Where nothing is lossy there is no cost, and
    where nothing can be compared with, no speed.
    """
    everything = [each for rules in blocks.values() for each in rules]
    columns = columns_of(everything)
    labels = {title: [_label(each.name) for each in rules] for title, rules in blocks.items()}
    lines = [1 + sum(1 + label.count("\n") for label in found) for found in labels.values()]
    figure = new_figure(1.9 + 2.75 * len(columns), 0.2 * sum(lines) + 0.75 * len(blocks))
    panels = figure.subplots(
        len(blocks), len(columns), squeeze=False, sharex="col", height_ratios=lines
    )
    families = families_of(everything)
    for line, (title, rules) in zip(panels, blocks.items(), strict=True):
        for number, (panel, column) in enumerate(zip(line, columns, strict=True)):
            _block(panel, rules, column, families)
            panel.set_yticks(_places(labels[title]), labels[title] if number == 0 else [])
        line[0].set_title(title, loc="left", fontsize=SMALLEST + 1, fontweight="bold")
    for index, (_, value, neutral, _) in enumerate(columns):
        found = [value(each) for each in everything]
        ends = [bound for each in found if each for bound in (*(each.interval or ()), each.value)]
        low, high = min(0.0, *ends), max(0.0, neutral, *ends)
        panels[0, index].set_xlim(1.05 * low, high + (ROOM_FOR_NUMBERS - 1) * (high - low))
    save_figure(figure, folder, "bars")


def columns_of(rules: Sequence[RuleNumbers]) -> list[Column]:
    """The measures that these rules have."""
    columns: list[Column] = [("tau (tokens a step; dotted: plain)", lambda each: each.tau, 1.0, 2)]
    if any(each.speed is not None for each in rules):
        columns.append(("tokens/s over {}", lambda each: each.speed, 1.0, 2))
    if any(each.lossy for each in rules):
        columns.append(("nats a token below exact's", lambda each: each.cost, 0.0, 3))
    return columns


def _block(
    panel: Any, rules: Sequence[RuleNumbers], column: Column, families: Sequence[str]
) -> None:
    """One measure of one run."""
    axis, value, neutral, digits = column
    places = _places([_label(each.name) for each in rules])
    for place, each in zip(places, rules, strict=True):
        found = value(each)
        if found is None:
            # Speed is there for all of a run's rules or for none; only a cost can be missing.
            panel.text(0, place, " lossless", va="center", fontsize=SMALLEST)
            continue
        exact = each.family == EXACT
        style = style_of(each, families)
        panel.barh(
            place,
            found.value,
            height=0.72,
            xerr=error_bars([found.value], [found.interval]),
            color=style.color,
            hatch=style.hatch,
            edgecolor="black" if exact else "white",
            linewidth=0.5,
            error_kw={"elinewidth": 1.1, "capsize": 2.5, "ecolor": "black"},
        )
        end = max(0.0, found.value, *(found.interval or ()))
        panel.annotate(
            inline(found, digits) if found.value or found.interval else "0",
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALLEST,
            # In front of the dotted line, and readable where it runs through.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
            zorder=4,
        )
    panel.axvline(neutral, color="black", linestyle=":", linewidth=0.9, zorder=3)
    panel.set_ylim(max(places) + 0.7, -0.7)
    panel.set_xlabel(
        axis.format(NAMES.get(rules[0].baseline or "", "?")), fontsize=SMALLEST, labelpad=1
    )
    panel.tick_params(labelsize=SMALLEST, labelbottom=True)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right"]].set_visible(False)


def _label(rule: str) -> str:
    return "\n".join(textwrap.wrap(rule, LABEL_WIDTH)) or rule


def _places(labels: Sequence[str]) -> list[float]:
    """Where bars lie: labels of more lines have more room."""
    places, end = [], -0.5
    for label in labels:
        height = 1 + 0.6 * label.count("\n")
        places.append(end + height / 2)
        end += height
    return places
