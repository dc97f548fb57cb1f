"""How many draft tokens a step accepts: each rule of finished runs beside exact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evals.plan import EXACT
from ..evals.statistics import Estimate
from ..evals.table import inline
from ..figures import (
    EXACT_STYLE,
    SMALLEST,
    Style,
    error_bars,
    new_figure,
    save_figure,
)
from .rule_numbers import Blocks, RuleNumbers, families_of, headings, style_of

FEW, COLUMNS, MOST_COLUMNS = 16, 4, 6
"""Up to so many rules stand in so many columns; more in more."""


def draw_histograms(blocks: Blocks, folder: Path) -> None:
    """histogram.png and .pdf: for each rule the shares of steps, and below them P(next | so far).

    The lower panel is the conditional acceptance by level: of the steps that accepted n draft
    tokens, those which accepted one more. Levels too rarely reached for an interval are left out.
    """
    pairs = [
        (title, next((each for each in rules if each.rule == EXACT), None), rule)
        for title, rules in blocks.items()
        for rule in rules
        if rule.rule != EXACT or len(rules) == 1
    ]
    columns = min(len(pairs), COLUMNS if len(pairs) <= FEW else MOST_COLUMNS)
    lines = -(-len(pairs) // columns)
    figure = new_figure(0.6 + 2.7 * columns, 3.9 * lines)
    panels = figure.subplots(
        2 * lines, columns, squeeze=False, sharey=False, height_ratios=[1.35, 1] * lines
    )
    families = families_of(each for _, _, each in pairs)
    deepest = max(len(each.shares) for _, exact, rule in pairs for each in (exact or rule, rule))
    highest = max(_highest(each) for _, exact, rule in pairs for each in (exact or rule, rule))
    told = headings(figure, blocks, [(title, _lines(rule)) for title, _, rule in pairs])
    for index in range(lines * columns):
        upper, lower = (panels[2 * (index // columns) + part, index % columns] for part in (0, 1))
        if index >= len(pairs):
            upper.set_visible(False)
            lower.set_visible(False)
            continue
        _, exact, rule = pairs[index]
        shown = [(EXACT_STYLE, exact)] if exact is not None and exact is not rule else []
        shown.append((style_of(rule, families), rule))
        _pair(upper, lower, shown)
        upper.set_title(told[index], fontsize=SMALLEST)
        upper.set_ylim(0, 1.05 * highest)
        for panel in (upper, lower):
            panel.set_xlim(-0.6, deepest - 0.4)
            panel.tick_params(labelsize=SMALLEST)
            panel.spines[["top", "right"]].set_visible(False)
            panel.xaxis.get_major_locator().set_params(integer=True)
        if index % columns == 0:
            upper.set_ylabel("share of steps", fontsize=SMALLEST)
            lower.set_ylabel("P(a > n | a >= n)", fontsize=SMALLEST)
    save_figure(figure, folder, "histogram")


def _pair(upper: Any, lower: Any, shown: Sequence[tuple[Style, RuleNumbers]]) -> None:
    """Bars side by side in the upper panel, lines in the lower one."""
    width = 0.8 / len(shown)
    for number, (style, rule) in enumerate(shown):
        offset = (number - (len(shown) - 1) / 2) * width
        middle, bars = _parts(rule.shares)
        upper.bar(
            [a + offset for a in range(len(middle))],
            middle,
            width,
            yerr=bars,
            color=style.color,
            hatch=style.hatch * 2,
            edgecolor="white",
            linewidth=0.3,
            error_kw={"elinewidth": 0.8, "ecolor": "black"},
            label=rule.name if rule.family == EXACT else "the rule",
        )
        # A single question has no intervals at all, and then every level is drawn.
        sure = any(each.interval is not None for each in rule.conditional)
        known = [
            (n + offset / 2, each)
            for n, each in enumerate(rule.conditional)
            if each.interval is not None or not sure
        ]
        middle, bars = _parts([each for _, each in known])
        lower.errorbar(
            [place for place, _ in known],
            middle,
            yerr=bars,
            color=style.color,
            marker=style.marker,
            linestyle=style.dashes,
            markersize=4,
            linewidth=1.1,
            elinewidth=0.8,
        )
    upper.set_xlabel("a: draft tokens accepted in a step", fontsize=SMALLEST, labelpad=1)
    lower.set_xlabel("n: draft tokens accepted so far", fontsize=SMALLEST, labelpad=1)
    lower.set_ylim(0, 1.05)
    if len(shown) > 1:
        upper.legend(fontsize=SMALLEST, frameon=False, loc="upper right")


def _parts(estimates: Sequence[Estimate]) -> tuple[list[float], list[list[float]]]:
    middle = [each.value for each in estimates]
    return middle, error_bars(middle, [each.interval for each in estimates])


def _highest(rule: RuleNumbers) -> float:
    return max((each.interval.high if each.interval else each.value) for each in rule.shares)


def _lines(rule: RuleNumbers) -> list[str]:
    """The rule, its tau, and what that costs."""
    lines = [rule.name, f"tau {inline(rule.tau, 2)}"]
    if rule.lossy and rule.cost is not None:
        lines.append(f"{inline(rule.cost)} nats below exact's")
    return lines
