"""Single numbers of a stored run by name, as texts print them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import UserError
from ..evals.plan import HF, PLAIN
from ..evals.statistics import Estimate
from ..evals.summary import LossyComparison, Row
from ..evals.table import inline
from .stored_run import StoredRun

Told = str | None
"""None: the run does not have that number."""


def _estimate(value: Estimate | None, digits: int, alone: bool) -> Told:
    if value is None:
        return None
    return inline(Estimate(value.value, None) if alone else value, digits)


def _share(value: float | None) -> Told:
    return None if value is None else f"{100 * value:.1f}%"


OF_ROWS: Mapping[str, Callable[[Row, bool], Told]] = {
    "tau": lambda row, alone: _estimate(row.tau, 2, alone),
    "strict_tau": lambda row, alone: f"{row.strict_tau:.2f}",
    "over_plain": lambda row, alone: _estimate(row.speedup.get(PLAIN), 2, alone),
    "over_generate": lambda row, alone: _estimate(row.speedup.get(HF), 2, alone),
    "tokens_per_second": lambda row, alone: f"{row.tokens_per_second:.1f}",
    "relaxed_share": lambda row, alone: _share(row.relaxed_share),
    "coverage": lambda row, alone: _share(row.coverage),
}
"""Of every row of the table; the flag asks for the number without its interval."""
OF_LOSSY_ROWS: Mapping[str, Callable[[LossyComparison, bool], Told]] = {
    "tau_ratio": lambda lossy, alone: _estimate(lossy.tau_ratio, 3, alone),
    "tau_ratio_by_seed": lambda lossy, alone: ", ".join(
        f"{each.value:.3f}" for each in lossy.tau_ratio_by_seed.values()
    ),
    "speed_ratio": lambda lossy, alone: _estimate(lossy.speed_ratio, 3, alone),
    "cost": lambda lossy, alone: _estimate(lossy.log_probability_cost, 3, alone),
    "length_ratio": lambda lossy, alone: f"{lossy.difference.length_ratio:.2f}",
    "stray_share": lambda lossy, alone: _share(lossy.stray_share),
}
"""Of lossy rows, beside exact: ratios of tau and tokens/s, and nats a token below."""
QUANTITIES = (*OF_ROWS, *OF_LOSSY_ROWS)


def quantity(run: StoredRun, group: str, name: str, *, alone: bool = False) -> str:
    """The number ``name`` of the row ``group``, with its interval in brackets unless ``alone``.

    UserError where the run has no such row, or no such number of it.
    """
    rows = {row.group: row for row in run.summary.rows}
    if group not in rows:
        raise UserError(f"{run.path} has no row {group!r}; it has {', '.join(rows)}")
    if name in OF_ROWS:
        told = OF_ROWS[name](rows[group], alone)
    else:
        lossy = {each.group: each for each in run.summary.comparisons}
        told = OF_LOSSY_ROWS[name](lossy[group], alone) if group in lossy else None
    if told is None:
        raise UserError(f"{run.path} has no {name} of {group}")
    return told
