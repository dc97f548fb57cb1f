#!/usr/bin/env python
"""What every acceptance rule costs, worked out on random toys instead of measured on a model.

Target and draft are small Markov chains, so the law of a rule's answers at temperature 1 can be
enumerated with the rule's own code: its total variation (TV) and KL from the target's own law,
beside tau. A second part decodes greedily, where naive's masks alone decide, and sets its TV beside
a bound that follows from the probability that a head prefers a drafted token to the argmax.

  python scripts/toy_distortion.py --output-dir results/toy-distortion
  python scripts/toy_distortion.py --rules naive margin 'all_of(naive(K=3), floor(floor=0.1))'
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_dropmatch import cli

if TYPE_CHECKING:
    from eagle_dropmatch.studies.toy_rules import Cost

#: Rule -> settings from strict to loose. At temperature 1 each of naive's heads draws a token of
#: its own, so what loosens it is their number: its rate only has to be above 0.
CURVES: dict[str, tuple[str, ...]] = {
    "exact": ("exact",),
    "sampling": ("sampling",),
    "naive": (
        "naive(p_drop=0.0)",
        *(f"naive(K={heads}, p_drop=0.1)" for heads in (1, 2, 3, 5)),
        "naive(K=5, p_drop=0.3)",
    ),
    "majority": tuple(f"majority(p_drop={p})" for p in (0.0, 0.01, 0.05, 0.1, 0.2, 0.3)),
    "js": tuple(f"js(p_drop={p}, include_clean=True)" for p in (0.0, 0.02, 0.05, 0.1, 0.2)),
    "dropmatch": tuple(f"dropmatch(p_drop={p})" for p in (0.0, 0.02, 0.05, 0.1, 0.2)),
    "flip_probability": (
        "flip_probability(p_drop=0.0)",
        *(f"flip_probability(p_drop=0.1, threshold={t})" for t in (0.95, 0.8, 0.5, 0.2, 0.05)),
    ),
    "lenience": tuple(f"lenience(lenience={x})" for x in (1.0, 0.9, 0.7, 0.5, 0.3, 0.1)),
    "thresholds": tuple(
        f"thresholds(single={x}, accumulated={x})" for x in (1.0, 0.9, 0.7, 0.5, 0.3, 0.1)
    ),
    "typical": (
        "typical(eps=1.0, delta=inf)",
        *(f"typical(eps={eps}, delta={math.sqrt(eps):.3g})" for eps in (0.5, 0.3, 0.2, 0.09, 0.03)),
    ),
    "margin": tuple(f"margin(kappa={kappa})" for kappa in ("inf", 0.9, 0.7, 0.5, 0.3, 0.1, 0.03)),
    "min_p": tuple(f"min_p(alpha={alpha})" for alpha in ("-inf", 0.0, 0.3, 0.5, 0.7, 0.9, 1.0)),
    "mars": tuple(f"mars(theta={theta})" for theta in (1.0, 0.9, 0.8, 0.6, 0.4, 0.2, 0.0)),
    "top_k": tuple(f"top_k(k={k})" for k in (1, 2, 3, 4)),
    "relaxed_top_n": (
        "relaxed_top_n(n=1)",
        *(f"relaxed_top_n(n=10, delta={delta})" for delta in (0.1, 0.2, 0.4, 0.6, 0.8)),
    ),
    "fuzzy_js": tuple(f"fuzzy_js(threshold={t})" for t in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3)),
    "kl_judge": tuple(f"kl_judge(threshold={t})" for t in (0.0, 0.05, 0.15, 0.3, 0.6, 1.2)),
    "entropy_gate": tuple(
        f"entropy_gate(theta={theta}, window=1)" for theta in ("inf", 0.9, 0.7, 0.5, 0.3, 0.1)
    ),
    "regret_budget": (
        "regret_budget(mismatches=0)",
        *(f"regret_budget(gap={gap})" for gap in (0.1, 0.25, 0.5, 1.0, 2.0)),
    ),
}
PANELS: dict[str, tuple[str, ...]] = {
    "dropout heads": ("naive", "majority", "js", "dropmatch", "flip_probability"),
    "probability or logit of the token": ("lenience", "typical", "margin", "min_p", "mars"),
    "rank, or siblings together": ("thresholds", "top_k", "relaxed_top_n"),
    "distributions, or the whole path": ("fuzzy_js", "kl_judge", "entropy_gate", "regret_budget"),
}
#: Where a name says too little: margin and min_p are one rule under two knobs.
LABELS = {"naive": "naive, over K", "min_p": "min_p (= margin)"}
RATES = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
MARKS = (  # (colour, line, marker): told apart without the colour, too
    ("#000000", "-", "o"),
    ("#0072b2", "--", "s"),
    ("#d55e00", "-.", "^"),
    ("#009e73", ":", "D"),
    ("#cc79a7", (0, (7, 3)), "v"),
)


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    parser.add_argument("--vocab", type=cli.integer(2), default=6, metavar="V", help="tokens")
    parser.add_argument("--length", type=cli.integer(1), default=4, metavar="N", help="of answers")
    parser.add_argument("--depth", type=cli.integer(0), default=2, help="of trees, as in EAGLE")
    parser.add_argument("--top-k", type=cli.integer(1), default=3, help="of trees; 1: chains")
    parser.add_argument("--total-token", type=cli.integer(2), default=9, help="of trees")
    parser.add_argument(
        "--rules",
        nargs="+",
        metavar="RULE",
        default=list(CURVES),
        help="names, for all settings of a rule, or expressions such as margin(kappa=0.3)",
    )
    parser.add_argument("--toys", type=cli.integer(1), default=3, metavar="N", help="random toys")
    parser.add_argument("--seed", type=cli.integer(0), default=0, help="of the first toy")
    parser.add_argument(
        "--samples",
        type=cli.integer(1),
        default=600,
        metavar="N",
        help="verdicts on each node where a rule's own random numbers cannot be enumerated",
    )
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="table, JSON and figure")
    args = parser.parse_args(argv)
    if args.output_dir is not None:
        from eagle_dropmatch.figures import require_matplotlib
        from eagle_dropmatch.files import check_writable

        require_matplotlib()
        check_writable(args.output_dir)

    from eagle_dropmatch.acceptors import make_acceptor
    from eagle_dropmatch.acceptors.dropmatch import NaiveAcceptor
    from eagle_dropmatch.drafts.base import TreeShape
    from eagle_dropmatch.sampling import Sampler
    from eagle_dropmatch.studies.rule_sweep import by_name
    from eagle_dropmatch.studies.toy import all_samples, make_toy
    from eagle_dropmatch.studies.toy_rules import flip_bound, measure

    curves = by_name(each for rule in args.rules for each in CURVES.get(rule, (rule,)))
    # exact first: the figure needs it, and whatever is wrong with the sizes shows at once.
    wanted = ["exact", *(rule for rules in curves.values() for rule in rules if rule != "exact")]
    rules = {rule: make_acceptor(rule) for rule in wanted}
    shape = TreeShape(args.total_token, args.depth, args.top_k)
    costs: dict[str, list[Cost]] = {rule: [] for rule in rules}
    greedy: dict[float, list[dict[str, float]]] = {rate: [] for rate in RATES}
    for number in range(args.toys):
        toy = make_toy(args.vocab, shape, args.seed + number)
        samples = all_samples(toy, Sampler(1.0))
        for rule, built in rules.items():
            cost = measure(
                toy, built, Sampler(1.0), samples, length=args.length, draws=args.samples
            )
            costs[rule].append(cost)
        samples = all_samples(toy, Sampler())
        for rate, found in greedy.items():
            naive = NaiveAcceptor(p_drop=rate)
            cost = measure(toy, naive, Sampler(), samples, length=args.length)
            assert cost.bound is not None
            closed = flip_bound(toy, naive, args.length)
            found.append({"tv": cost.tv, "bound": cost.bound, "closed": closed})
    sizes = (
        f"{args.toys} toys of {args.vocab} tokens, answers of {args.length}, trees of "
        f"{shape.nodes} nodes (depth {args.depth}, top-k {args.top_k})"
    )
    text = table(costs, greedy, sizes, most=args.depth + 2)
    print(text, end="")
    if args.output_dir is not None:
        from eagle_dropmatch.files import write_text

        command = shlex.join(["python", "scripts/toy_distortion.py", *argv])
        write_text(args.output_dir / "toy.md", f"`{command}`\n\n{text}")
        data = {
            "command": command,
            "settings": {**vars(args), "output_dir": str(args.output_dir)},
            "rules": {rule: [asdict(cost) for cost in each] for rule, each in costs.items()},
            "naive_greedy": [{"p_drop": rate, "toys": each} for rate, each in greedy.items()],
        }
        write_text(args.output_dir / "toy.json", json.dumps(data, indent=1) + "\n")
        draw(costs, curves, greedy, args.output_dir)
    return 0


def mean(costs: Sequence[Any], name: str) -> float:
    """Over toys; NaN where the toys have no such number."""
    values = [getattr(cost, name) for cost in costs]
    return math.nan if None in values else statistics.fmean(values)


def spread(costs: Sequence[Any], name: str) -> float:
    return statistics.pstdev(getattr(cost, name) for cost in costs)


def table(
    costs: Mapping[str, Sequence[Cost]],
    greedy: Mapping[float, Sequence[Mapping[str, float]]],
    sizes: str,
    most: int,
) -> str:
    """All settings at temperature 1, rules at equal tau, and greedy naive with its bounds."""
    lines = [
        f'{sizes}. Means over toys, ± their standard deviation; "drawn": standard error of TV '
        "from drawn verdicts. Temperature 1. entropy_gate, which looks below a node, is shown with "
        "new numbers in each step.",
        "",
        "| rule | tau | TV | drawn | KL, nats | relaxed share | bound on TV |",
        "|---|---|---|---|---|---|---|",
    ]
    for rule, each in costs.items():
        bound, error = mean(each, "bound"), sum(cost.tv_error**2 for cost in each)
        cells = [
            rule,
            f"{mean(each, 'tau'):.3f} ± {spread(each, 'tau'):.2f}",
            f"{mean(each, 'tv'):.4f} ± {spread(each, 'tv'):.2f}",
            f"{math.sqrt(error) / len(each):.4f}" if error else "",
            f"{mean(each, 'kl'):.4f}",
            f"{mean(each, 'relaxed_share'):.1%}",
            "" if math.isnan(bound) else f"{bound:.4f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    exact = mean(costs["exact"], "tau")
    marks = [exact + (most - exact) * part for part in (0.25, 0.5, 0.75)]
    lines += [
        "",
        f"TV at equal tau (exact: {exact:.3f}), on straight lines between a rule's settings.",
        "",
        "| rule | " + " | ".join(f"tau {mark:.2f}" for mark in marks) + " |",
        "|---|---|---|---|",
    ]
    from eagle_dropmatch.studies.rule_sweep import by_name

    for name, rules in by_name(costs).items():
        at = [at_tau([costs[rule] for rule in rules], mark) for mark in marks]
        if any(value is not None for value in at):
            lines.append(
                f"| {name} | "
                + " | ".join("" if value is None else f"{value:.3f}" for value in at)
                + " |"
            )
    lines += [
        "",
        "Greedy naive, K = 5: the chance that an answer differs, the bound from its heads' exact "
        "probabilities, and the bound's closed form.",
        "",
        "| p_drop | TV | bound | closed form |",
        "|---|---|---|---|",
    ]
    for rate, found in greedy.items():
        values = [statistics.fmean(toy[key] for toy in found) for key in ("tv", "bound", "closed")]
        lines.append(f"| {rate:g} | " + " | ".join(f"{value:.4f}" for value in values) + " |")
    return "\n".join(lines) + "\n"


def at_tau(points: Sequence[Sequence[Cost]], tau: float) -> float | None:
    """TV where a curve first crosses ``tau``, or None where it does not."""
    where = [(mean(each, "tau"), mean(each, "tv")) for each in points]
    for (low, before), (high, after) in itertools.pairwise(where):
        if low <= tau <= high and low < high:
            return before + (after - before) * (tau - low) / (high - low)
    return None


def draw(
    costs: Mapping[str, Sequence[Cost]],
    curves: Mapping[str, Sequence[str]],
    greedy: Mapping[float, Sequence[Mapping[str, float]]],
    folder: Path,
) -> None:
    """TV against tau, a panel a family with all other rules in grey; naive's bound; all bounds."""
    from eagle_dropmatch.figures import new_figure, save_figure

    figure = new_figure(12, 7)
    panels = figure.subplots(2, 3)
    points = {
        name: ([mean(costs[r], "tau") for r in rules], [mean(costs[r], "tv") for r in rules])
        for name, rules in curves.items()
    }
    # Whatever has no family, such as rules made of rules.
    others = set(points) - {"exact", "sampling"}.union(*PANELS.values())
    exact = mean(costs["exact"], "tau")
    for panel, (title, family) in zip(panels[:, :2].flat, PANELS.items(), strict=True):
        names = [*family, *sorted(others)] if title == list(PANELS)[-1] else family
        for xs, ys in points.values():
            panel.plot(xs, ys, color="0.85", linewidth=0.8, zorder=1)
        for name, mark in zip(names, itertools.cycle(MARKS), strict=False):
            if name in points:
                _curve(panel, *points[name], LABELS.get(name, name), mark)
        panel.axvline(exact, color="0.4", linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
        panel.annotate("exact", (exact, -0.06), (5, 0), textcoords="offset points", fontsize=8)
        grey = {"color": "0.5", "fontsize": 8, "ha": "right", "transform": panel.transAxes}
        panel.text(0.98, 0.03, "grey: all other rules", **grey)
        panel.set(xlabel="tau, tokens a step", ylabel="TV of the answers' law", ylim=(-0.09, 1))
        panel.set_title(f"{title}, T = 1", fontsize=10)
        panel.set_visible(any(name in points for name in names))
        panel.legend(fontsize=8, loc="upper left", frameon=False)
    _bounds(panels[0, 2], greedy)
    _all_bounds(panels[1, 2], costs, greedy)
    save_figure(figure, folder, "toy")


def _curve(panel: Any, xs: Sequence[float], ys: Sequence[float], label: str, mark: Any) -> None:
    colour, line, marker = mark
    style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 5, "mfc": "none"}
    panel.plot(xs, ys, linewidth=1.4, label=label, **style)


