"""The dropout heads: their masks, their argmaxes, their mean, and the p_drop that fits."""

from __future__ import annotations

import math

import pytest
import rig
import torch
from rule_scenes import linear_head
from torch import Tensor

from eagle_dropmatch.acceptors.heads import drop, head_choices, mask_uniforms, solve_p_drop
from eagle_dropmatch.sampling import first_argmax

CPU = torch.device("cpu")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uniforms(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_a_mask_drops_where_the_uniform_is_below_p_and_scales_the_rest() -> None:
    hidden = torch.tensor([1.0, -2.0, 3.0, 4.0])
    draws = torch.tensor([0.0, 0.2, 0.25, 0.9])
    assert drop(hidden, draws, torch.tensor(0.25)).tolist() == pytest.approx([0, 0, 4, 16 / 3])


def test_p_zero_leaves_the_hidden_state_as_it_is_to_the_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        hidden = noise(5, 64).to(dtype)
        assert torch.equal(drop(hidden, uniforms(5, 64), torch.zeros(5, 1)), hidden)


def test_dropout_keeps_the_share_and_the_mean_that_it_should() -> None:
    p, count = 0.3, 20_000
    hidden, weight = noise(32), noise(10, 32, seed=1)
    dropped = drop(hidden, uniforms(count, 32), torch.tensor(p))
    kept = (dropped != 0).float().mean(0)
    assert (kept - (1 - p)).abs().max() < 5 * math.sqrt(p * (1 - p) / count)
    logits = dropped @ weight.T
    error = logits.std(0) / count**0.5
    assert ((logits.mean(0) - weight @ hidden).abs() < 5 * error).all()


def test_choices_are_the_argmax_of_every_masked_product() -> None:
    hidden, weight = noise(7, 16), noise(30, 16, seed=1)
    draws, rates = uniforms(7, 3, 16), torch.linspace(0, 0.6, 21).view(7, 3)
    chosen = head_choices(hidden, draws, rates, lambda h: h @ weight.T, 30)
    for node in range(7):
        for head in range(3):
            p = float(rates[node, head])
            kept = [
                float(x) / (1 - p) if u >= p else 0.0
                for x, u in zip(hidden[node], draws[node, head].tolist(), strict=True)
            ]
            logits = weight.double() @ torch.tensor(kept).double()
            assert chosen[node, head] == logits.argmax()


@pytest.mark.parametrize("most", [1, 30, 31, 100, 629])
def test_chunks_change_nothing_and_stay_within_their_bound(most: int) -> None:
    hidden, weight = noise(7, 16), noise(30, 16, seed=1)
    draws, rates = uniforms(7, 3, 16), torch.full((7, 3), 0.3)
    sizes: list[int] = []

    def head(h: Tensor) -> Tensor:
        logits = h @ weight.T
        sizes.append(logits.numel())
        return logits

    whole = head_choices(hidden, draws, rates, lambda h: h @ weight.T, 30)
    chunked = head_choices(hidden, draws, rates, head, 30, max_elements=most)
    assert torch.equal(chunked, whole)
    assert max(sizes) <= max(most, 30)
    assert sum(sizes) == 7 * 3 * 30


def test_all_heads_go_in_one_product_where_they_fit() -> None:
    calls: list[torch.Size] = []

    def head(h: Tensor) -> Tensor:
        calls.append(h.shape)
        return h

    head_choices(noise(7, 16), uniforms(7, 3, 16), torch.full((7, 3), 0.3), head, 16)
    assert calls == [torch.Size([21, 16])]


def test_no_node_needs_no_product() -> None:
    chosen = head_choices(noise(0, 16), uniforms(0, 3, 16), torch.zeros(0, 3), lambda h: h, 16)
    assert chosen.shape == (0, 3)


def test_ties_go_to_the_lowest_id() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([[0, 3, 1, 3], [2, 2, 2, 2]], dtype=dtype)
        assert first_argmax(logits).tolist() == [1, 0]


def test_masks_follow_from_seed_row_and_step_alone() -> None:
    base = mask_uniforms([11, 22], 0, [4, 4], (3, 2, 8), CPU)
    assert base.shape == (2, 3, 2, 8)
    assert base.dtype == torch.float32
    assert ((base >= 0) & (base < 1)).all()
    assert not torch.equal(base[0], base[1])
    assert torch.equal(mask_uniforms([22], 0, [4], (3, 2, 8), CPU)[0], base[1])
    assert torch.equal(mask_uniforms([7, 22, 11], 0, [9, 4, 4], (3, 2, 8), CPU)[1:], base.flip(0))
    for seed, step in ((1, 4), (0, 5)):
        assert not torch.equal(mask_uniforms([11, 22], seed, [step, step], (3, 2, 8), CPU), base)


@rig.needs_compiler
@pytest.mark.parametrize("count", [1, 17, 623, 624, 625, 5000])
def test_machine_code_draws_torchs_own_numbers(count: int) -> None:
    keys, steps = [11, 22, 7, 2**60, 5], [4, 4, 0, 1, 9]
    drawn = [
        mask_uniforms(keys, 3, steps, (count, 2), CPU, machine_code=how) for how in (False, True)
    ]
    assert torch.equal(*drawn)


def test_masks_leave_the_global_generator_where_it_was() -> None:
    before = torch.get_rng_state()
    mask_uniforms([1, 2], 0, [0, 0], (4, 8), CPU)
    assert torch.equal(torch.get_rng_state(), before)


def solved(hidden: Tensor, weight: Tensor, wanted: float, ceiling: float = 0.3) -> float:
    return float(
        solve_p_drop(hidden, linear_head(weight), target_agreement=wanted, ceiling=ceiling)
    )


def measured_agreement(hidden: Tensor, weight: Tensor, p: float, heads: int = 40) -> float:
    """Share of heads that pick the clean argmax of the whole vocabulary, under other masks."""
    clean = (hidden @ weight.T).argmax(-1)
    dropped = drop(
        hidden[:, None], uniforms(len(hidden), heads, hidden.shape[1], seed=9), torch.tensor(p)
    )
    return float(((dropped @ weight.T).argmax(-1) == clean[:, None]).float().mean())


def test_auto_finds_the_rate_at_which_heads_agree_as_often_as_wanted() -> None:
    hidden, weight = noise(64, 48), noise(200, 48, seed=1)
    rates = [solved(hidden, weight, wanted) for wanted in (0.75, 0.85, 0.95)]
    assert all(0 < p < 0.3 for p in rates)
    for wanted, p in zip((0.75, 0.85, 0.95), rates, strict=True):
        assert measured_agreement(hidden, weight, p) == pytest.approx(wanted, abs=0.05)


def test_a_higher_agreement_means_less_dropout() -> None:
    hidden, weight = noise(64, 48), noise(200, 48, seed=1)
    rates = [solved(hidden, weight, wanted) for wanted in (0.5, 0.7, 0.8, 0.9, 0.99, 1.0)]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) >= 5


