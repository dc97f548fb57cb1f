"""Intervals over questions.

Questions are the unit: tokens and steps inside one answer depend on each other, so an interval that
resampled steps would be far too narrow. Every number here is a ratio of sums over questions (tokens
over steps, tokens over seconds), or a quotient of two such ratios measured on the same questions;
quotients resample both arms together (paired), which cancels what makes a question easy or hard.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 9999
SEED = 20240
"""Seed of the resampling: the same records always print the same intervals."""


def require_scipy() -> None:
    """UserError where intervals could not be worked out."""
    if importlib.util.find_spec("scipy") is None:
        raise UserError("intervals need scipy: run `pip install eagle-dropmatch[eval]`")


class Interval(NamedTuple):
    """Bounds of a 95% confidence interval."""

    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether ``value`` lies outside: only then may a difference from it be claimed."""
        return not self.low <= value <= self.high


class Estimate(NamedTuple):
    """A number and its interval; None where there are too few questions for one."""

    value: float
    interval: Interval | None


FEW_RESAMPLES = 2000
"""Resamples where a statistic is worked out for whole curves."""


def resamples(questions: int) -> NDArray[np.int64]:
    """Which questions each resample holds: [1 + FEW_RESAMPLES, questions], first the sample
    itself."""
    rng = np.random.default_rng(SEED)
    draws = rng.integers(0, questions, size=(FEW_RESAMPLES, questions))
    return np.concatenate((np.arange(questions)[None], draws))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """sum(numerators) / sum(denominators) over questions, with its BCa interval."""
    return _estimate([numerators, denominators], _ratio_of_sums)


def paired_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    base_numerators: Sequence[float],
    base_denominators: Sequence[float],
) -> Estimate:
    """(sum a / sum b) / (sum c / sum d), entry i of all four from question i; BCa interval.

    With tokens and steps it is a ratio of taus, with tokens and seconds a speed-up. Two identical
    arms give exactly 1 with the interval [1, 1].
    """
    columns = [numerators, denominators, base_numerators, base_denominators]
    return _estimate(columns, _quotient_of_ratios)


def paired_difference(
    numerators: Sequence[float],
    denominators: Sequence[float],
    base_numerators: Sequence[float],
    base_denominators: Sequence[float],
) -> Estimate:
    """sum a / sum b - sum c / sum d, entry i of all four from question i; BCa interval.

    With log-probabilities and tokens it is a difference of means a token.
    """
    columns = [numerators, denominators, base_numerators, base_denominators]
    return _estimate(columns, _difference_of_ratios)


def wilson(share: float, trials: int) -> Estimate:
    """A share of independent trials with Wilson's score interval (1927).

    ``share * trials`` need not be whole: a question answered several times is one trial with its
    mean success, whose interval is then a little wide.
    """
    if not trials:
        return Estimate(math.nan, None)
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # Where nothing or everything succeeded, rounding must not leave the share outside.
    low, high = (middle - spread) / scale, (middle + spread) / scale
    return Estimate(share, Interval(min(max(low, 0.0), share), max(min(high, 1.0), share)))


def _ratio_of_sums(a: Floats, b: Floats, axis: int = -1) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sum(a, axis=axis) / np.sum(b, axis=axis)


def _quotient_of_ratios(a: Floats, b: Floats, c: Floats, d: Floats, axis: int = -1) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return _ratio_of_sums(a, b, axis) / _ratio_of_sums(c, d, axis)


def _difference_of_ratios(a: Floats, b: Floats, c: Floats, d: Floats, axis: int = -1) -> Any:
    return _ratio_of_sums(a, b, axis) - _ratio_of_sums(c, d, axis)


def _estimate(columns: Sequence[Sequence[float]], statistic: Any) -> Estimate:
    data = [np.asarray(column, dtype=np.float64) for column in columns]
    size = len(data[0])
    if any(len(column) != size for column in data):
        raise ValueError(f"columns of {[len(column) for column in data]} questions are not paired")
    value = float(statistic(*data)) if size else math.nan
    if size < 2 or not math.isfinite(value):
        return Estimate(value, None)
    return Estimate(value, _bca(data, statistic, value))


def _bca(data: list[Floats], statistic: Any, value: float) -> Interval | None:
    """Bias-corrected and accelerated bootstrap (Efron, 1987), scipy's, made total.

    scipy gives NaN where the bias or the acceleration is undefined: when every resample has the
    same value, or when none lies on one side of the estimate. The first is an interval of no width;
    the second falls back to the plain percentiles.
    """
    from scipy.stats import bootstrap

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DegenerateDataWarning: handled below
        result = bootstrap(
            data,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE,
            method="BCa",
            rng=np.random.default_rng(SEED),
        )
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    if math.isfinite(low) and math.isfinite(high):
        return Interval(low, high)
    resamples = result.bootstrap_distribution
    resamples = resamples[np.isfinite(resamples)]
    if not len(resamples):
        return None
    if np.ptp(resamples) == 0.0:
        return Interval(value, value)
    tail = 100.0 * (1.0 - CONFIDENCE) / 2.0
    low, high = np.percentile(resamples, [tail, 100.0 - tail])
    return Interval(float(low), float(high))
