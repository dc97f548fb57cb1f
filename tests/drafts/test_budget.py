"""Trees of a size that pays: what is chosen, what is learnt, and that answers stay the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rig
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_dropmatch import step_costs as costs_module
from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.drafts.base import DraftPrompt, Observation, TreeShape
from eagle_dropmatch.drafts.budget import Calibration, TreeBudget
from eagle_dropmatch.drafts.eagle3_drafter import Eagle3Drafter
from eagle_dropmatch.step_costs import CostTable, StepCosts, batches_up_to, step_costs
from eagle_dropmatch.tree import DraftTree

STEPS = StepCosts((1, 4, 8, 32), (10.0, 11.0, 12.0, 24.0), level=1.0, start=2.0)
COSTS = CostTable({(1, 256): STEPS})


def scores_of(*chances: float) -> Tensor:
    return torch.tensor([chances]).log()


def test_costs_are_linear_between_what_was_timed_and_never_fall() -> None:
    assert STEPS.seconds(9) == pytest.approx(
        [10, 10 + 1 / 3, 10 + 2 / 3, 11, 11.25, 11.5, 11.75, 12, 12.5]
    )
    assert STEPS.seconds(40)[-1] == pytest.approx(24 + 8 * 0.5)
    noisy = StepCosts((1, 2, 4), (5.0, 4.0, 4.5), 1.0, 1.0)
    assert noisy.seconds(4) == pytest.approx([5, 5, 5, 5])


def test_a_calibration_begins_with_the_drafts_word_and_learns_the_truth() -> None:
    calibration = Calibration()
    scores = torch.log(torch.linspace(0.01, 0.99, 50))
    before = calibration.chance(scores)
    assert float((before - scores.exp()).abs().max()) < 0.12
    rng = np.random.default_rng(0)
    for _ in range(400):
        drawn = torch.tensor(rng.uniform(-3, 0, 20), dtype=torch.float32)
        # The draft is twice as sure as it is right.
        right = torch.tensor(rng.random(20)) < 0.5 * drawn.exp()
        calibration.learn(drawn, right)
    after = calibration.chance(torch.tensor([-2.3, -1.2, -0.5, -0.05]))
    wanted = 0.5 * torch.tensor([-2.3, -1.2, -0.5, -0.05]).exp()
    torch.testing.assert_close(after, wanted, atol=0.06, rtol=0)


@given(st.lists(st.floats(-8, 0), min_size=2, max_size=30), st.integers(0, 1000))
def test_a_likelier_node_is_never_less_likely_to_be_right(values: list[float], seed: int) -> None:
    calibration = Calibration()
    rng = np.random.default_rng(seed)
    calibration.learn(
        torch.tensor(rng.uniform(-7, 0, 60), dtype=torch.float32),
        torch.tensor(rng.random(60) < 0.5),
    )
    chances = calibration.chance(torch.tensor(sorted(values)))
    assert (chances.diff() >= 0).all()
    assert ((chances >= 0) & (chances <= 1)).all()
    assert calibration.chance(torch.tensor([-torch.inf])).tolist() == [0.0]


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.001, 1), min_size=1, max_size=20),
    st.lists(st.floats(0.1, 5), min_size=3, max_size=3),
    st.integers(1, 4),
)
def test_the_chosen_tree_commits_most_tokens_a_second(
    chances: list[float], slopes: list[float], levels: int
) -> None:
    times = np.cumsum([10.0, *slopes])
    costs = StepCosts((1, 4, 8, 32), tuple(times), level=1.0, start=2.0)
    budget = TreeBudget(CostTable({(1, 256): costs}), most_nodes=16)
    scores = scores_of(*sorted(chances, reverse=True))
    count = budget.choose(scores, levels)
    expected = budget.calibration.chance(scores)[0].tolist()

    def rate(nodes: int) -> float:
        return (1 + sum(expected[: nodes - 1])) / (2 + levels + costs.seconds(16)[nodes - 1])

    most = min(16, len(chances) + 1)
    assert 1 <= count <= most
    assert rate(count) == pytest.approx(max(map(rate, range(1, most + 1))), rel=1e-6)


def test_a_sure_beam_is_followed_and_a_hopeless_one_is_not() -> None:
    budget = TreeBudget(COSTS)
    assert budget.deepen(1, scores_of(0.95, 0.02))
    assert not budget.deepen(1, scores_of(0.02, 0.01))
    dear = TreeBudget(CostTable({(1, 256): replace(STEPS, level=50.0)}))
    assert not dear.deepen(1, scores_of(0.95, 0.02))


def step(budget: TreeBudget, right: bool) -> None:
    """A step with one sure node, accepted or not."""
    scores = scores_of(0.9)
    budget.choose(scores, 1)
    tree = torch.tensor([[0.0, float(scores)]])
    budget.learn(
        tree,
        torch.tensor([[False, True]]),
        torch.tensor([[True, right]]),
        [2 if right else 1],
    )


def test_drafts_that_do_not_pay_rest_longer_each_time_and_are_tried_again() -> None:
    budget, rests = TreeBudget(COSTS), []
    for _ in range(5):
        while not budget.resting:
            step(budget, right=False)
        length = 0
        while budget.resting:
            budget.rested()
            length += 1
        rests.append(length)
    assert rests == [8, 16, 32, 64, 64]
    for _ in range(30):
        step(budget, right=True)
        assert not budget.resting
    while not budget.resting:
        step(budget, right=False)
    assert budget._resting == 8


def test_rows_that_have_ended_teach_nothing() -> None:
    budget = TreeBudget(COSTS)
    scores = torch.tensor([[0.0, -0.1], [0.0, -0.1]])
    budget.choose(scores[:, 1:], 1)
    before = budget.calibration._seen.clone()
    budget.learn(scores, scores < 0, torch.zeros(2, 2, dtype=torch.bool), [0, 0])
    assert torch.equal(budget.calibration._seen, before)
    budget.learn(scores, scores < 0, torch.ones(2, 2, dtype=torch.bool), [2, 0])
    assert float(budget.calibration._seen.sum()) == pytest.approx(0.995 * float(before.sum()) + 1)


class Whims(TreeBudget):
    """Rests, deepens and chooses by a list, whatever pays."""

    def __init__(self, seed: int) -> None:
        super().__init__(COSTS)
        self.rng = np.random.default_rng(seed)

    def deepen(self, level: int, beam: Tensor) -> bool:
        return bool(self.rng.random() < 0.7)

    def choose(self, scores: Tensor, levels: int) -> int:
        super().choose(scores, levels)
        return int(self.rng.integers(1, scores.shape[1] + 2))

    def learn(self, *seen: Any) -> None:
        super().learn(*seen)
        self._resting = int(self.rng.integers(0, 4))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lengths", [(7,), (7, 3, 12)])
def test_whatever_is_chosen_exact_answers_are_the_targets_own(
    lengths: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = rig.tiny_target()
    prompts = rig.prompts(*lengths)
    decoder = rig.decoder(
        target, rig.eagle3(rig.tiny_draft(target)), (24, 4, 4), make_acceptor("exact")
    )
    decoder.adaptive = True
    monkeypatch.setattr(decoder, "_budget", lambda *_: Whims(seed))
    tokens, mask = rig.padded(prompts)
    answer = rig.greedy(target.model, prompts[0], 40)
    stop = max(answer, key=answer.index)  # the token that comes up last
    out = decoder.generate(
        tokens, mask, max_new_tokens=40, eos_token_id=stop, return_dict_in_generate=True
    )
    for row, prompt in enumerate(prompts):
        wanted = rig.greedy(target.model, prompt, 40)
        wanted = wanted[: wanted.index(stop) + 1] if stop in wanted else wanted
        assert out.sequences[row, tokens.shape[1] :].tolist()[: len(wanted)] == wanted
    nodes = [count for row in out.stats.rows for count in row.draft_nodes]
    assert 0 in nodes
    assert max(nodes) > 4
    assert out.stats.tau > 1


class Resting(TreeBudget):
    """Rests for some steps after every draft."""

    def __init__(self, steps: int) -> None:
        super().__init__(COSTS)
        self.steps = steps

    def deepen(self, level: int, beam: Tensor) -> bool:
        return True

    def choose(self, scores: Tensor, levels: int) -> int:
        return scores.shape[1] + 1

    def learn(self, *seen: Any) -> None:
        self._resting = self.steps


@pytest.mark.parametrize("steps", [1, 3])
@torch.inference_mode()
def test_after_a_rest_the_draft_has_read_all_that_was_committed(steps: int) -> None:
    target = rig.tiny_target()
    draft = rig.tiny_draft(target)
    prompts = rig.prompts(6, 9)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 40, draft.config.feature_size, generator=generator)
    tokens = torch.randint(rig.VOCAB, (2, 40), generator=generator)

    def drafter(budget: TreeBudget | None) -> Eagle3Drafter:
        made = Eagle3Drafter(draft, TreeShape(12, 2, 3))
        made.budget = budget
        padded = rig.padded(prompts, "right")[0]
        made.start(DraftPrompt(padded, [6, 9], features[:, :9], tokens[:, 0]))
        return made

    diligent, lazy = drafter(None), drafter(Resting(steps))
    widths = []
    for turn in range(2 * steps + 3):
        trees = [each.propose() for each in (diligent, lazy)]
        widths.append(trees[1].num_nodes)
        if widths[-1] > 1:
            for name in ("tokens", "parents", "scores"):
                torch.testing.assert_close(*(getattr(tree, name) for tree in trees))
        # Both are told the same; a resting drafter commits the root alone.
        count = 2 if widths[-1] > 1 else 1
        at = slice(3 * turn, 3 * turn + count)
        path = torch.arange(count).expand(2, -1)
        seen = Observation(
            path, [count, count], tokens[:, at], tokens[:, 3 * turn + 2], features[:, at]
        )
        for each in (diligent, lazy):
            each.observe(seen)
    assert widths == ([12] + steps * [1]) * 2 + [12]


def test_growth_under_a_policy_is_growth_to_what_it_chose() -> None:
    target = rig.tiny_target()
    draft = rig.tiny_draft(target)
    prompt = torch.tensor(rig.prompts(8))
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 8, draft.config.feature_size, generator=generator)

    class Until(TreeBudget):
        def __init__(self, level: int, nodes: int) -> None:
            super().__init__(COSTS)
            self.level, self.nodes = level, nodes

        def deepen(self, level: int, beam: Tensor) -> bool:
            return level <= self.level

        def choose(self, scores: Tensor, levels: int) -> int:
            assert levels == self.level + 1
            return self.nodes

    def tree(shape: TreeShape, budget: TreeBudget | None) -> DraftTree:
        made = Eagle3Drafter(draft, shape)
        made.budget = budget
        with torch.inference_mode():
            made.start(DraftPrompt(prompt, [8], features, torch.tensor([5])))
            return made.propose()

    for depth in range(4):
        for nodes in (1, 2, 9, 30):
            grown = tree(TreeShape(40, 6, 3), Until(depth, nodes))
            wanted = tree(TreeShape(nodes, depth, 3), None)
            for name in ("tokens", "parents", "depths", "scores", "valid"):
                assert torch.equal(getattr(grown, name), getattr(wanted, name)), name
            assert grown.levels == wanted.levels


def test_a_lossy_rules_budget_begins_afresh_and_an_exact_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = rig.tiny_target()
    decoder = rig.decoder(target, rig.eagle3(rig.tiny_draft(target)), (24, 4, 4))
    monkeypatch.setattr("eagle_dropmatch.decoder.step_costs", lambda *_, say: {256: STEPS})
    exact, naive = make_acceptor("exact"), make_acceptor("naive", p_drop=0.3)
    assert decoder._budget(1, exact) is decoder._budget(1, exact)
    assert decoder._budget(2, exact) is not decoder._budget(1, exact)
    assert decoder._budget(1, naive) is not decoder._budget(1, naive)
    small, decoder.tree = decoder._budget(1, exact), TreeShape(50, 4, 4)
    assert (small.most_nodes, decoder._budget(1, exact).most_nodes) == (24, 50)
    decoder.adaptive, decoder.acceptor = True, naive
    answers = [
        decoder.generate(rig.ids(rig.prompts(7)[0]), max_new_tokens=30).tolist() for _ in range(2)
    ]
    assert answers[0] == answers[1]


def test_costs_are_timed_once_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_DROPMATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(costs_module, "_TIMES", 1)
    target = rig.tiny_target()
    drafter = rig.eagle3(rig.tiny_draft(target))
    said: list[str] = []
    first = step_costs(target, drafter, 4, 1, say=said.append)
    assert len(first) == 2
    for each in first.values():
        assert each.nodes[0] == 1
        assert min(each.verify) > 0
        assert each.level > 0
        assert each.start > 0
    assert step_costs(target, drafter, 4, 1, say=said.append) == first
    assert len(said) == 1
    (path,) = (tmp_path / "step-costs").iterdir()
    assert str(path) in said[0]
    assert json.loads(path.read_text())["about"]["batch"] == 1
    step_costs(target, drafter, 4, 2, say=said.append)
    assert len(said) == 2
    path.write_text("{")
    step_costs(target, drafter, 4, 1, say=said.append)
    assert len(said) == 3


def steps(one: float, slope: float, level: float = 1.0) -> StepCosts:
    return StepCosts((1, 3), (one, one + 2 * slope), level, start=2.0)


def test_prices_are_linear_in_rows_and_context_and_go_on_with_the_context() -> None:
    table = CostTable(
        {
            (1, 256): steps(10, 1),
            (1, 1280): steps(14, 1, level=3.0),
            (4, 256): steps(16, 4),
            (4, 1280): steps(40, 4, level=3.0),
        }
    )
    assert table.at(1, 256, 3).verify.tolist() == pytest.approx([10, 11, 12])
    assert table.at(1, 0, 3).verify.tolist() == pytest.approx([10, 11, 12])
    assert table.at(2, 256, 3).verify.tolist() == pytest.approx([12, 14, 16])
    assert table.at(9, 256, 3).verify.tolist() == pytest.approx([16, 20, 24])
    middle = table.at(4, 768, 3)
    assert middle.verify.tolist() == pytest.approx([28, 32, 36])
    assert (middle.level, middle.start) == pytest.approx((2.0, 2.0))
    assert table.at(1, 2304, 3).verify.tolist() == pytest.approx([18, 19, 20])
    # Contexts of one grain share their prices.
    assert table.at(1, 300, 3) is table.at(1, 383, 3)


def test_batches_are_timed_at_powers_of_two() -> None:
    assert batches_up_to(1) == [1]
    assert batches_up_to(2) == [1, 2]
    assert batches_up_to(5) == [1, 2, 4, 8]
    assert batches_up_to(16) == [1, 2, 4, 8, 16]


def test_a_full_batch_or_a_long_context_makes_trees_smaller() -> None:
    table = CostTable(
        {
            (1, 256): steps(10, 0.2, level=0.1),
            (1, 1280): steps(12, 2, level=0.1),
            (8, 256): steps(12, 3, level=0.1),
            (8, 1280): steps(30, 9, level=0.1),
        }
    )
    scores = scores_of(0.6, 0.5, 0.3, 0.2, 0.1, 0.05)
    chosen = {}
    for rows, context in ((1, 256), (1, 1280), (8, 256), (8, 1280)):
        budget = TreeBudget(table, 16)
        budget.begin(rows, context)
        chosen[rows, context] = budget.choose(scores, 1)
    assert chosen[1, 256] > chosen[1, 1280] >= chosen[8, 1280]
    assert chosen[1, 256] > chosen[8, 256] >= chosen[8, 1280]
