#!/usr/bin/env python
"""What the kernels of a step cost, and how that grows with nodes, batch and vocabulary.

Each kernel is timed over one size at a time, the others at their defaults (24 nodes, batch 1, a
vocabulary of 32,768): medians in microseconds, and the exponent of growth from the first to the
last size (1: linear; 0: not at all). No model is needed.

  python benchmarks/kernels.py
  python benchmarks/kernels.py --kernels mask walk --nodes 8 32 128
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from eagle_dropmatch import cli
from eagle_dropmatch.acceptors import NaiveAcceptor
from eagle_dropmatch.cache import TreeCache
from eagle_dropmatch.studies.head_checks import random_step
from eagle_dropmatch.target import LMHead
from eagle_dropmatch.tree import (
    BeamLevel,
    DraftTree,
    Expansion,
    grow,
    longest_accepted_path,
    position_ids,
    tree_attention,
)

Work = Callable[[], object]
CONTEXT, LEVELS, TOP_K = 256, 5, 8
DEFAULTS = {"nodes": 24, "batch": 1, "vocabulary": 32_768}


def random_tree(nodes: int, batch: int) -> DraftTree:
    """Trees of a bounded depth, as growth gives them."""
    generator = torch.Generator().manual_seed(0)
    parents = torch.full((batch, nodes), -1)
    depths = torch.zeros(batch, nodes, dtype=torch.int64)
    for node in range(1, nodes):
        allowed = (depths[:, :node] < LEVELS).float()
        parents[:, node] = torch.multinomial(allowed, 1, generator=generator)[:, 0]
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    tokens = torch.randint(1000, (batch, nodes), generator=generator)
    return DraftTree.from_parents(tokens, parents, levels=LEVELS)


def forget(tree: DraftTree) -> None:
    """Let the tree work out again what it keeps."""
    for known in ("jumps", "ancestry", "preference"):
        vars(tree).pop(known, None)


def mask(nodes: int, batch: int, vocabulary: int) -> Work:
    tree = random_tree(nodes, batch)
    lengths = torch.full((batch,), CONTEXT)

    def work() -> object:
        forget(tree)
        return tree_attention(tree, lengths, CONTEXT + nodes, torch.bfloat16), position_ids(
            tree, lengths
        )

    return work


def growth(nodes: int, batch: int, vocabulary: int) -> Work:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (batch, TOP_K, TOP_K), generator=generator)
    log_probs = -torch.rand(batch, TOP_K, TOP_K, generator=generator).sort(-1).values
    root = torch.zeros(batch, dtype=torch.int64)
    first = Expansion(tokens[:, :1], log_probs[:, :1])

    def expand(_: BeamLevel) -> Expansion:
        return Expansion(tokens, log_probs)

    return lambda: grow(root, first, expand, depth=LEVELS - 1, top_k=TOP_K, total_token=nodes)


def walk(nodes: int, batch: int, vocabulary: int) -> Work:
    tree = random_tree(nodes, batch)
    accept = torch.rand(batch, nodes, generator=torch.Generator().manual_seed(1)) < 0.7

    def work() -> object:
        forget(tree)
        return longest_accepted_path(tree, accept)

    return work


def compaction(nodes: int, batch: int, vocabulary: int) -> Work:
    cpu = torch.device("cpu")
    cache = TreeCache([cpu] * 30, batch, 3, 64, CONTEXT + nodes + 8, torch.bfloat16)
    cache.open(CONTEXT)
    cache.commit([CONTEXT] * batch)
    last = min(nodes, LEVELS + 1)
    path = torch.arange(0, last).mul(max((nodes - 1) // last, 1)).expand(batch, -1)

    def work() -> None:
        cache.open(nodes)
        cache.keep(path, [last] * batch)
        cache.commit([-last] * batch)

    return work


def heads(nodes: int, batch: int, vocabulary: int) -> Work:
    """naive's verdict at one parent of eight children for each row and for each eight nodes."""
    module = torch.nn.Linear(576, vocabulary, bias=False, dtype=torch.bfloat16)
    module.weight.data.copy_(torch.randn(module.weight.shape))
    rule = NaiveAcceptor(p_drop=0.03)
    step = random_step(LMHead(module.requires_grad_(False)), rule, batch * max(nodes // 8, 1), 0)

    def work() -> object:
        vars(step).pop("parents", None)
        return rule.verify(step)

    return work


KERNELS = {
    "mask": mask,
    "growth": growth,
    "walk": walk,
    "compaction": compaction,
    "heads": heads,
}


def median_seconds(work: Work, times: int) -> float:
    for _ in range(3):
        work()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


@torch.inference_mode()
def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    parser.add_argument(
        "--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), metavar="KERNEL"
    )
    sizes_of = {"nodes": [8, 24, 64, 128], "batch": [1, 4, 16], "vocabulary": [32_768, 131_072]}
    for axis, least in (("nodes", 2), ("batch", 1), ("vocabulary", 16)):
        parser.add_argument(
            f"--{axis}", type=cli.integer(least), nargs="+", default=sizes_of[axis], metavar="N"
        )
    parser.add_argument("--times", type=cli.integer(1), default=60, metavar="N")
    args = parser.parse_args(argv)
    for axis in DEFAULTS:
        if axis == "vocabulary" and "heads" not in args.kernels:
            continue
        sizes = getattr(args, axis)
        print(f"\n| microseconds over {axis} | {' | '.join(map(str, sizes))} | exponent |")
        print(f"|---|{'--:|' * (len(sizes) + 1)}")
        for name in args.kernels:
            if axis == "vocabulary" and name != "heads":
                continue
            found = [
                median_seconds(KERNELS[name](**{**DEFAULTS, axis: size}), args.times)
                for size in sizes
            ]
            grown = "-"
            if len(sizes) > 1:
                grown = f"{math.log(found[-1] / found[0]) / math.log(sizes[-1] / sizes[0]):.2f}"
            cells = " | ".join(f"{seconds * 1e6:.0f}" for seconds in found)
            print(f"| {name} | {cells} | {grown} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
