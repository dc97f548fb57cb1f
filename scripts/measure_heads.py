#!/usr/bin/env python
"""What the dropout heads do at the nodes of real draft trees.

Five parts; all but the second answer MT-Bench with the reference pair or the one given:

  cheap  naive's verdicts by few rows and columns of the LM head against all K heads over all
         tokens: how many differ
  random the same on a random LM head of --random-head: vocabulary and width
  time   their time, and that of all heads, as shares of the verification forward
  flip   the closed form Phi(-D / s) against 10,000 sampled masks
  js     the paper's tables 2 and 3 on trees: votes, their probability, JS of draft and heads

  python scripts/measure_heads.py --output-dir results/heads
  python scripts/measure_heads.py --parts cheap --limit all --heads 16 --max-new-tokens 48
"""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from eagle_dropmatch import cli
from eagle_dropmatch.evals import first_turns

PARTS = ("cheap", "random", "time", "flip", "js")


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    first_turns.add_arguments(parser)
    parser.add_argument("--limit", type=cli.limit, default=10, metavar="N", help="default 10")
    parser.add_argument("--max-new-tokens", type=cli.integer(1), default=48, metavar="N")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--heads", type=cli.integer(1), default=5, metavar="K")
    parser.add_argument(
        "--random-head",
        type=cli.integer(64),
        nargs=2,
        default=[128_000, 4096],
        metavar=("V", "D"),
        help="default 128000 4096, which takes 2.5 GB",
    )
    parser.add_argument(
        "--p-drop",
        type=cli.drop_probability,
        nargs="+",
        metavar="P",
        default=["auto", 0.05, 0.1, 0.2, 0.3, 0.5],
        help="of part js",
    )
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="heads.md and heads.json")
    args = parser.parse_args(argv)
    questions = first_turns.questions_of(args, args.limit)
    if args.output_dir is not None:
        from eagle_dropmatch.files import check_writable

        check_writable(args.output_dir)

    decoder, prompts = first_turns.load(args, questions)
    tree = decoder.tree
    lines = [
        f"`python scripts/measure_heads.py {shlex.join(argv)}`",
        "",
        f"First turns of {len(questions)} MT-Bench questions, {args.max_new_tokens} new tokens "
        f"each, exact acceptance, tree {tree.total_token}/{tree.depth}/{tree.top_k} (nodes/depth/"
        f"top-k), K = {args.heads}, {str(decoder.target.dtype).removeprefix('torch.')}.",
    ]
    data: dict[str, Any] = {}
    for part in args.parts:
        found, told = _RUN[part](decoder, prompts, args)
        data[part] = found
        lines += ["", *told]
        print("\n".join(told) + "\n", flush=True)
    if args.output_dir is not None:
        import json

        from eagle_dropmatch.files import write_text

        write_text(args.output_dir / "heads.md", "\n".join(lines) + "\n")
        write_text(args.output_dir / "heads.json", json.dumps(data, indent=1) + "\n")
    return 0


def _cheap(decoder: Any, prompts: Any, args: Any) -> tuple[Any, list[str]]:
    from eagle_dropmatch.acceptors import NaiveAcceptor
    from eagle_dropmatch.studies.head_checks import CheapHeads, Watching

    rule = NaiveAcceptor(K=args.heads)
    check = CheapHeads(rule)
    first_turns.answer(decoder, prompts, Watching([rule], check), args.max_new_tokens)
    return _counts(check), [_told(check, "Cheap heads")]


def _counts(check: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(check).items() if name != "rule"}


def _told(check: Any, what: str) -> str:
    return (
        f"**{what}, against all heads over all tokens**: {check.pairs:,} (node, head) pairs, "
        f"{check.nodes:,} drafted nodes, of which all heads let in {check.accepted:,}: "
        f"{check.differing:,} other verdicts; {check.other_paths:,} of {check.paths:,} trees keep "
        "another path."
    )


def _random(decoder: Any, prompts: Any, args: Any) -> tuple[Any, list[str]]:
    import torch
    from tqdm import tqdm

    from eagle_dropmatch.acceptors import NaiveAcceptor
    from eagle_dropmatch.studies.head_checks import CheapHeads, random_step
    from eagle_dropmatch.target import LMHead

    vocab, width = args.random_head
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(width, vocab, bias=False, dtype=decoder.target.dtype)
    for rows in module.weight.data.split(8192):
        rows.copy_(torch.randn(rows.shape, generator=generator))
    head = LMHead(module.requires_grad_(False))
    found, told = [], []
    with torch.inference_mode():
        for rate in (0.01, 0.05, 0.2):
            check = CheapHeads(NaiveAcceptor(K=args.heads, p_drop=rate))
            for seed in tqdm(range(32), unit="batch", dynamic_ncols=True):
                check([random_step(head, check.rule, 64, seed)])
            found.append({"p_drop": rate, **_counts(check)})
            told.append(_told(check, f"Random head of {vocab:,} x {width:,}, p_drop {rate}"))
    return found, told