def _bounds(panel: Any, greedy: Mapping[float, Sequence[Mapping[str, float]]]) -> None:
    rates = [rate for rate in greedy if rate > 0]
    labels = {"tv": "TV", "bound": "bound, exact heads", "closed": "bound, closed form (approx.)"}
    for (key, label), mark in zip(labels.items(), MARKS, strict=False):
        middle = [statistics.fmean(toy[key] for toy in greedy[rate]) for rate in rates]
        _curve(panel, rates, middle, label, mark)
    panel.set_xscale("log")
    panel.set_xticks([0.002, 0.01, 0.05, 0.2, 0.5], ["0.002", "0.01", "0.05", "0.2", "0.5"])
    panel.set(xlabel="p_drop", ylabel="TV of the answers' law", ylim=(-0.03, 1.03))
    panel.set_title("naive and its bound, greedy, K = 5", fontsize=10)
    panel.legend(fontsize=8, loc="lower right", frameon=False)


def _all_bounds(
    panel: Any,
    costs: Mapping[str, Sequence[Cost]],
    greedy: Mapping[float, Sequence[Mapping[str, float]]],
) -> None:
    sampled = [(cost.bound, cost.tv) for each in costs.values() for cost in each]
    known = [(bound, tv) for bound, tv in sampled if bound is not None]
    naive = [(toy["bound"], toy["tv"]) for each in greedy.values() for toy in each]
    panel.plot([0, 1], [0, 1], color="0.4", linewidth=0.8)
    panel.text(0.5, 0.53, "TV = bound", rotation=38, ha="center", fontsize=8, color="0.3")
    panel.plot(
        *zip(*known, strict=True),
        "x",
        color="0.45",
        markersize=4,
        label="rules with a bound, T = 1",
    )
    panel.plot(*zip(*naive, strict=True), "o", color="#000000", mfc="none", label="naive, greedy")
    panel.set(xlabel="bound", ylabel="TV")
    panel.set_title("no TV above its bound: every setting and toy", fontsize=10)
    panel.legend(fontsize=8, loc="upper left", frameon=False)


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
