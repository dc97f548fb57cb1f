"""Several evaluations in one process, one after the other, each in a folder of its own.

A sweep that was stopped goes on with the same command: finished evaluations are read, not repeated,
and the one that was under way goes on where it stood.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..evals.base import Benchmark
from ..evals.job import DEFAULT_ROOT, Loader, evaluate
from ..evals.options import EvalOptions
from ..evals.summary import Summary

if TYPE_CHECKING:  # torch comes with it, and bad arguments are refused without torch
    from ..drafts.base import TreeShape


class Point(NamedTuple):
    """One evaluation of a sweep."""

    folder: Path
    options: EvalOptions


def default_folder(name: str, argv: Sequence[str]) -> Path:
    """The same arguments have the same folder, so that a stopped sweep goes on."""
    return DEFAULT_ROOT / f"{name}-{hashlib.sha256(repr(list(argv)).encode()).hexdigest()[:10]}"


def loading_once(load: Loader) -> Loader:
    """``load``, but every call after the first gets the first one's decoder."""
    loaded: list[Any] = []

    def once(options: EvalOptions) -> Any:
        if not loaded:
            loaded.append(load(options))
        return loaded[0]

    return once


def shape_of(options: EvalOptions) -> TreeShape:
    """The tree of options that name one."""
    from ..drafts.base import TreeShape

    assert options.total_token is not None
    assert options.depth is not None
    assert options.top_k is not None
    return TreeShape(options.total_token, options.depth, options.top_k)


def fitting(load: Loader) -> Loader:
    """``load``, and the decoder draws the trees of the options that it is asked for with."""

    def fitted(options: EvalOptions) -> Any:
        decoder = load(options)
        decoder.tree, decoder.adaptive = shape_of(options), False
        return decoder

    return fitted


def measure(
    benchmark: Benchmark,
    points: Sequence[Point],
    argv: Sequence[str],
    load: Loader,
    measured: Callable[[int, Summary], None],
) -> int:
    """Evaluate every point; ``measured`` gets its number and its summary. Returns the exit code.

    ``load`` is asked at every point that is not finished yet: see ``loading_once``.
    """
    for number, point in enumerate(points):

        def keep(summary: Summary, _: Path, number: int = number) -> None:
            measured(number, summary)

        options = replace(point.options, output_dir=point.folder)
        code = evaluate(benchmark, options, argv, load=load, after=keep, show=False)
        if code:
            return code
    return 0