def _time(decoder: Any, prompts: Any, args: Any) -> tuple[Any, list[str]]:
    from eagle_dropmatch.acceptors import NaiveAcceptor
    from eagle_dropmatch.studies.head_checks import Watching
    from eagle_dropmatch.studies.head_times import BODY, FEW, HEAD, WHOLE, HeadTimes

    rule = NaiveAcceptor(K=args.heads)
    times = HeadTimes(rule, (HEAD, FEW, WHOLE))
    with times.watching(decoder.target):
        first_turns.answer(decoder, prompts, Watching([rule], times), args.max_new_tokens)
    forward = times.median(BODY) + times.median(HEAD)
    cheap, whole = times.median(FEW), times.median(WHOLE)
    medians = {"forward": forward * 1e3, "cheap": cheap * 1e3, "whole": whole * 1e3}
    shares = {"cheap_share": cheap / forward, "whole_share": whole / forward}
    return {**medians, **shares, "steps": times.steps}, [
        f"**Time**, medians of {times.steps} steps in one process: verification forward "
        f"{medians['forward']:.1f} ms; naive's verdicts by cheap heads {medians['cheap']:.2f} "
        f"ms ({shares['cheap_share']:.1%} of it); all heads over all tokens "
        f"{medians['whole']:.2f} ms ({shares['whole_share']:.1%})."
    ]


def _flip(decoder: Any, prompts: Any, args: Any) -> tuple[Any, list[str]]:
    from eagle_dropmatch.acceptors import NaiveAcceptor
    from eagle_dropmatch.studies.head_checks import FlipCheck, Watching

    check = FlipCheck()
    rule = Watching([NaiveAcceptor(K=args.heads)], check)
    first_turns.answer(decoder, prompts, rule, args.max_new_tokens)
    rows = list(zip(check.closed, check.beats, check.wins, check.terms, strict=True))
    told = [
        f"**Closed form against {check.masks:,} masks** at {len(rows)} drafted tokens that are not "
        "the argmax. Within: the share of masks lies within three binomial standard errors and "
        "0.01 of Phi(-D / s). Verdict: both sides of 1 - (1 - f)^K >= 0.5 agree.",
        "",
        "| dimensions that carry the gap | tokens | within | largest error | beats argmax, verdict "
        "agrees | beats all, verdict agrees |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    found = []
    edges = [0, 10, 20, 40, 80, float("inf")]
    for low, high in pairwise(edges):
        mine = [row for row in rows if low <= row[3] < high]
        if not mine:
            continue
        errors = [abs(f - b) for f, b, *_ in mine]
        within = [
            error <= 3 * (b * (1 - b) / check.masks) ** 0.5 + 0.01
            for error, (_, b, *_) in zip(errors, mine, strict=True)
        ]

        accepted = [[1 - (1 - f) ** args.heads >= 0.5 for f in row[:3]] for row in mine]
        argmax, everything = (
            statistics.fmean(row[0] == row[which] for row in accepted) for which in (1, 2)
        )
        name = f"{low:g} to {high:g}" if high < float("inf") else f"{low:g} and more"
        share, largest = statistics.fmean(within), max(errors)
        told.append(
            f"| {name} | {len(mine)} | {share:.1%} | {largest:.3f} | {argmax:.1%} | "
            f"{everything:.1%} |"
        )
        found.append(
            {
                "terms": name,
                "tokens": len(mine),
                "within": share,
                "largest": largest,
                "agree_argmax": argmax,
                "agree_all": everything,
            }
        )
    return found, told


def _js(decoder: Any, prompts: Any, args: Any) -> tuple[Any, list[str]]:
    from eagle_dropmatch.studies import head_votes

    rows = head_votes.measure(
        decoder, prompts, args.p_drop, heads=args.heads, max_new_tokens=args.max_new_tokens
    )
    return [row._asdict() for row in rows], head_votes.markdown(rows, args.heads)


_RUN = {"cheap": _cheap, "random": _random, "time": _time, "flip": _flip, "js": _js}


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
