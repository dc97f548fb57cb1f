"""Every acceptance rule over its knob, and the figure that sets its gain against its price."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..evals.summary import LossyComparison, Row, Summary
from ..figures import error_bars, new_figure, save_figure
from ..files import write_text
from .equal_cost import as_markdown, equal_cost

SWEEP: Mapping[str, tuple[str, ...]] = {
    "naive, auto": tuple(f"naive(head_agreement={share})" for share in (0.95, 0.9, 0.8, 0.7, 0.6)),
    "naive, fixed": tuple(f"naive(p_drop={p})" for p in (0.01, 0.03, 0.1, 0.3)),
    "naive, clean head in": tuple(
        f"naive(head_agreement={share}, include_clean=True)" for share in (0.9, 0.8, 0.7)
    ),
    "naive, gaussian": tuple(
        f"naive(head_agreement={share}, noise=gaussian)" for share in (0.9, 0.8, 0.7)
    ),
    "naive, swag": tuple(f"naive(p_drop={p}, noise=swag)" for p in (0.01, 0.03, 0.1)),
    "naive, running": tuple(
        f"naive(head_agreement={share}, p_drop=running)" for share in (0.9, 0.8, 0.7)
    ),
    "naive, p by entropy": tuple(
        f"naive(head_agreement={share}, adapt=entropy)" for share in (0.9, 0.8, 0.7)
    ),
    "naive, p by margin": tuple(
        f"naive(head_agreement={share}, adapt=margin)" for share in (0.9, 0.7, 0.5)
    ),
    "naive, mixed rates": (
        "naive(p_drop=[0.005, 0.01, 0.02, 0.04, 0.08])",
        "naive(p_drop=[0.01, 0.02, 0.04, 0.08, 0.16])",
    ),
    "flip_probability": tuple(f"flip_probability(threshold={t})" for t in (0.9, 0.7, 0.5, 0.3)),
    "majority": tuple(f"majority(head_agreement={share})" for share in (0.8, 0.6, 0.4)),
    "js": tuple(f"js(head_agreement={share})" for share in (0.8, 0.5)),
    "dropmatch": tuple(f"dropmatch(head_agreement={share})" for share in (0.8, 0.5)),
    "margin": tuple(f"margin(kappa={kappa})" for kappa in (0.9, 0.7, 0.5, 0.3, 0.1)),
    "min_p": tuple(f"min_p(alpha={alpha})" for alpha in (0.2, 0.6, 0.8)),
    "lenience": tuple(f"lenience(lenience={lenience})" for lenience in (0.8, 0.4, 0.2)),
    "typical": tuple(
        f"typical(eps={eps}, delta={delta})"
        for eps, delta in ((0.3, 0.9), (0.09, 0.3), (0.03, 0.1))
    ),
    "mars": tuple(f"mars(theta={theta})" for theta in (0.98, 0.95, 0.9, 0.84)),
    "top_k": ("top_k(k=2)", "top_k(k=3)"),
    "relaxed_top_n": tuple(f"relaxed_top_n(n=10, delta={d})" for d in (0.1, 0.3, 0.6)),
    "thresholds": tuple(f"thresholds(single={single})" for single in (0.4, 0.2, 0.1)),
    "fuzzy_js": tuple(f"fuzzy_js(threshold={t})" for t in (0.1, 0.2, 0.3)),
    "kl_judge": tuple(f"kl_judge(threshold={t})" for t in (0.3, 0.6, 1.2)),
    "entropy_gate": (
        "entropy_gate(theta=0.3, window=2)",
        "entropy_gate(theta=0.2, window=2)",
        "entropy_gate(theta=0.2, window=1)",
    ),
    "regret_budget": tuple(f"regret_budget(gap={gap})" for gap in (0.05, 0.1, 0.25)),
}
"""Curve -> rules from strict to loose."""


def by_name(rules: Iterable[str]) -> dict[str, list[str]]:
    """Expressions under the names of their outermost rules, in their order."""
    found: dict[str, list[str]] = {}
    for rule in rules:
        found.setdefault(rule.partition("(")[0], []).append(rule)
    return found


COSTS = (0.03, 0.06, 0.1, 0.2)
"""Nats a token at which the rules are compared."""
REFERENCE = "naive, auto"


def report(summary: Summary, folder: Path, curves: Mapping[str, Sequence[str]] = SWEEP) -> None:
    """The figures, and every curve's tau at equal costs: equal-cost.md, also printed."""
    draw(summary, folder, curves)
    reference = REFERENCE if REFERENCE in curves else next(iter(curves))
    text = as_markdown(equal_cost(summary, curves, COSTS, reference), reference)
    write_text(folder / "equal-cost.md", text)
    print("\n" + text, end="")


def draw(summary: Summary, folder: Path, curves: Mapping[str, Sequence[str]] = SWEEP) -> None:
    """Small multiples of tau against relaxed share and log-probability cost, png and pdf.

    A panel a curve, in front of all others in grey: two dozen curves over each other could be told
    apart by nobody. Curves without a measured rule have no panel.
    """
    rows = {row.group: row for row in summary.rows}
    lossy = {comparison.group: comparison for comparison in summary.comparisons}
    shown = {
        name: found
        for name, rules in curves.items()
        if (found := [_point(rows[rule], lossy[rule]) for rule in rules if rule in lossy])
    }
    exact = rows["exact"]
    for key, label, file in (
        ("relaxed", "relaxed share of accepted draft tokens", "rules-relaxed"),
        ("cost", "log-probability below exact's, nats a token", "rules-cost"),
    ):
        columns = 4
        lines = -(-len(shown) // columns)
        figure = new_figure(11, 2.3 * lines + 0.9)
        panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
        for panel, name in zip(panels, shown, strict=False):
            for other in shown.values():
                panel.plot(
                    [point[key] for point in other],
                    [point["tau"] for point in other],
                    color="0.8",
                    marker=".",  # curves of one point have no line
                    markersize=3,
                    linewidth=0.8,
                    zorder=1,
                )
            panel.axhline(exact.tau.value, color="0.4", linestyle="--", linewidth=0.9, zorder=2)
            _curve(panel, shown[name], key)
            panel.set_title(name, fontsize=9)
            panel.tick_params(labelsize=8)
        for index, panel in enumerate(figure.axes):
            panel.set_visible(index < len(shown))
        figure.supxlabel(label, fontsize=10)
        figure.supylabel("tau (tokens a step); dashed: exact", fontsize=10)
        save_figure(figure, folder, file)


def _point(row: Row, lossy: LossyComparison) -> dict[str, Any]:
    return {
        "tau": row.tau.value,
        "tau_interval": row.tau.interval,
        "relaxed": row.relaxed_share,
        "cost": lossy.log_probability_cost.value,
        "cost_interval": lossy.log_probability_cost.interval,
    }


def _curve(panel: Any, points: Sequence[Mapping[str, Any]], key: str) -> None:
    """A rule's points from strict to loose, with both intervals where there are two."""
    xs, ys = [p[key] for p in points], [p["tau"] for p in points]
    errors: dict[str, Any] = {"yerr": _bars(points, "tau")}
    if key == "cost":
        errors["xerr"] = _bars(points, "cost")
    panel.errorbar(
        xs,
        ys,
        **errors,
        color="black",
        marker="o",
        markersize=4,
        linewidth=1.4,
        elinewidth=0.7,
        zorder=3,
    )


def _bars(points: Sequence[Mapping[str, Any]], key: str) -> list[list[float]]:
    return error_bars([p[key] for p in points], [p[f"{key}_interval"] for p in points])
