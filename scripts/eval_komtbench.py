#!/usr/bin/env python
"""KoMT-Bench under EAGLE-3 tree decoding: the same run as eval_mtbench.py, on Korean questions.

What a draft has learnt in English is of little use here, and what its vocabulary does not hold it
cannot say at all: the table tells how much of the answers that is. The questions come from the hub
(LGAI-EXAONE/KoMT-Bench, with the package datasets) or from a file.

  python scripts/eval_komtbench.py --acceptor naive --questions question_ko.jsonl
  python scripts/eval_komtbench.py --target LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct --draft DRAFT

All flags are those of eval_mtbench.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from eagle_dropmatch import cli
from eagle_dropmatch.evals import KoMTBench
from eagle_dropmatch.evals.arguments import add_arguments
from eagle_dropmatch.evals.job import evaluate
from eagle_dropmatch.evals.options import read_options


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    add_arguments(parser)
    return evaluate(KoMTBench(), read_options(parser.parse_args(argv)), argv)


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
