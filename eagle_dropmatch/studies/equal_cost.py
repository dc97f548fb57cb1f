"""Rules at equal cost: the tau of each at one loss of log-probability, from points on its knob.

A rule's curve runs from exact acceptance, which costs nothing, through its measured settings in the
order of their cost. Between two of them it is a straight line: a user can mix two settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..evals.plan import EXACT
from ..evals.statistics import CONFIDENCE, FEW_RESAMPLES, Estimate, Interval, resamples
from ..evals.summary import Summary
from ..evals.table import inline

ENOUGH = 0.95
"""Share of resamples in which a curve must reach a cost for its interval there to be told."""


@dataclass(frozen=True)
class EqualCost:
    """A curve at one cost."""

    curve: str
    cost: float
    """Nats a token below exact's answers."""
    tau: Estimate
    against: Estimate
    """Ratio to the reference curve's tau at the same cost."""


def equal_cost(
    summary: Summary,
    curves: Mapping[str, Sequence[str]],
    costs: Sequence[float],
    reference: str,
) -> list[EqualCost]:
    """Every curve that reaches a cost, the highest tau first, cost by cost.

    Intervals are percentiles of a bootstrap over questions, all curves resampled together.
    """
    questions = len(summary.question_ids)
    index = resamples(questions)
    sums = {
        group: np.asarray([list(each) for each in rows], dtype=np.float64)
        for group, rows in summary.sums.items()
    }
    # [1 + resamples] each; entry 0 is the sample itself.
    tau = {name: _quotient(values, index, 0, 1) for name, values in sums.items()}
    log_p = {name: _quotient(values, index, 3, 2) for name, values in sums.items()}
    found: list[EqualCost] = []
    for cost in costs:
        at = {
            name: _read(
                [tau[EXACT], *(tau[rule] for rule in rules if rule in tau)],
                [0 * tau[EXACT], *(log_p[EXACT] - log_p[rule] for rule in rules if rule in tau)],
                cost,
            )
            for name, rules in curves.items()
        }
        base = at.get(reference, np.full(len(index), math.nan))
        rows = [
            EqualCost(name, cost, _estimate(values), _estimate(values / base))
            for name, values in at.items()
            if math.isfinite(values[0])
        ]
        found += sorted(rows, key=lambda row: -row.tau.value)
    return found


def as_markdown(rows: Sequence[EqualCost], reference: str) -> str:
    """One table a cost."""
    lines = []
    for cost in dict.fromkeys(row.cost for row in rows):
        lines += [
            f"**At {cost:g} nats a token below exact**",
            "",
            f"| rule | tau (95%) | against {reference} (95%) |",
            "|---|--:|--:|",
            *(
                f"| {row.curve} | {inline(row.tau, 2)} | {inline(row.against)} |"
                for row in rows
                if row.cost == cost
            ),
            "",
        ]
    return "\n".join(lines)


def _quotient(
    values: NDArray[np.float64], index: NDArray[np.int64], above: int, below: int
) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient: NDArray[np.float64] = values[index, above].sum(1) / values[index, below].sum(1)
    return quotient


def _read(
    taus: Sequence[NDArray[np.float64]], costs: Sequence[NDArray[np.float64]], cost: float
) -> NDArray[np.float64]:
    """The curve through points (costs, taus) at ``cost``, in every resample; NaN beyond its end."""
    y, x = np.stack(taus, 1), np.stack(costs, 1)
    order = np.argsort(x, axis=1, kind="stable")
    x, y = np.take_along_axis(x, order, 1), np.take_along_axis(y, order, 1)
    rows = [np.interp(cost, a, b, right=math.nan) for a, b in zip(x, y, strict=True)]
    return np.asarray(rows, dtype=np.float64)


def _estimate(values: NDArray[np.float64]) -> Estimate:
    drawn = values[1:][np.isfinite(values[1:])]
    if len(drawn) < ENOUGH * FEW_RESAMPLES or np.ptp(drawn) == 0:
        return Estimate(float(values[0]), None)
    edge = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(drawn, [edge, 100 - edge])
    return Estimate(float(values[0]), Interval(float(low), float(high)))
