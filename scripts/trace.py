#!/usr/bin/env python
"""Every decision of one answer, as a page: trees, verdicts, and the numbers behind them.

For one rule, or for two on the same prompt side by side. The page is one HTML file that needs no
network: open it in a browser, step with the arrow keys, press ? for the others.

  python scripts/trace.py --question 81 --acceptor naive
  python scripts/trace.py --question 81 --acceptor naive 'relaxed_top_n(n=10, delta=0.3)'
  python scripts/trace.py --prompt 'Why is the sky blue?' --acceptor dropmatch --output sky.html
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from eagle_dropmatch import cli
from eagle_dropmatch.evals.job import Loader
from eagle_dropmatch.tracing.job import add_arguments, trace


def main(argv: Sequence[str], load: Loader | None = None) -> int:
    parser = cli.Parser(description=str(__doc__))
    add_arguments(parser)
    return trace(parser.parse_args(argv), argv, load)


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
