"""Divergences against numpy in float64, zeros included, and what must hold of any of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from eagle_dropmatch.acceptors.divergence import (
    LN2,
    js_divergence,
    js_from_draft,
    kl_divergence,
    kl_to_draft,
)

Array = NDArray[np.float64]
#: How far float32 may be off.
FLOAT32 = 2e-6


def logs(*values: Array | list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    """Log-probabilities, -inf at zeros: one row for each distribution."""
    return torch.tensor(np.stack([np.asarray(each) for each in values])).log().to(dtype)


def plain_kl(p: Array, q: Array) -> float:
    total = 0.0
    for a, b in zip(p.tolist(), q.tolist(), strict=True):
        if a > 0:
            total += a * math.log(a / b) if b > 0 else math.inf
    return total


def plain_js(p: Array, q: Array) -> float:
    middle = (p + q) / 2
    return (plain_kl(p, middle) + plain_kl(q, middle)) / 2


def spread(q: Array, ids: list[int], size: int) -> Array:
    """A draft's distribution over the target's vocabulary."""
    whole = np.zeros(size)
    whole[ids] = q
    return whole


@st.composite
def distributions(draw: st.DrawFn, count: int, size: int) -> list[Array]:
    """Some distributions over as many tokens, with zeros and with tiny parts."""
    part = st.one_of(st.just(0.0), st.floats(1e-3, 1.0), st.sampled_from([1e-9, 1e-5]))
    found = []
    for _ in range(count):
        parts = np.array(draw(st.lists(part, min_size=size, max_size=size)))
        parts[draw(st.integers(0, size - 1))] += 1.0
        found.append(parts / parts.sum())
    return found


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Array, Array]:
    p, q = draw(distributions(2, draw(st.integers(1, 12))))
    return p, q


@st.composite
def drafts(draw: st.DrawFn) -> tuple[Array, list[int], Array]:
    """q over some tokens in any order, these tokens, and p over all."""
    size = draw(st.integers(1, 12))
    ids = draw(st.permutations(range(size)))[: draw(st.integers(1, size))]
    (q,), (p,) = draw(distributions(1, len(ids))), draw(distributions(1, size))
    return q, ids, p


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_js_is_numpys_symmetric_and_between_zero_and_ln_2(pair: tuple[Array, Array]) -> None:
    p, q = pair
    for dtype, slack in ((torch.float64, 1e-12), (torch.float32, FLOAT32)):
        log_p, log_q = logs(p, dtype=dtype), logs(q, dtype=dtype)
        found = float(js_divergence(log_p, log_q))
        assert found == pytest.approx(plain_js(p, q), abs=slack)
        assert found == pytest.approx(float(js_divergence(log_q, log_p)), abs=slack)
        assert 0 <= found <= LN2 + slack


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_kl_is_numpys_and_infinite_where_q_misses_a_part_of_p(pair: tuple[Array, Array]) -> None:
    p, q = pair
    wanted = plain_kl(p, q)
    assert math.isinf(wanted) == bool(((p > 0) & (q == 0)).any())
    for dtype, slack in ((torch.float64, 1e-12), (torch.float32, FLOAT32)):
        found = float(kl_divergence(logs(p, dtype=dtype), logs(q, dtype=dtype)))
        assert found >= 0
        assert found == pytest.approx(wanted, abs=10 * slack)


@settings(max_examples=100, deadline=None)
@given(pairs())
def test_identical_distributions_are_nothing_apart(pair: tuple[Array, Array]) -> None:
    p, _ = pair
    for dtype, slack in ((torch.float64, 1e-12), (torch.float32, FLOAT32)):
        log_p, ids = logs(p, dtype=dtype), torch.arange(len(p))
        assert float(js_divergence(log_p, log_p)) <= slack
        assert float(kl_divergence(log_p, log_p)) == 0
        assert float(js_from_draft(log_p, ids, log_p)) <= slack
        # What rounding takes for mass outside the draft's tokens counts a few times itself.
        assert float(kl_to_draft(log_p, ids, log_p)) <= 20 * slack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_disjoint_distributions_are_ln_2_apart(dtype: torch.dtype) -> None:
    p, q = logs([0.3, 0.7, 0, 0], dtype=dtype), logs([0, 0, 0.1, 0.9], dtype=dtype)
    assert float(js_divergence(p, q)) == pytest.approx(LN2)
    assert float(js_from_draft(p[:, :2], torch.tensor([0, 1]), q)) == pytest.approx(LN2)
    assert math.isinf(float(kl_divergence(p, q)))


@settings(max_examples=200, deadline=None)
@given(drafts())
def test_js_from_a_draft_is_js_with_zeros_at_all_other_tokens(
    drawn: tuple[Array, list[int], Array],
) -> None:
    q, ids, p = drawn
    wanted = plain_js(spread(q, ids, len(p)), p)
    for dtype, slack in ((torch.float64, 1e-12), (torch.float32, FLOAT32)):
        log_q, log_p = logs(q, dtype=dtype), logs(p, dtype=dtype)
        found = float(js_from_draft(log_q, torch.tensor(ids), log_p))
        assert found == pytest.approx(wanted, abs=slack)
        assert 0 <= found <= LN2 + slack


@settings(max_examples=200, deadline=None)
@given(drafts())
def test_js_from_a_draft_is_at_least_what_its_missing_tokens_cost(
    drawn: tuple[Array, list[int], Array],
) -> None:
    q, ids, p = drawn
    outside = 1 - p[ids].sum()
    found = float(js_from_draft(logs(q), torch.tensor(ids), logs(p)))
    assert found >= outside * math.log(2) / 2 - 1e-12


@settings(max_examples=200, deadline=None)
@given(drafts())
def test_kl_to_a_draft_puts_the_mass_outside_on_one_token_of_a_millionth(
    drawn: tuple[Array, list[int], Array],
) -> None:
    q, ids, p = drawn
    outside = max(0.0, 1 - p[ids].sum())
    wanted = plain_kl(p[ids], q)
    if outside > 1e-12:
        wanted += outside * math.log(outside / 1e-6)
    wanted = max(0.0, wanted)
    for dtype, slack in ((torch.float64, 1e-10), (torch.float32, 20 * FLOAT32)):
        found = float(kl_to_draft(logs(p, dtype=dtype), torch.tensor(ids), logs(q, dtype=dtype)))
        assert found == pytest.approx(wanted, abs=slack)


@pytest.mark.parametrize(
    ("divergence", "plain"), [(js_divergence, plain_js), (kl_divergence, plain_kl)]
)
def test_leading_dimensions_broadcast(
    divergence: Callable[[Tensor, Tensor], Tensor], plain: Callable[[Array, Array], float]
) -> None:
    generator = np.random.default_rng(0)
    many, one = generator.dirichlet(np.ones(6), (2, 3)), generator.dirichlet(np.ones(6), 2)
    found = divergence(torch.tensor(many).log(), torch.tensor(one).log()[:, None])
    assert found.shape == (2, 3)
    for row in range(2):
        for head in range(3):
            assert float(found[row, head]) == pytest.approx(plain(many[row, head], one[row]))


def test_rows_of_drafts_are_judged_one_by_one() -> None:
    generator = np.random.default_rng(1)
    ids = [4, 0, 2]
    q, p = generator.dirichlet(np.ones(3), 5), generator.dirichlet(np.ones(6), 5)
    args = torch.tensor(q).log(), torch.tensor(ids), torch.tensor(p).log()
    found = js_from_draft(*args)
    assert found.shape == kl_to_draft(args[2], args[1], args[0]).shape == (5,)
    wanted = [plain_js(spread(a, ids, 6), b) for a, b in zip(q, p, strict=True)]
    assert found.tolist() == pytest.approx(wanted)
