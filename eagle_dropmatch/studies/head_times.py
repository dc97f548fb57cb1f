"""What the LM head and the dropout heads cost beside the rest of the verification forward.

Everything is timed in the steps of real answers and in turn, so that no work always meets the
caches as another one left them: medians of the same steps are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from ..acceptors import NaiveAcceptor
from ..acceptors.base import StepContext
from ..acceptors.dropmatch import to_centre
from ..acceptors.step_heads import Heads
from ..clock import timed
from ..drafts.base import TreeShape
from ..evals import first_turns
from ..target import TargetModel
from . import paper
from .head_checks import Watching

BODY, HEAD, FEW, WHOLE, JS = "body", "head", "few", "whole", "js"

TOLD: Mapping[str, str] = {
    BODY: "body",
    HEAD: "LM head, all nodes",
    FEW: "naive as it decodes (few rows and columns of the head)",
    WHOLE: "naive, all heads over all tokens",
    JS: "JS, all heads over all tokens",
}
PUBLISHED: Mapping[str, float] = {
    HEAD: paper.HEAD_SHARE["none"],
    WHOLE: paper.HEAD_SHARE["naive"],
    JS: paper.HEAD_SHARE["js"],
}


def _head(rule: NaiveAcceptor, context: StepContext) -> None:
    context.head(context.output.hidden)


def _few(rule: NaiveAcceptor, context: StepContext) -> None:
    rule.accept_path(context, context.eligible)


def _whole(rule: NaiveAcceptor, context: StepContext) -> None:
    heads = Heads(rule, context)
    said = heads.parents.to_children(heads.choices)
    (said == context.tree.tokens[..., None]).any(-1)


def _js(rule: NaiveAcceptor, context: StepContext) -> None:
    to_centre(Heads(rule, context), context)


WORKS: Mapping[str, Callable[[NaiveAcceptor, StepContext], None]] = {
    HEAD: _head,
    FEW: _few,
    WHOLE: _whole,
    JS: _js,
}


@dataclass
class HeadTimes:
    """Seconds a step of the body and of some works, which run in an order that rotates.

    Attributes:
        seconds: by name, a list entry a step; ``BODY`` is the forward up to the LM head.
    """

    rule: NaiveAcceptor
    works: Sequence[str] = tuple(WORKS)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, contexts: list[StepContext]) -> None:
        (own,) = contexts
        start = self.steps % len(self.works)
        for name in (*self.works[start:], *self.works[:start]):
            # What exact acceptance has no need of belongs to the rule's time.
            for shared in ("parents", "draft"):
                own.__dict__.pop(shared, None)
            _, took = timed(partial(WORKS[name], self.rule, own), own.logits.device)
            self.seconds.setdefault(name, []).append(took)

    @property
    def steps(self) -> int:
        return len(self.seconds.get(self.works[-1], ()))

    @contextmanager
    def watching(self, target: TargetModel) -> Iterator[None]:
        """Keep the body's seconds in verification forwards while this is open."""
        verify, read = target.verify, target.read

        def timed_read(*args: Any) -> Any:
            out, took = timed(lambda: read(*args), target.head_device)
            self.seconds.setdefault(BODY, []).append(took)
            return out

        def timed_verify(*args: Any) -> Any:
            with mock.patch.object(target, "read", timed_read):
                return verify(*args)

        with mock.patch.object(target, "verify", timed_verify):
            yield

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


class Time(NamedTuple):
    """One part of the split."""

    seconds: float
    """Median over steps."""
    quartiles: tuple[float, float]
    of_forward: float
    """Of the verification forward without dropout heads: body and LM head."""
    head_share: float | None
    """All that multiplies by W, of the forward with it: the paper's table 4. None for the body."""


class Split(NamedTuple):
    """Where the time of a verification forward goes, for trees of one shape."""

    nodes: int
    levels: int
    steps: int
    parts: Mapping[str, Time]


def measure(
    decoder: Any,
    prompts: Sequence[Sequence[int]],
    shape: TreeShape,
    rule: NaiveAcceptor,
    *,
    steps: int,
    max_new_tokens: int,
) -> Split:
    """Answer prompts one by one until so many steps are timed; the first answer is not counted."""
    decoder.tree, decoder.adaptive = shape, False
    times = HeadTimes(rule)
    decoder.acceptor = Watching([rule], times, draft=True)
    with times.watching(decoder.target):
        first_turns.answer_until(
            lambda: times.steps >= steps,
            times.seconds.clear,
            decoder,
            prompts,
            max_new_tokens=max_new_tokens,
            most=100 + steps,
        )
    return split(times, shape)


def split(times: HeadTimes, shape: TreeShape) -> Split:
    """The medians, and each as a share."""
    body, head = times.median(BODY), times.median(HEAD)
    parts = {}
    for name in (BODY, *times.works):
        seconds, every = times.median(name), times.seconds[name]
        quarters = statistics.quantiles(every, n=4) if len(every) > 1 else [seconds] * 3
        multiplied = head if name == HEAD else head + seconds
        share = None if name == BODY else multiplied / (body + multiplied)
        parts[name] = Time(seconds, (quarters[0], quarters[2]), seconds / (body + head), share)
    return Split(shape.nodes, shape.levels, times.steps, parts)


def markdown(splits: Sequence[Split], heads: int) -> list[str]:
    """The paper's table 4, for each shape of trees."""
    lines = [
        f"**Table 4, time of a verification forward at batch 1**, K = {heads}: medians and "
        "quartiles of steps in which all parts are timed in turn. Of the forward: beside body and "
        "LM head. Head's share: the LM head with the rule's heads, of the forward with them.",
        "",
        "| tree | part | ms (quartiles) | of the forward | head's share | paper (70B, 5 tokens) |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for found in splits:
        tree = f"{found.nodes} nodes, {found.levels} levels, {found.steps} steps"
        for name, time in found.parts.items():
            low, high = time.quartiles
            share = "" if time.head_share is None else f"{time.head_share:.2%}"
            known = f"{PUBLISHED[name]:.2%}" if name in PUBLISHED else ""
            lines.append(
                f"| {tree} | {TOLD[name]} | {time.seconds * 1e3:.2f} ({low * 1e3:.2f}-"
                f"{high * 1e3:.2f}) | {time.of_forward:.1%} | {share} | {known} |"
            )
    return lines
