#!/usr/bin/env python
"""What a verification step costs against its work: over context, nodes and batch, as a figure.

Steps of the reference pair's target, or the one given, without what a draft does: mask, forward,
LM head, exact acceptance, cache. Each line grows along one axis, the other sizes fixed; medians in
milliseconds, and the exponent of growth between the last two sizes (1: linear).

  python benchmarks/steps.py --compile --output-dir results/step-time
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle_dropmatch import cli
from eagle_dropmatch.files import check_writable, write_text

AXES = {
    "context": "tokens of context",
    "nodes": "nodes a tree",
    "batch": "rows",
}
DEFAULTS = {"context": [128, 512, 2048, 8192], "nodes": [1, 4, 16, 64, 128], "batch": [1, 4, 16]}


class Size(NamedTuple):
    batch: int
    context: int
    nodes: int


Times = dict[Size, float]
"""Seconds of a step."""


def lines_of(sizes: dict[str, list[int]]) -> dict[str, list[list[Size]]]:
    """By axis, the lines that are drawn: the first and the last size of one other axis."""
    batch, context, nodes = (sizes[axis] for axis in ("batch", "context", "nodes"))
    few = nodes[len(nodes) // 2]
    return {
        "context": [[Size(batch[0], c, n) for c in context] for n in dict.fromkeys((nodes[0], few))]
        + [[Size(batch[len(batch) // 2], c, few) for c in context]],
        "nodes": [[Size(b, context[0], n) for n in nodes] for b in batch],
        "batch": [[Size(b, context[0], n) for b in batch] for n in dict.fromkeys((nodes[0], few))],
    }


def measure(target: Any, wanted: set[Size], times: int) -> Times:
    """The median step at each size; sizes of one cache in turn."""
    from eagle_dropmatch.step_costs import StepTimer

    found: Times = {}
    places = sorted({(size.batch, size.context) for size in wanted})
    for number, (batch, context) in enumerate(places, 1):
        print(f"{number}/{len(places)}: batch {batch}, context {context}", file=sys.stderr)
        timer = StepTimer(target, batch, context)
        here = sorted(size for size in wanted if size[:2] == (batch, context))
        seconds: dict[Size, list[float]] = {size: [] for size in here}
        for turn in range(times + 1):
            for size in here:
                took = timer.seconds(size.nodes)
                if turn:
                    seconds[size].append(took)
        found.update({size: statistics.median(each) for size, each in seconds.items()})
        del timer
    return found


def name_of(line: Sequence[Size], axis: str) -> str:
    """What stays the same along a line: "16 nodes a tree, 1 row"."""
    first = line[0]
    counts = [(getattr(first, other), AXES[other]) for other in AXES if other != axis]
    return ", ".join(
        f"{count} {what.replace('nodes', 'node').replace('rows', 'row') if count == 1 else what}"
        for count, what in counts
    )


def table(lines: dict[str, list[list[Size]]], found: Times) -> str:
    text = []
    for axis, drawn in lines.items():
        sizes = [getattr(size, axis) for size in drawn[0]]
        text.append(f"| ms over {AXES[axis]} | {' | '.join(map(str, sizes))} | exponent |")
        text.append(f"|---|{'--:|' * (len(sizes) + 1)}")
        for line in drawn:
            cells = " | ".join(f"{found[size] * 1e3:.1f}" for size in line)
            text.append(f"| {name_of(line, axis)} | {cells} | {exponent(line, axis, found)} |")
        text.append("")
    return "\n".join(text)


def exponent(line: Sequence[Size], axis: str, found: Times) -> str:
    if len(line) < 2:
        return "-"
    before, last = line[-2:]
    steps = math.log(getattr(last, axis) / getattr(before, axis))
    return f"{math.log(found[last] / found[before]) / steps:.2f}"


def draw(lines: dict[str, list[list[Size]]], found: Times, folder: Path) -> None:
    """A panel an axis, both scales logarithmic: a straight line of slope 1 is linear growth."""
    from eagle_dropmatch.figures import GREYS, new_figure, save_figure

    figure = new_figure(11, 3.6)
    panels = figure.subplots(1, len(lines), sharey=True)
    for panel, (axis, drawn) in zip(panels, lines.items(), strict=True):
        for (color, marker, dashes), line in zip(GREYS, drawn, strict=False):
            panel.plot(
                [getattr(size, axis) for size in line],
                [found[size] * 1e3 for size in line],
                color=color,
                marker=marker,
                markersize=4,
                linestyle=dashes,
                linewidth=1.2,
                label=name_of(line, axis),
            )
        sizes = [getattr(size, axis) for size in drawn[0]]
        top = min(found[line[0]] for line in drawn) * 1e3
        panel.plot(
            [sizes[0], sizes[-1]],
            [top, top * sizes[-1] / sizes[0]],
            color="0.85",
            linewidth=0.8,
            label="linear growth",
            zorder=0,
        )
        panel.set(xscale="log", yscale="log", xlabel=AXES[axis], xticks=sizes)
        panel.set_xticklabels(map(str, sizes))
        panel.minorticks_off()
        panel.legend(fontsize=7, frameon=False)
    lowest, highest = min(found.values()) * 1e3, max(found.values()) * 1e3
    panels[0].set(ylabel="milliseconds a step", ylim=(lowest / 1.5, highest * 1.5))
    save_figure(figure, folder, "step-time")


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    parser.add_argument("--target", metavar="MODEL", help="default: the reference pair")
    parser.add_argument("--draft", metavar="MODEL", help="a draft for it: its taps count")
    parser.add_argument("--compile", action="store_true", help="run the target as machine code")
    for axis, sizes in DEFAULTS.items():
        parser.add_argument(
            f"--{axis}", type=cli.integer(1), nargs="+", default=sizes, metavar="N", help=AXES[axis]
        )
    parser.add_argument("--times", type=cli.integer(1), default=5, metavar="N")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="also draw the figure there")
    args = parser.parse_args(argv)
    if args.output_dir is not None:
        from eagle_dropmatch.figures import require_matplotlib

        require_matplotlib()
        check_writable(args.output_dir)
    sizes = {axis: sorted(set(getattr(args, axis))) for axis in AXES}

    import torch

    from eagle_dropmatch.decoder import SpeculativeDecoder

    cli.silence_transformers()
    target = SpeculativeDecoder.from_pretrained(
        args.target, args.draft, compile=args.compile
    ).target
    lines = lines_of(sizes)
    wanted = {size for drawn in lines.values() for line in drawn for size in line}
    found = measure(target, wanted, args.times)
    text = (
        f"`{' '.join(['python benchmarks/steps.py', *argv])}`\n\n"
        f"{target.modules} modules, {str(target.dtype).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads.\n\n{table(lines, found)}"
    )
    print(text)
    if args.output_dir is not None:
        draw(lines, found, args.output_dir)
        write_text(args.output_dir / "step-time.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
