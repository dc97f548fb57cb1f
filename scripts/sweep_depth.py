#!/usr/bin/env python
"""tau over draft levels: where plain EAGLE-3 stops growing, and where a lossy rule does.

One evaluation on MT-Bench for each number of draft levels, with trees of that depth and exact,
plain and the rules of --acceptor as arms. After each level a row is printed and kept; at the end
stand the level at which each rule saturates (the first after which the gain's paired interval
includes zero; the same for the gain of all deeper levels together), the ratios to exact, and a
figure with what the lossy rules cost below it.

  python scripts/sweep_depth.py --acceptor naive --seeds 0 1 2 --limit 40
  python scripts/sweep_depth.py --acceptor naive --nodes-per-level 8 --levels 1 3 5 7 9 11 13 15
  python scripts/sweep_depth.py --chain --acceptor naive majority --batch-size 8

All other flags are those of eval_mtbench.py; a sweep that was stopped goes on with the same
command.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle_dropmatch import cli
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals import MTBench
from eagle_dropmatch.evals.arguments import add_arguments
from eagle_dropmatch.evals.job import Loader, load_decoder
from eagle_dropmatch.evals.options import EvalOptions, read_options
from eagle_dropmatch.evals.plan import EXACT, PLAIN
from eagle_dropmatch.evals.summary import Summary
from eagle_dropmatch.figures import require_matplotlib
from eagle_dropmatch.studies import sweeps
from eagle_dropmatch.studies.sweeps import default_folder, fitting, loading_once, shape_of

LEVELS = tuple(range(1, 16))
NODES, TOP_K = 60, 10


def main(argv: Sequence[str], load: Loader | None = None) -> int:
    parser = cli.Parser(description=str(__doc__))
    add_arguments(parser)
    parser.add_argument(
        "--levels",
        type=cli.integer(1),
        nargs="+",
        default=list(LEVELS),
        metavar="L",
        help="draft levels to measure, EAGLE's --depth + 1 (default 1 to 15)",
    )
    parser.add_argument(
        "--nodes-per-level",
        type=cli.integer(1),
        metavar="N",
        help="trees of N nodes a level and the root, in the place of --total-token nodes "
        f"(default {NODES}) at every depth",
    )
    args = parser.parse_args(argv)
    for name, why in (
        ("depth", "--levels says how deep trees are"),
        ("trees", "trees are those of --levels"),
        ("tree_budget", "trees have the size of their level"),
    ):
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: {why}; leave it out")
    if args.nodes_per_level is not None and args.total_token is not None:
        raise UserError("--nodes-per-level and --total-token both size the trees: give one")
    if args.arms is None:
        args.arms = [PLAIN, EXACT, *(rule for rule in args.acceptor if rule != EXACT)]
    levels = sorted(set(args.levels))
    require_matplotlib()
    # Of each level: all that is wrong with them is told before the first one begins.
    planned = [(level, options_of(args, level)) for level in levels]
    folder = args.output_dir or default_folder("depth", argv)
    return sweep(planned, folder, argv, load or load_decoder)


def options_of(args: Any, level: int) -> EvalOptions:
    nodes = args.total_token or NODES
    if args.nodes_per_level is not None:
        nodes = 1 + args.nodes_per_level * level
    if args.chain:
        nodes = 1 + level
    args.depth = level - 1
    options = read_options(args)
    return replace(
        options,
        total_token=nodes,
        top_k=1 if args.chain else args.top_k or TOP_K,
        tree_budget="fixed",
    )


def sweep(
    planned: Sequence[tuple[int, EvalOptions]],
    folder: Path,
    argv: Sequence[str],
    load: Loader,
) -> int:
    """One evaluation a level, each in a folder of its own below ``folder``."""
    from eagle_dropmatch.studies.depth_sweep import Point, conclusions, describe, headings, write

    points: list[Point] = []
    command = shlex.join(["python", "scripts/sweep_depth.py", *argv])

    def measured(number: int, summary: Summary) -> None:
        level, options = planned[number]
        points.append(Point(level, shape_of(options).nodes, summary))
        if number == 0:
            print(headings(points[0]), flush=True)
        print(describe(points[-1]), flush=True)
        write(points, folder, command)

    runs = [sweeps.Point(folder / f"levels-{level:02}", options) for level, options in planned]
    code = sweeps.measure(MTBench(), runs, argv, fitting(loading_once(load)), measured)
    if code:
        return code
    print("\n" + "\n".join(f"- {told}" for told in conclusions(points)))
    print(f"table, figure and every level's answers: {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
