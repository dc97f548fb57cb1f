#!/usr/bin/env python
"""MT-Bench under EAGLE-3 tree decoding: speed and acceptance beside two baselines.

Without any flag it runs the reference pair (SmolLM2-135M-Instruct and the draft in this package) on
ten of the 80 questions, spread evenly over the eight categories, both turns, 64 new tokens: a few
minutes on two CPU cores. --limit all --max-new-tokens 1024 is the whole benchmark.

  python scripts/eval_mtbench.py --tree --acceptor naive
  python scripts/eval_mtbench.py --acceptor naive --seeds 0 1 2 --limit 40 --max-new-tokens 128
  python scripts/eval_mtbench.py --target meta-llama/Llama-3.1-8B-Instruct \\
      --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --dtype bfloat16 --total-token 60 --depth 7

Progress goes to stderr, the table to stdout, and every answer to the output folder at once: the
same command goes on with a run that was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from eagle_dropmatch import cli
from eagle_dropmatch.evals import MTBench
from eagle_dropmatch.evals.arguments import add_arguments
from eagle_dropmatch.evals.job import evaluate
from eagle_dropmatch.evals.options import read_options


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    add_arguments(parser)
    return evaluate(MTBench(), read_options(parser.parse_args(argv)), argv)


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
