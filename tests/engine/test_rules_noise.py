"""The rules that throw dice: what the heads let in, number by number, and the coins' shares."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest
import torch
from rule_scenes import Scene, linear_head, random_scene
from scipy import stats

from eagle_dropmatch.acceptors import StepContext, dropmatch, make_acceptor
from eagle_dropmatch.acceptors.dropmatch import DropoutRule
from eagle_dropmatch.acceptors.heads import mask_uniforms
from eagle_dropmatch.acceptors.step_heads import Heads
from eagle_dropmatch.sampling import Sampler
from eagle_dropmatch.target import TargetOutput
from eagle_dropmatch.tree import DraftTree

NEAR = 1e-5
GREEDY, COOL, FEW = Sampler(), Sampler(0.7), Sampler(1.2, top_k=4)
SCENES = [random_scene(3, 12, vocab=9, seed=seed, sharp=0.3) for seed in range(8)]
NORMAL = NormalDist()
#: Options of the heads, each in another way.
HEADS: list[dict[str, Any]] = [
    {"K": 5, "p_drop": 0.3},
    {"K": 4, "p_drop": 0.5, "mask": "step", "seed": 3},
    {"K": 3, "p_drop": [0.0, 0.2, 0.6]},
    {"K": 4, "p_drop": 0.5, "noise": "gaussian", "seed": 1},
    {"K": 2, "p_drop": 0.6, "adapt": "entropy"},
    {"K": 5, "p_drop": 0.6, "adapt": "margin"},
    {"K": 1, "p_drop": 0.4},
]
every_heads = pytest.mark.parametrize("options", HEADS, ids=range(len(HEADS)))


def made(name: str, **options: Any) -> DropoutRule:
    rule = make_acceptor(name, **options)
    assert isinstance(rule, DropoutRule)
    return rule


def probs(z: list[float], sampler: Sampler) -> list[float]:
    """Softmax after temperature and top-k, over the whole vocabulary."""
    least = sorted(z)[-sampler.top_k] if 0 < sampler.top_k < len(z) else -math.inf
    kept = [
        math.exp((value - max(z)) / (sampler.temperature or 1.0)) if value >= least else 0.0
        for value in z
    ]
    return [value / sum(kept) for value in kept]


def entropy_of(p: list[float]) -> float:
    return -sum(value * math.log(value) for value in p if value > 0)


def js(p: list[float], q: list[float]) -> float:
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return entropy_of(middle) - (entropy_of(p) + entropy_of(q)) / 2


def noisy_heads(
    scene: Scene, rule: DropoutRule, step: StepContext, row: int, node: int
) -> list[list[float]]:
    """The logits of every head at a node, number by number."""
    count = scene.tree.num_nodes if rule.mask == "node" else 1
    shape = (count, rule.K, scene.hidden.shape[-1])
    key, number, cpu = step.row_keys[row], step.steps[row], torch.device("cpu")
    draws = mask_uniforms([key], rule.seed, [number], shape, cpu)
    p = sorted(probs(step.logits[row, node].tolist(), step.sampler), reverse=True)
    shrink = {"none": 1.0, "entropy": 1 - entropy_of(p) / math.log(len(p)), "margin": p[0] - p[1]}
    given = rule.p_drop if isinstance(rule.p_drop, list) else [rule.p_drop] * rule.K
    hidden, weight = scene.hidden[row, node].tolist(), scene.head.weight.tolist()
    out = []
    for head in range(rule.K):
        rate = float(given[head]) * shrink[rule.adapt]
        factors = []
        for u in draws[0, node if rule.mask == "node" else 0, head].tolist():
            if rule.noise == "dropout":
                factors.append(1 / (1 - rate) if u >= rate else 0.0)
            else:
                factors.append(1 + math.sqrt(rate / (1 - rate)) * NORMAL.inv_cdf(u + 2.0**-25))
        noisy = [h * factor for h, factor in zip(hidden, factors, strict=True)]
        out.append([sum(w * h for w, h in zip(line, noisy, strict=True)) for line in weight])
    return out


def winner(choices: list[int], clean: list[float]) -> int:
    votes = Counter(choices)
    return max(votes, key=lambda token: (votes[token], clean[token], -token))


def inside(step: StepContext, logits: list[list[float]], row: int, node: int) -> tuple[bool, float]:
    """JS(q, c) <= max over i of JS(p_i, c), and by how much."""
    assert step.tree.draft_logits is not None
    draft = step.tree.draft_logits[row, node].tolist()
    q = [*probs(draft, replace(step.sampler, top_k=0)), 0.0, 0.0]  # it lacks the last two tokens
    mean = [sum(values) / len(logits) for values in zip(*logits, strict=True)]
    centre = probs(mean, step.sampler)
    radius = max(js(probs(each, step.sampler), centre) for each in logits)
    return js(q, centre) <= radius, abs(js(q, centre) - radius)


def star(rows: int, z: list[float], children: list[int]) -> Scene:
    """Roots with the same logits and the same children, under as many row keys."""
    tokens = torch.tensor([[0, *children]]).expand(rows, -1)
    tree = DraftTree.from_parents(tokens, torch.tensor([[-1] + [0] * len(children)] * rows))
    hidden = torch.ones(rows, len(children) + 1, 1)
    return Scene(tree, hidden, linear_head(torch.tensor(z)[:, None]), keys=tuple(range(rows)))


@every_heads
@pytest.mark.parametrize("sampler", [GREEDY, COOL, FEW], ids=["greedy", "cool", "few"])
@pytest.mark.parametrize("name", ["majority", "js", "dropmatch"])
def test_a_rule_of_heads_accepts_what_its_definition_says(
    name: str, sampler: Sampler, options: dict[str, Any]
) -> None:
    rule = made(name, **options)
    seen, answers = 0, Counter[bool]()
    for scene in SCENES[: 8 if sampler.greedy else 4]:
        step = scene.step(rule, sampler)
        found, heads = rule.accept(step).tolist(), Heads(rule, step)
        spots = list(zip(heads.parents.row.tolist(), heads.parents.node.tolist(), strict=True))
        for slot, (row, parent) in enumerate(spots):
            logits = noisy_heads(scene, rule, step, row, parent)
            choices = heads.choices[slot].tolist()
            near = 1.0
            if sampler.greedy:
                choices = [max(range(9), key=each.__getitem__) for each in logits]
                tops = [sorted(each)[-2:] for each in logits]
                near = min(high - low for low, high in tops)
            most = winner(choices, step.logits[row, parent].tolist())
            holds, distance = inside(step, logits, row, parent)
            if name == "majority":
                holds, distance = False, 1.0
            for node in range(1, 12):
                if int(scene.tree.parents[row, node]) != parent:
                    continue
                seen += 1
                voted = name != "js" and int(scene.tree.tokens[row, node]) == most
                if min(near, distance) > NEAR:
                    answers[found[row][node]] += 1
                    assert found[row][node] == (holds or voted), (row, node)
    assert answers.total() > 0.9 * seen
    assert answers[False] > 0
    assert (answers[True] > 0) == (name != "js" or rule.K > 1)


def test_majority_ties_go_to_the_higher_clean_logit_and_then_to_the_lower_id() -> None:
    clean = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0]])
    for choices, wanted in (
        ([2, 4, 0], 4),  # one vote each
        ([2, 2, 4, 4, 1], 4),  # 1 has the highest logit but fewer votes
        ([0, 0, 1], 0),
        ([3, 1, 3, 1, 4], 1),
        ([3], 3),
    ):
        assert dropmatch.majority(torch.tensor([choices]), clean).tolist() == [wanted]


def test_each_head_has_its_own_rate_and_one_of_zero_says_what_the_target_says() -> None:
    for sampler in (GREEDY, COOL):
        rule = made("naive", K=3, p_drop=(0.0, 0.2, 0.7))
        step = SCENES[0].step(rule, sampler)
        heads = Heads(rule, step)
        assert (heads.rates == torch.tensor([0.0, 0.2, 0.7])).all()
        clean = step.choice[heads.parents.row, heads.parents.node]
        assert torch.equal(heads.choices[:, 0], clean)
        agreed = (heads.choices == clean[:, None]).float().mean(0)
        assert agreed[0] > agreed[2]


@pytest.mark.parametrize("sampler", [GREEDY, COOL, FEW, Sampler(1.0, top_k=1)])
@pytest.mark.parametrize("adapt", ["entropy", "margin"])
def test_rates_shrink_with_what_the_target_knows(adapt: str, sampler: Sampler) -> None:
    rule = made("naive", K=2, p_drop=[0.2, 0.5], adapt=adapt)
    step = SCENES[1].step(rule, sampler)
    heads = Heads(rule, step)
    for slot, (row, node) in enumerate(zip(heads.parents.row, heads.parents.node, strict=True)):
        p = sorted(probs(step.logits[row, node].tolist(), sampler))
        factor = p[-1] - p[-2] if adapt == "margin" else 1 - entropy_of(p) / math.log(len(p))
        wanted = [0.2 * factor, 0.5 * factor]
        assert heads.rates[slot].tolist() == pytest.approx(wanted, abs=1e-6)


def within(share: float, chance: float, count: int, among: int = 1) -> bool:
    """Whether a share is what chance gives; of ``among`` checks one fails once in 10,000."""
    bound = float(stats.norm.isf(1e-4 / 2 / among))
    return abs(share - chance) <= bound * math.sqrt(chance * (1 - chance) / count) + 1e-9


@pytest.mark.parametrize("sampler", [COOL, FEW], ids=["cool", "few"])
def test_at_a_temperature_every_head_of_every_node_draws_its_own_token(sampler: Sampler) -> None:
    rows, clean = 3000, [0.0, 0.4, -0.5, 1.0, 0.2, -1.0]
    scene = star(rows, clean, [1, 2])
    scene = replace(scene, tree=DraftTree.chain(scene.tree.tokens))
    rule = made("naive", K=2, p_drop=1e-9)  # next to no dropout: all heads have one distribution
    choices = Heads(rule, scene.step(rule, sampler)).choices.view(rows, 2, 2)
    p = probs(clean, sampler)
    for token, chance in enumerate(p):
        assert within(float((choices == token).double().mean()), chance, 4 * rows, len(p))
    same_node, same_head = choices[..., 0] == choices[..., 1], choices[:, 0] == choices[:, 1]
    for alike in (same_node, same_head):
        assert within(float(alike.double().mean()), sum(x * x for x in p), 2 * rows, 2)


def test_a_head_draws_from_its_own_disturbed_distribution() -> None:
    rows, clean = 4000, [0.0, 0.4, -0.5, 1.0, 0.2, -1.0]
    rule = made("naive", K=2, p_drop=0.4)
    choices = Heads(rule, star(rows, clean, [1, 2]).step(rule, COOL)).choices
    # One dimension: a head keeps all of it, scaled, or nothing, and then all tokens are alike.
    kept = probs([z / 0.6 for z in clean], COOL)
    for token, chance in enumerate(kept):
        share = float((choices == token).double().mean())
        assert within(share, 0.4 / 6 + 0.6 * chance, 2 * rows, 6)


PENALTY = 2.5


def penalise(z: list[float], said: list[int]) -> list[float]:
    return [
        (value / PENALTY if value > 0 else value * PENALTY) if token in said else value
        for token, value in enumerate(z)
    ]


@pytest.mark.parametrize("name", ["naive", "majority"])
def test_a_repetition_penalty_falls_on_every_head(name: str) -> None:
    rule, sampler = made(name, K=4, p_drop=0.4), Sampler(repetition_penalty=PENALTY)
    changed = 0
    for scene in SCENES:
        batch, nodes = scene.tree.tokens.shape
        generator = torch.Generator().manual_seed(7)
        before = torch.randint(9, (batch, nodes, 3), generator=generator)
        clean = [
            [penalise(z, said) for z, said in zip(row, texts, strict=True)]
            for row, texts in zip(scene.logits.tolist(), before.tolist(), strict=True)
        ]
        raw = TargetOutput(scene.logits, scene.hidden, scene.hidden)
        logits = torch.tensor(clean)
        step = scene.step(rule, sampler, logits=logits, before=before, output=raw)
        found = rule.accept(step)
        changed += int((found != rule.accept(scene.step(rule)))[:, 1:].sum())
        for row, node in (scene.tree.parents >= 0).nonzero().tolist():
            parent = int(scene.tree.parents[row, node])
            heads = [
                penalise(z, before[row, parent].tolist())
                for z in noisy_heads(scene, rule, step, row, parent)
            ]
            choices = [max(range(9), key=z.__getitem__) for z in heads]
            kept = set(choices) if name == "naive" else {winner(choices, clean[row][parent])}
            assert bool(found[row, node]) == (int(scene.tree.tokens[row, node]) in kept)
    assert changed > 0


P = [0.05, 0.25, 0.15, 0.35, 0.08, 0.12]
CHILDREN = [1, 0, 3, 4]
coin_samplers = pytest.mark.parametrize("sampler", [Sampler(1.0), COOL, Sampler(1.4, top_k=5)])


@coin_samplers
@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("lenience", [0.3, 0.6])
def test_sampled_lenience_keeps_x_with_probability_p_over_lenience(
    lenience: float, seed: int, sampler: Sampler
) -> None:
    rows, z = 6000, [math.log(p) for p in P]
    rule = make_acceptor("lenience", lenience=lenience, seed=seed)
    shares = rule.accept(star(rows, z, CHILDREN).step(rule, sampler)).double().mean(0)[1:]
    p = probs(z, sampler)
    for x, share in zip(CHILDREN, shares.tolist(), strict=True):
        assert within(share, min(1.0, p[x] / lenience), rows, len(CHILDREN))


@coin_samplers
@pytest.mark.parametrize("accumulated", [0.5, 0.9])
def test_sampled_thresholds_keep_x_as_often_as_the_sample_or_the_coin_says(
    accumulated: float, sampler: Sampler
) -> None:
    rows, z = 6000, [math.log(p) for p in P]
    rule = make_acceptor("thresholds", single=0.4, accumulated=accumulated, seed=2)
    shares = rule.accept(star(rows, z, CHILDREN).step(rule, sampler)).double().mean(0)[1:]
    p = probs(z, sampler)
    outside = 1 - sum(p[x] for x in CHILDREN)
    so_far = taken = 0.0
    for x, share in zip(CHILDREN, shares.tolist(), strict=True):
        before, so_far = so_far, so_far + p[x]
        walk = min(1.0, so_far / accumulated) - min(1.0, before / accumulated)
        room = min(max(walk - p[x], 0.0), outside - taken)
        taken += room
        wanted = 1.0 if p[x] >= 0.4 else p[x] + room
        assert within(share, wanted, rows, len(CHILDREN))
