"""What lossy rules gain and what they pay: tau against nats a token below exact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evals.plan import EXACT
from ..figures import (
    EXACT_STYLE,
    SMALLEST,
    STYLES,
    Style,
    error_bars,
    new_figure,
    save_figure,
)
from .rule_numbers import Blocks, RuleNumbers, families_of, headings, style_of

COLUMNS = 4
PALE = "0.8"
"""Of the other families behind a panel's own."""


def draw_costs(blocks: Blocks, folder: Path) -> None:
    """cost.png and .pdf: a panel for each run with lossy rules, its families in one panel.

    A run of more families than can be told apart has a panel for each, in front of the others in
    grey. Rules of one family are joined in the order of their cost; rings mark the run's front.
    """
    panels: list[tuple[str, Sequence[RuleNumbers], str | None]] = []
    for title, rules in blocks.items():
        priced = [each for each in rules if each.cost is not None]
        families = families_of(priced)
        if not families:
            continue
        if len(families) <= len(STYLES):
            panels.append((title, priced, None))
        else:
            panels += [(title, priced, family) for family in families]
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    side = 3.9 if columns <= 2 else 2.9
    figure = new_figure(1.25 * side * columns, side * lines + 0.3)
    axes = list(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat)
    shared = families_of(each for _, rules, alone in panels if alone is None for each in rules)
    told = headings(figure, blocks, [(title, [alone or ""]) for title, _, alone in panels])
    for panel, heading, (_, rules, alone) in zip(axes, told, panels, strict=False):
        _panel(panel, rules, shared, alone)
        panel.set_title(heading, fontsize=SMALLEST)
        panel.tick_params(labelsize=SMALLEST, labelbottom=True, labelleft=True)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    named = {
        label: handle
        for panel in axes
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        named.values(), named, loc="outside right upper", fontsize=SMALLEST, frameon=False
    )
    figure.supxlabel("nats a token below exact's", fontsize=SMALLEST + 1)
    figure.supylabel("tau (tokens a step)", fontsize=SMALLEST + 1)
    save_figure(figure, folder, "cost")


def _panel(
    panel: Any, rules: Sequence[RuleNumbers], families: Sequence[str], alone: str | None
) -> None:
    """All families, or one of them in front of the others."""
    panel.axvline(0, color=PALE, linewidth=0.8, zorder=0)
    for family in dict.fromkeys(each.family for each in rules):
        points = sorted(
            (each for each in rules if each.family == family), key=lambda each: _cost(each)
        )
        if alone in (None, family) or family == EXACT:
            style = STYLES[0] if family == alone else style_of(points[0], families)
            _curve(panel, points, family, style, named=alone is None or family == EXACT)
        else:
            panel.plot(
                [_cost(each) for each in points],
                [each.tau.value for each in points],
                color=PALE,
                marker=".",  # a family of one point has no line
                markersize=3,
                linewidth=0.8,
                zorder=1,
            )
    front = sorted((each for each in rules if each.on_front), key=_cost)
    ringed = [each for each in front if alone in (None, each.family)]
    panel.plot(
        [_cost(each) for each in front],
        [each.tau.value for each in front],
        drawstyle="steps-post",
        color="0.45",
        linewidth=0.8,
        linestyle=(0, (1, 2)),
        zorder=1,
    )
    panel.plot(
        [_cost(each) for each in ringed],
        [each.tau.value for each in ringed],
        "o",
        markersize=11,
        markerfacecolor="none",
        markeredgecolor="black",
        markeredgewidth=1.0,
        zorder=4,
        label="on the front: no rule has\nmore tau for less cost",
    )


def _curve(
    panel: Any, points: Sequence[RuleNumbers], label: str, style: Style, *, named: bool
) -> None:
    xs, ys = [_cost(each) for each in points], [each.tau.value for each in points]
    panel.errorbar(
        xs,
        ys,
        xerr=error_bars(xs, [each.cost.interval if each.cost else None for each in points]),
        yerr=error_bars(ys, [each.tau.interval for each in points]),
        color=style.color,
        marker=style.marker,
        linestyle=style.dashes,
        markersize=5,
        linewidth=1.4,
        elinewidth=0.8,
        label=label if named else None,
        zorder=3,
    )
    if label == EXACT:
        panel.axhline(ys[0], color=EXACT_STYLE.color, linestyle=":", linewidth=0.8, zorder=1)


def _cost(each: RuleNumbers) -> float:
    assert each.cost is not None, "only rules with a cost have a place"
    return each.cost.value
