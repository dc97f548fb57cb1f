#!/usr/bin/env python
"""Where the time of a decoding step goes: medians of its parts, and the floor of each.

Answers MT-Bench questions with the reference pair, or the one given, and times the parts of every
step. The floor of a part is what its weights take to read at this machine's memory bandwidth, or
its products at its matmul rate, whichever is longer; both are measured first.

  python scripts/profile_step.py
  python scripts/profile_step.py --acceptor naive --total-token 60 --depth 7 --top-k 10
  python scripts/profile_step.py --fuse off
  python scripts/profile_step.py --compile
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from eagle_dropmatch import cli
from eagle_dropmatch.evals import first_turns


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    first_turns.add_arguments(parser)
    parser.add_argument("--acceptor", metavar="RULE", default="naive")
    parser.add_argument("--fuse", choices=("on", "off"))
    parser.add_argument("--compile", action="store_true", help="run both models as machine code")
    parser.add_argument("--steps", type=cli.integer(1), default=200, metavar="N")
    parser.add_argument("--max-new-tokens", type=cli.integer(2), default=64, metavar="N")
    parser.add_argument("--threads", type=cli.integer(1), metavar="N")
    args = parser.parse_args(argv)
    questions = first_turns.questions_of(args, limit=10)

    from eagle_dropmatch.acceptors import make_acceptor

    rule = make_acceptor(args.acceptor)
    import torch

    from eagle_dropmatch.studies.step_profile import PARTS, Machine, floors, profile

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    decoder, prompts = first_turns.load(
        args, questions, acceptor=rule, fuse=cli.switch(args.fuse), compile=args.compile
    )
    machine = Machine.measure(decoder.target.dtype)
    least = floors(decoder, machine)
    clock = profile(decoder, prompts, max_new_tokens=args.max_new_tokens, steps=args.steps)
    tree, whole = decoder.tree, clock.whole
    print(f"`{' '.join(['python scripts/profile_step.py', shlex.join(argv)]).strip()}`\n")
    print(
        f"{len(clock.steps)} steps of {args.acceptor}, tree {tree.total_token}/{tree.depth}/"
        f"{tree.top_k} (nodes/depth/top-k), {str(decoder.target.dtype).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads, "
        f"{decoder.target.modules} modules. This machine: "
        f"{machine.bandwidth / 1e9:.0f} GB/s, {machine.operations / 1e12:.2f} T operations/s.\n"
    )
    print("| part | ms | share | floor, ms | what it is |\n|---|--:|--:|--:|---|")
    for name, seconds in clock.medians().items():
        floor = f"{least[name] * 1e3:.1f}" if name in least else ""
        print(f"| {name} | {seconds * 1e3:.2f} | {seconds / whole:.1%} | {floor} | {PARTS[name]} |")
    print(f"| **step** | **{whole * 1e3:.2f}** | | {sum(least.values()) * 1e3:.1f} | |")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
