"""The numbers that figures of finished runs draw: each rule of a run beside exact."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..evals.plan import EXACT, PLAIN
from ..evals.statistics import CONFIDENCE, Estimate, Interval, paired_ratio, resamples
from ..evals.summary import Pool, Row
from ..figures import EXACT_STYLE, SMALLEST, STYLES, Style
from ..stats import acceptance_histogram
from ..studies.rule_sweep import SWEEP
from .stored_run import StoredRun

CURVES = {rule: curve for curve, rules in SWEEP.items() for rule in rules}
ENOUGH = 0.95
"""Share of resamples in which a level must have been reached for its interval to be told."""
NAMES = {PLAIN: "plain decoding", EXACT: "exact"}


@dataclass(frozen=True)
class RuleNumbers:
    """One rule of one run."""

    rule: str
    name: str
    """What figures and tables call it."""
    lossy: bool
    tau: Estimate
    strict_tau: float
    relaxed_share: float
    speed: Estimate | None
    """Ratio of tokens/s over ``baseline``'s; None without one."""
    baseline: str | None
    cost: Estimate | None
    """Nats a token by which the target finds the answers less likely than exact's; exact's own is
    0, and other lossless rules have none."""
    shares: tuple[Estimate, ...]
    """Of all steps, those that accepted a = 0, 1, ... draft tokens."""
    conditional: tuple[Estimate, ...]
    """P(a > n | a >= n) for n = 0, 1, ..."""
    on_front: bool
    """No rule of the run has at least its tau for at most its cost."""

    @property
    def family(self) -> str:
        """The rules whose points are joined: one rule over its knob. Exact on any tree is exact."""
        if self.rule.partition("-")[0] == EXACT:
            return EXACT
        return CURVES.get(self.rule, self.rule.partition("(")[0])


Blocks = Mapping[str, Sequence[RuleNumbers]]
"""A run's title -> its rules."""
TITLE_WIDTH = 40
"""Characters of a line above a panel."""


def headings(figure: Any, blocks: Blocks, parts: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """What stands above each panel: its run's title, unless all are of one, and its own lines."""
    if len(blocks) == 1:
        figure.suptitle(next(iter(blocks)), fontsize=SMALLEST + 1, fontweight="bold")
    return [
        "\n".join(
            line
            for text in ([title] if len(blocks) > 1 else []) + list(own)
            for line in textwrap.wrap(text, TITLE_WIDTH)
        )
        for title, own in parts
    ]


def numbers_of(run: StoredRun) -> list[RuleNumbers]:
    """The drafting rules of a run in the table's order, exact before all others."""
    rows = [row for row in run.summary.rows if row.drafting]
    rows.sort(key=lambda row: row.group != EXACT)
    found = [_numbers(run, row) for row in rows]
    return [replace(each, on_front=_on_front(each, found)) for each in found]


def families_of(rules: Iterable[RuleNumbers]) -> list[str]:
    """The families beside exact, in their order."""
    return [name for name in dict.fromkeys(each.family for each in rules) if name != EXACT]


def style_of(rule: RuleNumbers, families: Sequence[str]) -> Style:
    """A family looks the same in all blocks of a figure."""
    if rule.family == EXACT:
        return EXACT_STYLE
    return STYLES[families.index(rule.family) % len(STYLES)]


def _numbers(run: StoredRun, row: Row) -> RuleNumbers:
    comparison = next((c for c in run.summary.comparisons if c.group == row.group), None)
    cost = None if comparison is None else comparison.log_probability_cost
    if row.group == EXACT:
        cost = Estimate(0.0, None)
    baseline, speed = _speed(run, row)
    shares, conditional = acceptance(run.pool(row.group))
    return RuleNumbers(
        rule=row.group,
        name=run.name_of(row),
        lossy=row.lossy,
        tau=row.tau,
        strict_tau=row.strict_tau,
        relaxed_share=row.relaxed_share,
        speed=speed,
        baseline=baseline,
        cost=cost,
        shares=shares,
        conditional=conditional,
        on_front=False,
    )


def _speed(run: StoredRun, row: Row) -> tuple[str | None, Estimate | None]:
    """Over plain decoding where the run has it, else over exact."""
    if PLAIN in row.speedup:
        return PLAIN, row.speedup[PLAIN]
    if not any(spec.group == EXACT for spec in run.specs):
        return None, None
    columns = [
        [float(sum(values(answer) for answer in question)) for question in run.pool(group)]
        for group in (row.group, EXACT)
        for values in (lambda answer: answer.output_tokens, lambda answer: answer.wall_seconds)
    ]
    return EXACT, paired_ratio(*columns)


def _on_front(mine: RuleNumbers, others: Sequence[RuleNumbers]) -> bool:
    if mine.cost is None:
        return False
    point = (-mine.cost.value, mine.tau.value)
    return not any(
        other.cost is not None
        and (-other.cost.value, other.tau.value) != point
        and other.cost.value <= mine.cost.value
        and other.tau.value >= mine.tau.value
        for other in others
    )


def acceptance(pool: Pool) -> tuple[tuple[Estimate, ...], tuple[Estimate, ...]]:
    """How many draft tokens steps accept, and how often the next one is once n are.

    Returns (shares of a = 0 .. max a, P(a > n | a >= n) for n = 0 .. max a - 1). Intervals are
    percentiles of a bootstrap over questions, whole histograms resampled together; none where too
    few resamples have a step that came so far.
    """
    counts = [
        acceptance_histogram(
            length for answer in question for row in answer.rows for length in row.accept_lengths
        )
        for question in pool
    ]
    levels = max(map(len, counts), default=0)
    table = np.zeros((len(counts), levels))
    for line, each in zip(table, counts, strict=True):
        line[: len(each)] = each
    drawn = table[resamples(len(counts))].sum(1)  # [1 + resamples, levels]
    reached = np.cumsum(drawn[:, ::-1], axis=1)[:, ::-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        shares, conditional = drawn / reached[:, :1], reached[:, 1:] / reached[:, :-1]
    several = len(counts) > 1
    return _estimates(shares, several), _estimates(conditional, several)


def _estimates(values: NDArray[np.float64], several: bool) -> tuple[Estimate, ...]:
    return tuple(_estimate(column, several) for column in values.T)


def _estimate(column: NDArray[np.float64], several: bool) -> Estimate:
    """From [1 + resamples]: the sample's own value first."""
    value, drawn = float(column[0]), column[1:][np.isfinite(column[1:])]
    if not several or not math.isfinite(value) or len(drawn) < ENOUGH * (len(column) - 1):
        return Estimate(value, None)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return Estimate(value, Interval(float(low), float(high)))
