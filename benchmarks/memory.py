#!/usr/bin/env python
"""What decoding holds in memory at long contexts, and what of it is needed.

Answers random prompts with the reference pair, or the one given, and looks at the process' peak
after loading, after reading the prompts and after some steps. Beside it stands what must be there:
the caches and, while the draft reads the prompt, the target's features.

  python benchmarks/memory.py
  python benchmarks/memory.py --batch 2 --context 1000 --acceptor exact
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import Any

from eagle_dropmatch import cli
from eagle_dropmatch.acceptors import make_acceptor

MB = 2**20


def peak() -> float:
    """Bytes that this process has held at most so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def bytes_of(cache: Any) -> float:
    return float(sum(each.numel() * each.element_size() for each in cache.all_stores()))


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    parser.add_argument("--target", metavar="MODEL", help="default: the reference pair")
    parser.add_argument("--draft", metavar="MODEL")
    parser.add_argument("--compile", action="store_true", help="run both models as machine code")
    parser.add_argument("--batch", type=cli.integer(1), default=8, metavar="B")
    parser.add_argument("--context", type=cli.integer(2), default=8192, metavar="N")
    parser.add_argument("--steps", type=cli.integer(1), default=5, metavar="N")
    parser.add_argument("--acceptor", default="naive", metavar="RULE")
    args = parser.parse_args(argv)
    rule = make_acceptor(args.acceptor)

    import torch

    from eagle_dropmatch.decoder import SpeculativeDecoder
    from eagle_dropmatch.drafts.base import TreeShape
    from eagle_dropmatch.loop import DecodingLoop, Limits

    cli.silence_transformers()
    decoder = SpeculativeDecoder.from_pretrained(args.target, args.draft, compile=args.compile)
    target, shape = decoder.target, TreeShape()
    drafter = decoder.drafter(shape)
    drafter.keep_logits = rule.needs_draft
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(target.vocab_size, (args.batch, args.context), generator=generator)
    loaded = peak()
    loop = DecodingLoop(target, drafter, rule, Limits(10**6, ()))
    loop.prefill(prompts.tolist(), 0, reserve=shape.nodes)
    read = peak()
    for _ in range(args.steps):
        loop.step()
    stepped = peak()
    caches = bytes_of(loop.cache) + bytes_of(vars(drafter)["_cache"])
    width = target.config.hidden_size * (1 + len(target.taps.layers if target.taps else ()))
    states = args.batch * args.context * width * torch.finfo(target.dtype).bits / 8
    rows = args.batch * shape.nodes
    print(f"`{' '.join(['python benchmarks/memory.py', *argv]).strip()}`\n")
    print(
        f"batch {args.batch}, {args.context} tokens of context, trees of {shape.nodes} nodes under "
        f"{args.acceptor}, {target.modules} modules\n"
    )
    print("| MB | |\n|---|--:|")
    for what, value in (
        ("peak after loading", loaded),
        ("peak while prompts were read, beyond that", read - loaded),
        ("of it the caches", caches),
        ("of it the prompts' hidden states and features", states),
        (f"peak over {args.steps} steps, beyond that", stepped - read),
        (
            f"logits of {rows} nodes, for comparison",
            rows * target.vocab_size * torch.finfo(target.dtype).bits / 8,
        ),
    ):
        print(f"| {what} | {value / MB:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
