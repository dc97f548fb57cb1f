#!/usr/bin/env python
"""The small tables of DropMatch's paper on any pair, the paper's own numbers beside.

  split    table 4: time of the LM head, of K dropout heads and of JS beside the verification
           forward, for a chain of five nodes (the root and four drafted) and for the trees
  single   table 1: answers that one dropout head writes alone, what they are to the clean target
  votes    table 2: how many heads agree, at all nodes and at those where JS fails
  js       table 3: JS of draft and heads to the heads' centre
  batches  table 5: tokens/s of naive over exact by batch size, trees of ten draft levels

  python scripts/bench_overhead.py --limit 40 --output-dir runs/overhead
  python scripts/bench_overhead.py --parts batches --batch-sizes 1 4 16 --limit all
  python scripts/bench_overhead.py --parts single --gsm8k test.jsonl --seeds 0 1 2 3 4

Each part is printed and kept as soon as it is there. The same command goes on with a run that was
stopped, and a part that is there is not measured again unless --overwrite says so.
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
from eagle_dropmatch.evals import MTBench
from eagle_dropmatch.evals.arguments import add_models, with_defaults
from eagle_dropmatch.evals.base import Question, select
from eagle_dropmatch.evals.checkpoints import check_draft_lm, check_models
from eagle_dropmatch.evals.first_turns import FirstTurns
from eagle_dropmatch.evals.gsm8k import GSM8K
from eagle_dropmatch.evals.job import Loader, load_decoder
from eagle_dropmatch.evals.options import EvalOptions, read_options
from eagle_dropmatch.evals.statistics import require_scipy
from eagle_dropmatch.studies import sweeps
from eagle_dropmatch.studies.batch_gain import LEVELS
from eagle_dropmatch.studies.overhead import PARTS, Bench
from eagle_dropmatch.studies.paper import HEADS, P_DROP, SINGLE_HEAD_PASS
from eagle_dropmatch.studies.parts import PartsReport

NODES, DEPTH, TOP_K = 60, 7, 10
#: Parts that compare the heads with the draft's distribution.
WITH_DRAFT = ("split", "votes", "js")


def main(argv: Sequence[str], load: Loader | None = None) -> int:
    args = read_arguments(argv)
    options = options_of(args)
    bench = Bench(
        options=options,
        questions=questions_of(args, options),
        folder=args.output_dir or sweeps.default_folder("overhead", argv),
        argv=argv,
        load=load or load_decoder,
        heads=args.heads,
        rates=sorted({0.0, *args.rates}),
        p_drop=list(dict.fromkeys(args.p_drop)),
        steps=args.steps,
        batch_sizes=sorted(set(args.batch_sizes)),
        batch_depth=LEVELS - 1 if args.depth is None else args.depth,
        gsm8k=None if args.gsm8k is None else (args.gsm8k, args.gsm8k_tokens),
    )
    return measure(bench, [part for part in PARTS if part in args.parts], args.overwrite)


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = cli.Parser(description=str(__doc__))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    add_models(parser)
    tree = parser.add_argument_group("draft tree")
    tree.add_argument(
        "--total-token", type=cli.integer(2), metavar="T", help=f"nodes (default {NODES})"
    )
    tree.add_argument(
        "--depth",
        type=cli.integer(0),
        metavar="D",
        help=f"EAGLE's, draft levels less one (default {DEPTH}, and {LEVELS - 1} for batches)",
    )
    tree.add_argument("--top-k", type=cli.integer(1), metavar="K", help=f"(default {TOP_K})")
    _add_parts(parser.add_argument_group("parts"))
    run = parser.add_argument_group("run")
    run.add_argument("--questions", type=Path, metavar="FILE", help="default: MT-Bench's")
    run.add_argument("--limit", type=cli.limit, default=10, metavar="N", help="default 10")
    run.add_argument(
        "--max-new-tokens", type=cli.integer(2), default=64, metavar="N", help="default 64"
    )
    run.add_argument(
        "--output-dir", type=Path, metavar="DIR", help="default: a folder in runs/ of its own"
    )
    run.add_argument("--overwrite", action="store_true", help="measure the parts again")
    return parser.parse_args(argv)


def _add_parts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--heads", type=cli.integer(1), default=HEADS, metavar="K", help=f"default {HEADS}"
    )
    group.add_argument(
        "--p-drop",
        type=cli.drop_probability,
        nargs="+",
        default=["auto", P_DROP],
        metavar="P",
        help=f"of votes and js (default auto {P_DROP})",
    )
    group.add_argument(
        "--rates",
        type=_rate,
        nargs="+",
        default=list(SINGLE_HEAD_PASS),
        metavar="P",
        help="dropout rates of single, 0 (the clean head) always among them (default: the paper's)",
    )
    group.add_argument(
        "--seeds",
        type=cli.integer(0),
        nargs="+",
        metavar="SEED",
        help="of the masks in single and batches: as many answers, pooled (default 0)",
    )
    group.add_argument(
        "--gsm8k", type=Path, metavar="FILE", help="single: also the share of these solved"
    )
    group.add_argument(
        "--gsm8k-tokens",
        type=cli.integer(2),
        default=256,
        metavar="N",
        help="longest answer to them (default 256)",
    )
    group.add_argument(
        "--steps", type=cli.integer(1), default=100, metavar="N", help="of split (default 100)"
    )
    group.add_argument(
        "--batch-sizes",
        type=cli.integer(1),
        nargs="+",
        default=[1, 4, 16],
        metavar="B",
        help="of batches; single answers in batches of the largest (default 1 4 16)",
    )


def _rate(text: str) -> float:
    rate = cli.drop_probability(text)
    if isinstance(rate, str):
        raise argparse.ArgumentTypeError("auto has no place here: name rates in [0, 1)")
    return rate


def options_of(args: argparse.Namespace) -> EvalOptions:
    """An evaluation's options, with what this script does not ask for at its default."""
    known = with_defaults(args)
    # Rules are each part's own.
    known.heads = known.p_drop = known.seeds = None
    options = read_options(known)
    return replace(
        options,
        seeds=tuple(dict.fromkeys(args.seeds or ())),
        total_token=args.total_token or NODES,
        depth=DEPTH if args.depth is None else args.depth,
        top_k=args.top_k or TOP_K,
        tree_budget="fixed",
    )


