"""tau and its relatives against values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_dropmatch import stats
from eagle_dropmatch.stats import GenerationStats, RowStats


def row(accept_lengths: list[int], *, strict: list[int] | None = None, relaxed=None) -> RowStats:
    steps = len(accept_lengths)
    return RowStats(
        accept_lengths=accept_lengths,
        strict_accept_lengths=strict if strict is not None else accept_lengths,
        relaxed_tokens=relaxed if relaxed is not None else [0] * steps,
        draft_nodes=[7] * steps,
        prompt_tokens=5,
        output_tokens=1 + sum(accept_lengths),
        finish_reason="length",
    )


# a = 0, 3, 1, 3 in the first sequence and 0, 1 in the second: 6 steps, 8 accepted draft tokens.
TWO_ROWS = GenerationStats(
    rows=(
        row([1, 4, 2, 4], strict=[1, 2, 2, 3], relaxed=[0, 2, 0, 1]),
        row([1, 2]),
    ),
    prefill_seconds=0.5,
    decode_seconds=2.0,
)


def test_tau_pools_all_steps_of_all_rows_and_counts_the_bonus():
    assert TWO_ROWS.num_steps == 6
    assert TWO_ROWS.accepted_draft_tokens == 8
    assert TWO_ROWS.tau == pytest.approx((8 + 6) / 6)


def test_the_prefills_token_is_output_but_not_a_steps():
    assert TWO_ROWS.committed_tokens == 14
    assert TWO_ROWS.output_tokens == 16


def test_strict_tau_is_the_exact_rules_length_on_the_same_trees():
    assert TWO_ROWS.strict_tau == pytest.approx((1 + 2 + 2 + 3 + 1 + 2) / 6)


def test_relaxed_share_is_over_accepted_draft_tokens():
    assert TWO_ROWS.relaxed_share == pytest.approx(3 / 8)


def test_relaxed_share_is_zero_when_no_draft_token_was_accepted():
    assert GenerationStats((row([1, 1]),), 0.0, 1.0).relaxed_share == 0.0


def test_histogram_counts_steps_by_accepted_draft_tokens():
    assert TWO_ROWS.histogram == [2, 2, 0, 2]


def test_unconditional_rate_is_over_all_steps_and_sums_to_tau_minus_one():
    rates = stats.unconditional_acceptance(TWO_ROWS.histogram)
    assert rates == pytest.approx([4 / 6, 2 / 6, 2 / 6])
    assert sum(rates) == pytest.approx(TWO_ROWS.tau - 1)


def test_conditional_rate_is_over_the_steps_that_got_so_far():
    # 4 of 6 steps accepted the first token, 2 of these 4 the second, both of these the third.
    rates = stats.conditional_acceptance(TWO_ROWS.histogram)
    assert rates == pytest.approx([4 / 6, 2 / 4, 2 / 2])


def test_depth_normalised_rate_is_one_for_a_draft_that_is_always_right():
    levels = 8
    oracle = GenerationStats((row([levels + 1] * 3),), 0.0, 1.0)
    assert stats.depth_normalised_rate(oracle, levels) == pytest.approx(1.0)


def test_peers_variants_on_one_record():
    tau = 14 / 6
    assert stats.spec_bench_mean_accepted(TWO_ROWS) == pytest.approx(tau)
    assert stats.vllm_mean_acceptance_length(TWO_ROWS) == pytest.approx(tau)
    assert stats.gpt_fast_mean_accepted(TWO_ROWS) == pytest.approx(tau - 1)
    # Two prefill tokens more.
    assert stats.sglang_accept_length(TWO_ROWS) == pytest.approx(16 / 6)
    # One step less in each of two rows.
    assert [stats.eagle_idxs(r) for r in TWO_ROWS.rows] == [3, 1]
    assert stats.eagle_answer_file_quotient(TWO_ROWS) == pytest.approx(14 / 4)


def test_eagles_quotient_overstates_tau_by_steps_over_steps_minus_one():
    single = GenerationStats((row([2, 3, 4]),), 0.0, 1.0)
    assert stats.eagle_answer_file_quotient(single) == pytest.approx(single.tau * 3 / 2)


def test_a_record_without_steps_has_no_tau_and_divides_nothing_by_zero():
    empty = GenerationStats((row([]),), 0.1, 0.0)
    assert math.isnan(empty.tau)
    assert math.isnan(empty.strict_tau)
    assert math.isnan(empty.tokens_per_second)
    assert math.isnan(stats.eagle_answer_file_quotient(empty))
    assert empty.histogram == []
    assert empty.output_tokens == 1


def test_speed_counts_committed_tokens_over_decoding_alone():
    assert TWO_ROWS.tokens_per_second == pytest.approx(14 / 2.0)


def test_merge_pools_steps_instead_of_averaging_taus():
    long = GenerationStats((row([1] * 9),), 1.0, 3.0)
    short = GenerationStats((row([5]),), 1.0, 1.0)
    merged = GenerationStats.merge([long, short])
    assert merged.tau == pytest.approx(14 / 10)
    assert (merged.prefill_seconds, merged.decode_seconds) == (2.0, 4.0)


def test_a_token_counted_twice_is_refused():
    with pytest.raises(ValueError, match="counted twice or lost"):
        RowStats([2, 2], [2, 2], [0, 0], [3, 3], 5, output_tokens=6, finish_reason="length")


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="relaxed_tokens has 1 entries for 2 steps"):
        RowStats([2, 2], [2, 2], [0], [3, 3], 5, output_tokens=5, finish_reason="length")


@given(st.lists(st.integers(min_value=1, max_value=9), min_size=1, max_size=40))
def test_all_definitions_agree_through_the_histogram(lengths):
    record = GenerationStats((row(lengths),), 0.0, 1.0)
    counts = record.histogram
    assert sum(counts) == record.num_steps
    assert sum(a * n for a, n in enumerate(counts)) == record.accepted_draft_tokens
    assert sum(stats.unconditional_acceptance(counts)) == pytest.approx(record.tau - 1)
    # The product of the conditional rates up to i is the unconditional one.
    product = 1.0
    for conditional, unconditional in zip(
        stats.conditional_acceptance(counts), stats.unconditional_acceptance(counts), strict=True
    ):
        product *= conditional
        assert product == pytest.approx(unconditional)
