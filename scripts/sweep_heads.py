#!/usr/bin/env python
"""tau over K dropout heads and their rate: the grid that DropMatch's paper does not show.

For each K one evaluation with an arm for every rate (--p-drop) and every share of agreement that
the rate is solved for (--head-agreement), beside exact acceptance on the same trees. After each K
its line is printed, and table and heat maps are written with all that is there by then.

  python scripts/sweep_heads.py --limit 40
  python scripts/sweep_heads.py --rule majority --heads 3 5 9 --p-drop 0.05 0.1 0.3
  python scripts/sweep_heads.py --benchmark komt_bench --head-agreement 0.9 0.8 --batch-size 8

Plain decoding, which takes longer than any of the arms and says nothing about tau, is left out
unless --arms names it. All other flags are those of eval_mtbench.py; a sweep that was stopped goes
on with the same command.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eagle_dropmatch import cli
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals import BENCHMARKS
from eagle_dropmatch.evals.arguments import add_arguments
from eagle_dropmatch.evals.job import Loader, load_decoder
from eagle_dropmatch.evals.options import EvalOptions, read_options
from eagle_dropmatch.evals.plan import EXACT
from eagle_dropmatch.evals.summary import Summary
from eagle_dropmatch.figures import require_matplotlib
from eagle_dropmatch.studies import sweeps
from eagle_dropmatch.studies.heads_sweep import AXES, LEGEND, Grid, conclusions, describe, headings
from eagle_dropmatch.studies.heads_sweep import write as write_all

RULES = ("naive", "majority", "js", "dropmatch")
HEADS = (1, 3, 5, 8, 10)
P_DROP = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
HEAD_AGREEMENT = (0.95, 0.9, 0.8, 0.7, 0.6)


def main(argv: Sequence[str], load: Loader | None = None) -> int:
    args = read_arguments(argv)
    grid = grid_of(args)
    require_matplotlib()
    # Of each K: all that is wrong with them is told before the first one begins.
    planned = [(K, options_of(args, grid, K)) for K in grid.heads]
    folder = args.output_dir or sweeps.default_folder("heads", argv)
    return sweep(grid, planned, folder, argv, load or load_decoder)


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = cli.Parser(description=str(__doc__), replacing=True)
    add_arguments(parser)
    # The first three take several values here.
    parser.add_argument(
        "--heads",
        type=cli.integer(1),
        nargs="+",
        default=list(HEADS),
        metavar="K",
        help=f"numbers of dropout heads (default {' '.join(map(str, HEADS))})",
    )
    parser.add_argument(
        "--p-drop",
        type=cli.drop_probability,
        nargs="+",
        metavar="P",
        help=f"fixed dropout rates (default {' '.join(map(str, P_DROP))}; none where only "
        "--head-agreement is given)",
    )
    parser.add_argument(
        "--head-agreement",
        type=cli.share,
        nargs="+",
        metavar="SHARE",
        help="shares of agreement that the rate is solved for on each prompt (default "
        f"{' '.join(map(str, HEAD_AGREEMENT))}; none where only --p-drop is given)",
    )
    parser.add_argument(
        "--rule", choices=RULES, default="naive", help="what the heads decide by (default naive)"
    )
    parser.add_argument(
        "--benchmark",
        choices=sorted(BENCHMARKS),
        default="mt_bench",
        help="whose questions are asked (default mt_bench)",
    )
    args = parser.parse_args(argv)
    for name, given, why in (
        ("acceptor", args.acceptor != [EXACT], "--rule names the rule of the grid"),
        ("trees", args.trees is not None, "all cells draw the same trees"),
        ("tree-budget", args.tree_budget == "auto", "all cells draw trees of one size"),
        ("controls", args.controls, "heat maps have no place for them"),
    ):
        if given:
            raise UserError(f"--{name}: {why}; leave it out")
    return args


def grid_of(args: argparse.Namespace) -> Grid:
    axes = {"p_drop": args.p_drop, "head_agreement": args.head_agreement}
    if not any(axes.values()):
        axes = {"p_drop": P_DROP, "head_agreement": HEAD_AGREEMENT}
    if "auto" in (axes["p_drop"] or ()):
        raise UserError("--p-drop auto: name the shares to solve for with --head-agreement")
    same = {name: getattr(args, name) for name in ("include_clean", "mask")}
    return Grid(
        benchmark=args.benchmark,
        rule=args.rule,
        heads=sorted(set(args.heads)),
        # Both from strict to loose.
        axes={
            name: sorted(set(values), reverse=name == "head_agreement")
            for name in AXES
            if (values := axes[name])
        },
        options={name: value for name, value in same.items() if value is not None},
    )


def options_of(args: argparse.Namespace, grid: Grid, heads: int) -> EvalOptions:
    rules = grid.rules(heads)
    mine = argparse.Namespace(**vars(args))
    mine.acceptor = rules
    mine.arms = [*(args.arms or ()), EXACT, *rules]
    # All of these stand in the rules.
    mine.heads = mine.p_drop = mine.head_agreement = mine.include_clean = mine.mask = None
    return replace(read_options(mine), tree_budget="fixed")


def sweep(
    grid: Grid,
    planned: Sequence[tuple[int, EvalOptions]],
    folder: Path,
    argv: Sequence[str],
    load: Loader,
) -> int:
    """One evaluation a K, each in a folder of its own below ``folder``."""
    command = shlex.join(["python", "scripts/sweep_heads.py", *argv])
    found: dict[int, Summary] = {}

    def measured(number: int, summary: Summary) -> None:
        heads, options = planned[number]
        found[heads] = summary
        if number == 0:
            print(f"{grid.rule} on {grid.benchmark}. {LEGEND}\n\n{headings(grid)}", flush=True)
        print(describe(grid, heads, summary), flush=True)
        write_all(grid, found, folder, command, about(summary, options))

    def about(summary: Summary, options: EvalOptions) -> str:
        return (
            f"{grid.rule} on {len(summary.question_ids)} questions of {grid.benchmark}, "
            f"{summary.turns} turns, at most {options.max_new_tokens} new tokens a turn, batch "
            f"{options.batch_size}; every K's table.md has models, trees and machine."
        )

    points = [sweeps.Point(folder / f"heads-{K:02}", options) for K, options in planned]
    benchmark = BENCHMARKS[grid.benchmark]()
    code = sweeps.measure(benchmark, points, argv, sweeps.loading_once(load), measured)
    if code:
        return code
    print("\n" + "\n".join(f"- {told}" for told in conclusions(grid, found)))
    print(f"tables, heat maps and every cell's answers: {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
