"""Intervals against scipy, brute force and cases without a spread."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eagle_dropmatch.evals.statistics import (
    RESAMPLES,
    SEED,
    Interval,
    paired_ratio,
    ratio,
    wilson,
)

RNG = np.random.default_rng(3)
STEPS = RNG.integers(20, 60, size=12).astype(float)
TOKENS = np.round(STEPS * RNG.uniform(1.8, 3.4, size=12))
BASE = np.round(STEPS * RNG.uniform(1.2, 2.2, size=12))


def test_the_ratio_is_of_sums_and_not_a_mean_of_ratios():
    assert ratio([10.0, 1.0], [2.0, 1.0]).value == pytest.approx(11 / 3)


def test_the_interval_is_scipys_bca_of_the_ratio_of_sums():
    scipy_stats = pytest.importorskip("scipy.stats")
    expected = scipy_stats.bootstrap(
        (np.arange(12),),
        # Written without vectors, another way round: indices are resampled instead of columns.
        lambda index: TOKENS[index].sum() / STEPS[index].sum(),
        vectorized=False,
        n_resamples=RESAMPLES,
        method="BCa",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    assert ratio(TOKENS, STEPS).interval == pytest.approx((expected.low, expected.high))


def test_bca_against_its_formula_by_hand():
    """Efron's (1987) percentiles, computed here from an own bootstrap of the same statistic."""
    from statistics import NormalDist

    normal = NormalDist()
    rng = np.random.default_rng(11)
    picks = rng.integers(0, 12, size=(40_000, 12))
    values = np.sort(TOKENS[picks].sum(1) / STEPS[picks].sum(1))
    estimate = TOKENS.sum() / STEPS.sum()
    bias = normal.inv_cdf(float(np.mean(values < estimate)))
    left_out = np.array([np.delete(TOKENS, i).sum() / np.delete(STEPS, i).sum() for i in range(12)])
    apart = left_out.mean() - left_out
    acceleration = (apart**3).sum() / (6 * (apart**2).sum() ** 1.5)

    def bound(tail: float) -> float:
        z = bias + normal.inv_cdf(tail)
        return float(np.quantile(values, normal.cdf(bias + z / (1 - acceleration * z))))

    # Two bootstraps of this size differ by their own noise.
    assert ratio(TOKENS, STEPS).interval == pytest.approx((bound(0.025), bound(0.975)), abs=0.01)


def test_two_identical_arms_give_exactly_one():
    estimate = paired_ratio(TOKENS, STEPS, TOKENS, STEPS)
    assert estimate.value == 1.0
    assert estimate.interval == Interval(1.0, 1.0)
    assert not estimate.interval.excludes(1.0)


def test_pairing_cancels_what_makes_a_question_hard():
    """Questions differ tenfold, the arms by a constant factor: the paired interval is a point."""
    hard = np.geomspace(1, 10, 12)
    estimate = paired_ratio(2 * hard, STEPS, hard, STEPS)
    assert estimate.value == pytest.approx(2.0)
    assert estimate.interval == pytest.approx((2.0, 2.0))
    alone = ratio(hard, np.ones(12)).interval
    assert alone is not None
    assert alone.high - alone.low > 1.0


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """40 samples of 30 questions with a known ratio of 2: far fewer misses than with half width."""
    rng = np.random.default_rng(5)
    misses = 0
    for _ in range(40):
        steps = rng.integers(20, 60, size=30).astype(float)
        tokens = steps * rng.normal(2.0, 0.4, size=30)
        interval = ratio(tokens, steps).interval
        assert interval is not None
        misses += interval.excludes(2.0)
    assert misses <= 6


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_questions_have_no_interval(count):
    assert ratio([3.0] * count, [2.0] * count).interval is None


def test_equal_questions_give_an_interval_of_no_width():
    assert ratio([6.0] * 4, [2.0] * 4) == (3.0, Interval(3.0, 3.0))


def test_arms_without_a_step_have_no_number():
    estimate = ratio([0.0, 0.0], [0.0, 0.0])
    assert math.isnan(estimate.value)
    assert estimate.interval is None


def test_two_questions_already_give_a_finite_interval():
    interval = ratio([10.0, 30.0], [10.0, 10.0]).interval
    assert interval is not None
    assert 1.0 <= interval.low <= interval.high <= 3.0


def test_the_same_records_print_the_same_interval():
    assert paired_ratio(TOKENS, STEPS, BASE, STEPS) == paired_ratio(TOKENS, STEPS, BASE, STEPS)


def test_columns_of_different_questions_are_refused():
    with pytest.raises(ValueError, match="not paired"):
        ratio([1.0, 2.0], [1.0])


def test_wilson_is_scipys_and_holds_at_the_edges():
    scipy_stats = pytest.importorskip("scipy.stats")
    for k, n in ((0, 7), (7, 7), (3, 10), (401, 500)):
        wanted = scipy_stats.binomtest(k, n).proportion_ci(method="wilson")
        found = wilson(k / n, n)
        assert found.interval == pytest.approx((wanted.low, wanted.high))
        assert found.interval.low <= found.value <= found.interval.high
    assert wilson(0.0, 0).interval is None