def test_auto_never_leaves_the_papers_rate_behind() -> None:
    assert solved(noise(64, 48), noise(200, 48, seed=1), 0.01) == pytest.approx(0.3)
    assert solved(noise(64, 48), noise(200, 48, seed=1), 0.01, ceiling=0.1) == pytest.approx(0.1)


def test_auto_reads_a_prompts_last_positions() -> None:
    weight = noise(200, 48, seed=1)
    hidden = noise(64, 48)
    before = noise(64, 48, seed=5)
    assert solved(before, weight, 0.8) != solved(hidden, weight, 0.8)
    assert solved(torch.cat((before, hidden)), weight, 0.8) == solved(hidden, weight, 0.8)


def test_auto_takes_prompts_of_one_token_and_vocabularies_below_its_candidates() -> None:
    assert 0 <= solved(noise(1, 48), noise(40, 48, seed=1), 0.9) <= 0.3
    assert 0 <= solved(noise(5, 48), noise(8, 48, seed=1), 0.9) <= 0.3


@rig.needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("positions", "vocab"), [(64, 400), (64, 391), (9, 40), (1, 33), (5, 8)])
@pytest.mark.parametrize("wanted", [0.01, 0.8, 0.95, 1.0])
def test_machine_code_finds_the_same_rate(
    wanted: float, positions: int, vocab: int, biased: bool, dtype: torch.dtype
) -> None:
    hidden, weight = noise(positions, 48).to(dtype), noise(vocab, 48, seed=1).to(dtype)
    bias = noise(1, vocab, seed=2)[0].to(dtype) if biased else None
    heads = [linear_head(weight, bias, native=native) for native in (False, True)]
    # Which of equal logits is the greatest, topk does not say.
    best = heads[0](hidden).topk(2).values
    hidden = hidden[best[:, 0] > best[:, 1]]
    found = [
        float(solve_p_drop(hidden, head, target_agreement=wanted, ceiling=0.3)) for head in heads
    ]
    assert found[1] == pytest.approx(found[0], abs=1e-6)


@pytest.mark.parametrize("machine_code", [False, pytest.param(True, marks=rig.needs_compiler)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 40, 4096, 5000, 49_152])
def test_the_argmax_is_the_first_of_its_ties(
    dtype: torch.dtype, size: int, machine_code: bool
) -> None:
    generator = torch.Generator().manual_seed(size)
    # Few different values: the greatest stands at many places.
    logits = torch.randint(-3, 4, (5, 3, size), generator=generator).to(dtype)
    logits[0, 0] = -torch.inf
    logits[0, 1] = -logits[0, 1].abs()  # its greatest are 0 and -0, which are equal
    logits[1, 1, size - 1] = 9
    logits[1, 2, :2] = 9
    logits[2] = torch.randn(3, size, generator=generator)
    wanted = [[row.tolist().index(max(row.tolist())) for row in each] for each in logits.float()]
    assert first_argmax(logits, machine_code=machine_code).tolist() == wanted
    across = logits.transpose(0, 1)
    assert first_argmax(across, machine_code=machine_code).tolist() == [
        list(each) for each in zip(*wanted, strict=True)
    ]
