"""The flip probability in closed form, against masks that are drawn, and Gaussian noise."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from rule_scenes import Scene, linear_head, random_scene
from scipy import stats
from torch import Tensor

from eagle_dropmatch.acceptors import make_acceptor, step_heads
from eagle_dropmatch.acceptors.dropmatch import DropoutRule
from eagle_dropmatch.acceptors.flip import flip_probability
from eagle_dropmatch.acceptors.heads import shake
from eagle_dropmatch.acceptors.step_heads import Heads
from eagle_dropmatch.sampling import Sampler
from eagle_dropmatch.target import TargetOutput
from eagle_dropmatch.tree import DraftTree

NEAR = 1e-5
GREEDY, COOL, FEW = Sampler(), Sampler(0.7), Sampler(1.2, top_k=4)
SCENES = [random_scene(3, 12, vocab=9, seed=seed, sharp=0.3) for seed in range(8)]


def made(name: str, **options: Any) -> DropoutRule:
    rule = make_acceptor(name, **options)
    assert isinstance(rule, DropoutRule)
    return rule


def pair(gap: float, p: float, size: int = 256) -> tuple[Tensor, Tensor]:
    """A hidden state and rows of W whose clean gap is ``gap`` spreads under dropout of ``p``."""
    generator = torch.Generator().manual_seed(4)
    hidden, first, terms = torch.randn(3, size, generator=generator)
    for _ in range(5):  # the spread moves a little with the shift
        spread = math.sqrt(p / (1 - p) * float(terms.square().sum()))
        terms = terms + (gap * spread - float(terms.sum())) / size
    return hidden, torch.stack((first, first - terms / hidden))


def phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def closed_form(hidden: Tensor, weight: Tensor, p: float, bias: Tensor | None = None) -> float:
    rule = make_acceptor("flip_probability", K=1, p_drop=p)
    states = hidden.expand(1, 2, -1)
    tree = DraftTree.chain(torch.tensor([[0, 1]]))
    step = Scene(tree, states, linear_head(weight, bias)).step(rule)
    return float(flip_probability(step, step.head, torch.full((1, 2, 1), p))[0, 1, 0])


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("gap", "p"), [(0.3, 0.3), (1.0, 0.3), (1.0, 0.1), (2.0, 0.5)])
def test_the_flip_probability_is_the_share_of_masks_under_which_x_wins(
    gap: float, p: float, biased: bool
) -> None:
    count, heads = 10_000, 3
    hidden, weight = pair(gap, p)
    bias = torch.tensor([0.5, -1.0]) if biased else None
    terms = (weight[0] - weight[1]) * hidden
    flips = torch.zeros(count, heads, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for head in range(heads):
        kept = torch.rand(count, 256, generator=generator) >= p
        flips[:, head] = kept.float() @ terms / (1 - p) + (1.5 if biased else 0.0) < 0
    one = closed_form(hidden, weight, p, bias)
    mean = float(terms.sum()) + (1.5 if biased else 0.0)
    spread = math.sqrt(p / (1 - p) * float(terms.square().sum()))
    assert one == pytest.approx(phi(-mean / spread), abs=1e-5)
    # What chance gives, and what the normal approximation may be off for 256 terms.
    some = 1 - (1 - one) ** heads
    bound = 4 * math.sqrt(some * (1 - some) / count) + 0.015
    assert abs(float(flips.any(1).double().mean()) - some) < bound


def test_gaussian_noise_has_dropouts_mean_and_variance() -> None:
    count, p = 40_000, 0.3
    hidden = torch.tensor([1.0, -2.0, 0.5, 0.0])
    draws = torch.rand(count, 4, generator=torch.Generator().manual_seed(0))
    shaken = shake(hidden, draws, torch.tensor(p)).double()
    variance = p / (1 - p) * hidden.double().square()
    assert ((shaken.mean(0) - hidden).abs() <= 5 * (variance / count).sqrt()).all()
    torch.testing.assert_close(shaken.var(0), variance, rtol=5 * math.sqrt(2 / count), atol=0)


@pytest.mark.parametrize("p", [0.1, 0.4])
@pytest.mark.parametrize("gap", [0.2, 1.0, 2.0])
def test_gaussian_heads_flip_as_often_as_the_closed_form_says(gap: float, p: float) -> None:
    count = 20_000
    hidden, weight = pair(gap, p, size=64)
    draws = torch.rand(count, 64, generator=torch.Generator().manual_seed(2))
    logits = shake(hidden, draws, torch.tensor(p)) @ weight.T
    share = float((logits[:, 1] > logits[:, 0]).double().mean())
    chance = closed_form(hidden, weight, p)
    # Fails once in 10,000; there is no approximation here to allow for.
    bound = float(stats.norm.isf(1e-4 / 2)) * math.sqrt(chance * (1 - chance) / count)
    assert abs(share - chance) <= bound


def test_gaussian_noise_is_finite_for_every_uniform_that_can_be_drawn() -> None:
    draws = torch.tensor([0.0, 2.0**-24, 0.5 - 2.0**-25, 0.5, 1 - 2.0**-23, 1 - 2.0**-24])
    for hidden in (torch.ones(6), torch.zeros(6)):
        assert shake(hidden, draws, torch.tensor(0.3)).isfinite().all()


FLIPS: list[dict[str, Any]] = [
    {"p_drop": 0.3},
    {"p_drop": 0.2, "K": 1, "threshold": 0.1},
    {"p_drop": [0.0, 0.1, 0.6], "K": 3, "threshold": 0.3},
    {"p_drop": 0.5, "adapt": "margin", "threshold": 0.2},
    {"p_drop": 0.5, "adapt": "entropy", "threshold": 0.9},
]


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("sampler", [GREEDY, COOL, FEW], ids=["greedy", "cool", "few"])
@pytest.mark.parametrize("options", FLIPS, ids=range(len(FLIPS)))
def test_flip_probability_accepts_where_one_of_k_heads_prefers_x_often_enough(
    options: dict[str, Any], sampler: Sampler, biased: bool
) -> None:
    rule, threshold = made("flip_probability", **options), options.get("threshold", 0.5)
    seen, answers = 0, Counter[bool]()
    for scene in SCENES:
        bias = torch.linspace(-1, 1, 9) if biased else None
        scene = replace(scene, head=linear_head(scene.head.weight, bias))
        step, tree = scene.step(rule, sampler), scene.tree
        found, rates = rule.accept(step).tolist(), Heads(rule, step).rates
        rates_at = step.parents.to_children(rates)
        weight = scene.head.weight.double()
        for row, node in tree.valid.nonzero().tolist():
            parent = int(tree.parents[row, node])
            if parent < 0:
                continue
            z, x = step.logits[row, parent].tolist(), int(tree.tokens[row, node])
            best = max(range(9), key=z.__getitem__)
            terms = ((weight[best] - weight[x]) * scene.hidden[row, parent].double()).tolist()
            none = 1.0
            for rate in rates_at[row, node].tolist():
                spread = math.sqrt(rate / (1 - rate) * sum(term * term for term in terms))
                if rate > 0:
                    none *= 1 - (1.0 if x == best else phi(-(z[best] - z[x]) / spread))
            said = bool(step.exact[row, node])
            wanted = 1 - none >= threshold
            if abs(1 - none - threshold) > NEAR:
                answers[wanted] += 1
                assert found[row][node] == (wanted or said), (row, node)
            seen += 1
    assert answers.total() > 0.9 * seen
    assert min(answers[True], answers[False]) > 0


def test_flip_probability_sees_the_repetition_penalty() -> None:
    # The model's own favourite is so penalised that no head can say it.
    size = 64
    weight = torch.tensor([6.0, 5.0])[:, None].expand(-1, size) / size
    scene = Scene(
        DraftTree.chain(torch.tensor([[0, 0]])), torch.ones(1, 2, size), linear_head(weight)
    )
    raw = TargetOutput(scene.logits, scene.hidden, scene.hidden)
    logits = torch.tensor([0.6, 5.0]).expand(1, 2, 2)
    before = torch.zeros(1, 2, 1, dtype=torch.int64)
    for name in ("naive", "flip_probability"):
        rule, sampler = made(name, K=5, p_drop=0.1), Sampler(repetition_penalty=10.0)
        step = scene.step(rule, sampler, logits=logits, before=before, output=raw)
        assert step.choice.tolist() == [[1, 1]]
        assert not rule.accept(step)[0, 1], name


def test_flip_probability_draws_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Tensor:
        raise AssertionError("a mask was drawn")

    rule = made("flip_probability", p_drop=0.3)
    step = SCENES[0].step(rule)
    monkeypatch.setattr(step_heads, "mask_uniforms", fail)
    assert rule.accept(step).any()
