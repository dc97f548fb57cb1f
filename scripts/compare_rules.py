#!/usr/bin/env python
"""Every acceptance rule over its knob, on the same questions, trees and engine.

One run on MT-Bench with an arm for each rule and setting, exact EAGLE-3 and plain decoding beside
them: a table, and two figures of tau against what the rule costs (the relaxed share, and how much
less likely its answers are to the target), with intervals; and every rule's tau at equal cost.
Without --acceptor the rules are those of the built-in sweep; with it, the ones given.

  python scripts/compare_rules.py --total-token 32 --depth 6 --top-k 5
  python scripts/compare_rules.py --acceptor 'margin(kappa=0.5)' 'margin(kappa=0.2)' naive
  python scripts/compare_rules.py --target meta-llama/Llama-3.1-8B-Instruct \\
      --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --limit all --max-new-tokens 512

All flags are those of eval_mtbench.py; a run that was stopped goes on with the same command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain

from eagle_dropmatch import cli
from eagle_dropmatch.evals import MTBench
from eagle_dropmatch.evals.arguments import add_arguments
from eagle_dropmatch.evals.job import evaluate
from eagle_dropmatch.evals.options import read_options
from eagle_dropmatch.evals.plan import EXACT, PLAIN
from eagle_dropmatch.figures import require_matplotlib
from eagle_dropmatch.studies.rule_sweep import SWEEP, by_name, report


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    add_arguments(parser)
    # All rules on trees of one size, whatever each could earn.
    parser.set_defaults(acceptor=None, tree_budget="fixed")
    args = parser.parse_args(argv)
    curves = SWEEP if args.acceptor is None else by_name(args.acceptor)
    if args.acceptor is None:
        args.acceptor = list(chain.from_iterable(SWEEP.values()))
    if args.arms is None:
        args.arms = [PLAIN, EXACT, *(rule for rule in args.acceptor if rule != EXACT)]
    require_matplotlib()
    return evaluate(MTBench(), read_options(args), argv, after=partial(report, curves=curves))


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
