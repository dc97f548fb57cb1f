#!/usr/bin/env python
"""Pictures and a table of finished runs, side by side, from their records: no model is loaded.

A folder is what eval_mtbench.py, eval_komtbench.py, compare_rules.py or sweep_depth.py wrote.

  bars       tau, tokens/s and cost of every rule beside exact, with 95% intervals
  histogram  how many draft tokens steps accept, and how often the next one is
  cost       tau against nats a token below exact's answers, with the front marked
  depth      tau over draft levels, of the sweeps among the folders, beside the paper's points

  python scripts/compare.py results/mtbench-compiled results/komtbench
  python scripts/compare.py results/rules-front --figures cost --output-dir pictures
  python scripts/compare.py runs/depth --partial

A run with a lossy rule is drawn only with its quality: the target's log-probability of its answers
against that of exact's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from eagle_dropmatch import cli
from eagle_dropmatch.evals.job import DEFAULT_ROOT
from eagle_dropmatch.evals.statistics import require_scipy
from eagle_dropmatch.figures import require_matplotlib
from eagle_dropmatch.reports.compare import FIGURES, compare


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=DEFAULT_ROOT / "compare",
        help="where pictures and table go (default %(default)s)",
    )
    parser.add_argument(
        "--figures",
        nargs="+",
        choices=FIGURES,
        help="which to draw (default: all that the folders have numbers for)",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="draw what is complete of runs that have not ended; their titles say so",
    )
    args = parser.parse_args(argv)
    require_matplotlib()
    require_scipy()
    say = partial(print, file=sys.stderr, flush=True)
    compare(args.runs, args.output_dir, args.figures, partial=args.partial, say=say)
    print((args.output_dir / "compare.md").read_text(encoding="utf-8"), end="")
    say(f"pictures and table: {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
