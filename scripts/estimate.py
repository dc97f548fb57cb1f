#!/usr/bin/env python
"""What an evaluation of a pair will need: memory, and hours on a machine.

Reads the configs alone, no weights. Seconds are what the machine's memory and arithmetic allow at
best, and beside it that times the ratio of a real step to this floor on the reference pair.

  python scripts/estimate.py --target meta-llama/Llama-3.1-8B-Instruct \\
      --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --bandwidth 2000 --operations 300 \\
      --questions 80 --max-new-tokens 512 --tau 5
  python scripts/estimate.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from eagle_dropmatch import cli
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals.checkpoints import check_models

GB = 1e9


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    parser.add_argument("--target", metavar="MODEL", help="folder or hub id; its config is read")
    parser.add_argument("--draft", metavar="MODEL", help="default: the reference pair")
    parser.add_argument(
        "--bandwidth", type=cli.positive, metavar="GB/S", help="of memory (default: measured here)"
    )
    parser.add_argument(
        "--operations",
        type=cli.positive,
        metavar="T/S",
        help="10^12 operations a second in 16-bit products (default: measured here)",
    )
    parser.add_argument("--total-token", type=cli.integer(2), default=60, metavar="T")
    parser.add_argument("--depth", type=cli.integer(0), default=7, metavar="D")
    parser.add_argument("--top-k", type=cli.integer(1), default=10, metavar="K")
    parser.add_argument("--batch-size", type=cli.integer(1), default=1, metavar="B")
    parser.add_argument(
        "--context", type=cli.integer(1), default=2048, metavar="N", help="tokens, answer included"
    )
    parser.add_argument(
        "--tau", type=cli.positive, default=3.0, metavar="TAU", help="tokens a step (default 3)"
    )
    parser.add_argument("--questions", type=cli.integer(1), default=80, metavar="N")
    parser.add_argument("--turns", type=cli.integer(1), default=2, metavar="N")
    parser.add_argument("--max-new-tokens", type=cli.integer(1), default=64, metavar="N")
    args = parser.parse_args(argv)
    if (args.target is None) != (args.draft is None):
        raise UserError("give --target and --draft, or neither for the reference pair")
    if (args.bandwidth is None) != (args.operations is None):
        raise UserError("give --bandwidth and --operations, or neither to measure this machine")
    if args.max_new_tokens >= args.context:
        raise UserError(
            f"--max-new-tokens {args.max_new_tokens} leaves no prompt in --context {args.context}"
        )
    check_models(args.target, args.draft)

    import torch
    from transformers import AutoConfig

    from eagle_dropmatch.assets import reference_draft, reference_target
    from eagle_dropmatch.drafts.base import TreeShape
    from eagle_dropmatch.drafts.checkpoint import read_draft_config
    from eagle_dropmatch.studies import cost_model
    from eagle_dropmatch.studies.step_profile import Machine

    cli.silence_transformers()
    config = AutoConfig.from_pretrained(args.target or reference_target())
    draft = read_draft_config(args.draft or reference_draft(), target_config=config)
    pair = cost_model.shape_of(config, draft.config)
    tree = TreeShape(args.total_token, args.depth, args.top_k)
    machine = (
        Machine.measure(torch.bfloat16)
        if args.bandwidth is None
        else Machine(args.bandwidth * 1e9, args.operations * 1e12)
    )
    held = cost_model.memory(pair, tree, batch=args.batch_size, context=args.context)
    print(
        f"target {pair.target / 1e6:,.0f} M parameters, draft {pair.draft / 1e6:,.0f} M; bfloat16"
    )
    print("| memory | GB |\n|---|--:|")
    for name, size in held.items():
        print(f"| {name} | {size / GB:.2f} |")
    print(f"| together | {sum(held.values()) / GB:.2f} |\n")

    load = {"batch": args.batch_size, "context": args.context}
    plain = cost_model.plain_floor(pair, machine, **load)
    step = cost_model.step_floor(pair, machine, tree, **load)
    prompt = cost_model.prompt_floor(pair, machine, tokens=args.context - args.max_new_tokens)
    answers = args.questions * args.turns
    print(
        f"{machine.bandwidth / GB:,.0f} GB/s, {machine.operations / 1e12:,.1f} T operations/s; "
        f"{answers} answers of {args.max_new_tokens} tokens, tau {args.tau:g}\n"
    )
    print(f"| arm | floor, ms a step | floor, hours | x {cost_model.RATIO}, hours |")
    print("|---|--:|--:|--:|")
    for name, seconds, committed in (("plain", plain, 1.0), ("drafting", step, args.tau)):
        each = seconds * args.max_new_tokens / committed / args.batch_size + prompt
        hours = answers * each / 3600
        print(f"| {name} | {seconds * 1e3:.2f} | {hours:.3f} | {hours * cost_model.RATIO:.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