def questions_of(args: argparse.Namespace, options: EvalOptions) -> list[Question]:
    """The first turns, with everything checked that needs no model."""
    require_scipy()
    if options.draft_ngram is not None and (parts := set(WITH_DRAFT) & set(args.parts)):
        raise UserError(
            f"--draft-ngram: {', '.join(sorted(parts))} of --parts look at the draft's "
            "distribution, and it has none; leave them out"
        )
    if args.gsm8k is not None:
        GSM8K().load(args.gsm8k)
    check_models(options.target, options.draft)
    check_draft_lm(options.draft_lm, options.target, "--draft-lm")
    return select(FirstTurns(MTBench()).load(options.questions), limit=options.limit)


def measure(bench: Bench, parts: Sequence[str], overwrite: bool) -> int:
    """Every part that is not there yet."""
    command = shlex.join(["python", "scripts/bench_overhead.py", *bench.argv])
    with PartsReport(bench.folder, "overhead", PARTS) as report:
        settings = {part: bench.settings(part) for part in parts}
        left = [part for part in parts if overwrite or not report.done(part, settings[part])]
        for part in parts:
            if part not in left:
                print(f"part {part} is there (--overwrite measures it again)", file=sys.stderr)
        for part in left:
            found = bench.measure(part)
            report.keep(part, found, settings[part], command)
            print("\n".join(found.lines) + "\n", flush=True)
    print(f"tables: {bench.folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
