"""Every rule against its published definition, in plain Python over rows and nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rule_scenes import Scene, linear_head, random_scene

from eagle_dropmatch.acceptors import ACCEPTORS, PARTS, StepContext, make_acceptor
from eagle_dropmatch.acceptors.heads import mask_uniforms
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.sampling import Sampler
from eagle_dropmatch.tree import DraftTree

#: Nodes this near to a threshold, as a share, are left out: float32 may fall on either side.
NEAR = 1e-5
Answer = tuple[bool, float]  # is the node accepted, and how far is it from the threshold?

SAMPLERS = {
    "greedy": Sampler(),
    "hot": Sampler(1.5),
    "settings": Sampler(0.8, top_k=5, top_p=0.9, min_p=0.02),
}
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=list(SAMPLERS))


def with_levels(scene: Scene) -> Scene:
    return replace(scene, tree=replace(scene.tree, levels=int(scene.tree.depths.max())))


def chain_scene(seed: int, nodes: int = 15, size: int = 24, vocab: int = 4) -> Scene:
    """Chains of few tokens, so that there are long runs of the target's own choices."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (3, nodes), generator=generator)
    hidden = torch.randn(3, nodes, size, generator=generator)
    weight = 0.3 * torch.randn(vocab, size, generator=generator)
    argmax = (hidden @ weight.T).argmax(-1)
    follow = torch.rand(3, nodes, generator=generator) < 0.5
    tokens[:, 1:] = torch.where(follow[:, 1:], argmax[:, :-1], tokens[:, 1:])
    scores = -torch.rand(3, nodes, generator=generator).cumsum(1)
    valid = torch.arange(nodes) < torch.tensor([[nodes], [nodes], [nodes - 4]])
    tree = DraftTree.chain(tokens, scores - scores[:, :1], valid)
    draft = torch.randn(3, nodes, vocab - 1, generator=generator)
    tree = replace(tree, draft_logits=draft)
    return Scene(tree, hidden, linear_head(weight), torch.arange(vocab - 1))


SCENES = [
    *(with_levels(random_scene(3, 14, vocab=9, seed=seed, sharp=0.3)) for seed in range(6)),
    *(with_levels(random_scene(3, 14, vocab=4, seed=seed, sharp=0.2)) for seed in range(6)),
    *(chain_scene(seed) for seed in range(4)),
]


def softmax(values: list[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / sum(weights) for weight in weights]


def target_probs(z: list[float], sampler: Sampler) -> list[float]:
    """Temperature, then the k likeliest, then the nucleus, then min-p, each renormalised."""
    if sampler.greedy:
        return softmax(z)
    p = softmax([value / sampler.temperature for value in z])
    order = sorted(range(len(p)), key=lambda token: -p[token])

    def only(kept: list[int]) -> list[float]:
        total = sum(p[token] for token in kept)
        return [p[token] / total if token in kept else 0.0 for token in range(len(p))]

    if sampler.top_k:
        p = only(order[: sampler.top_k])
    nucleus = [t for at, t in enumerate(order) if sum(p[o] for o in order[:at]) < sampler.top_p]
    p = only(nucleus)
    return only([token for token in order if p[token] >= sampler.min_p * max(p)])


def entropy_of(p: list[float]) -> float:
    return -sum(value * math.log(value) for value in p if value > 0)


def apart(value: float, bound: float) -> float:
    """How far a number is from its threshold, as a share of the larger."""
    most = max(abs(value), abs(bound))
    return abs(value - bound) / most if 0 < most < math.inf else math.inf


class Row:
    """One tree of a step, in lists of numbers."""

    def __init__(self, step: StepContext, row: int) -> None:
        tree, self.sampler = step.tree, step.sampler
        assert tree.draft_logits is not None
        assert step.draft_ids is not None
        self.key, self.step, self.levels = step.row_keys[row], step.steps[row], tree.max_depth
        self.tokens: list[int] = tree.tokens[row].tolist()
        self.parents: list[int] = tree.parents[row].tolist()
        self.depths: list[int] = tree.depths[row].tolist()
        self.scores: list[float] = tree.scores[row].tolist()
        self.said: list[bool] = step.exact[row].tolist()
        self.drafted = [node for node in range(1, len(self.tokens)) if self.parents[node] >= 0]
        self.z: list[list[float]] = step.logits[row].tolist()
        self.p = [target_probs(z, step.sampler) for z in self.z]
        self.q = []
        for logits in tree.draft_logits[row].tolist():
            q = softmax([value / (step.sampler.temperature or 1.0) for value in logits])
            placed = dict(zip(step.draft_ids.tolist(), q, strict=True))
            self.q.append([placed.get(token, 0.0) for token in range(len(self.z[0]))])
        self.known = set(step.draft_ids.tolist())

    def at(self, node: int) -> tuple[int, list[float]]:
        """The token, and the target's distribution over what may stand there."""
        return self.tokens[node], self.p[self.parents[node]]

    def up(self, node: int) -> list[int]:
        """The node and its drafted ancestors, the node first."""
        path = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return path

    def siblings(self, node: int) -> list[int]:
        return [other for other in self.drafted if self.parents[other] == self.parents[node]]

    def coins(self, seed: int, rule: str) -> list[float]:
        shape, cpu = (len(self.tokens),), torch.device("cpu")
        return mask_uniforms([self.key], seed, [self.step], shape, cpu, rule)[0].tolist()

    def rank(self, node: int) -> tuple[float, float]:
        """How many tokens are likelier, and how near the nearest is; no token ranks at p = 0."""
        x, p = self.at(node)
        if p[x] == 0:
            return math.inf, math.inf
        others = p[:x] + p[x + 1 :]
        return sum(o > p[x] for o in others), min(apart(o, p[x]) for o in others)


def lenience(row: Row, node: int, lenience: float = 0.3, seed: int = 0) -> Answer:
    x, p = row.at(node)
    if row.sampler.greedy:
        return p[x] > lenience * max(p), apart(p[x], lenience * max(p))
    # What is left of p / l once the target's own sample has had its p.
    rest = (min(1.0, p[x] / lenience) - p[x]) / (1 - p[x]) if p[x] < 1 else 0.0
    coin = row.coins(seed, "lenience")[node]
    return coin < rest, apart(coin, rest)


def typical(row: Row, node: int, eps: float = 0.09, delta: float = 0.3) -> Answer:
    x, p = row.at(node)
    bound = min(eps, delta * math.exp(-entropy_of(p)))
    return p[x] > bound, apart(p[x], bound)


def min_p(row: Row, node: int, alpha: float = 0.7) -> Answer:
    return margin(row, node, 1 - alpha)


def margin(row: Row, node: int, kappa: float = 0.3) -> Answer:
    x, p = row.at(node)
    return p[x] >= kappa * max(p), apart(p[x], kappa * max(p))


def mars(row: Row, node: int, theta: float = 0.9, variant: str = "paper") -> Answer:
    if variant == "released":
        if row.sampler.greedy:
            return False, math.inf
        ranks = {other: row.rank(other) for other in row.siblings(node)}
        first = next((other for other in ranks if ranks[other][0] < 2), None)
        return node == first, min(near for _, near in ranks.values())
    rank, near = row.rank(node)
    first, second = sorted(row.z[row.parents[node]], reverse=True)[:2]
    close = first > 0 and second / first > theta
    can_be_said = row.at(node)[1][row.tokens[node]] > 0
    return rank <= 1 and can_be_said and close, min(near, apart(second, theta * first))


def top_k(row: Row, node: int, k: int = 2) -> Answer:
    rank, near = row.rank(node)
    return rank < k and k > 1, near


def relaxed_top_n(row: Row, node: int, n: int = 10, delta: float = 0.6) -> Answer:
    x, p = row.at(node)
    rank, near = row.rank(node)
    fits = rank < n and n > 1 and p[x] > max(p) - delta
    return fits, min(near, apart(p[x], max(p) - delta))


def thresholds(
    row: Row, node: int, single: float = 0.3, accumulated: float = 1.0, seed: int = 0
) -> Answer:
    x, p = row.at(node)
    alone = single < 1 and p[x] >= single
    near = apart(p[x], single)
    if accumulated == 1:
        return alone, near
    siblings = row.siblings(node)
    shares = [p[row.tokens[other]] for other in siblings]
    sums = [sum(shares[: i + 1]) for i in range(len(shares))]
    place = siblings.index(node)
    if row.sampler.greedy:
        first = next((i for i, so_far in enumerate(sums) if so_far >= accumulated), None)
        near = min(near, *(apart(so_far, accumulated) for so_far in sums))
        return alone or (place == first and p[x] > 0), near
    if any(row.said[other] for other in siblings):
        return alone, near
    reach = [0.0, *(min(1.0, so_far / accumulated) for so_far in sums)]
    beyond = [max(reach[i + 1] - reach[i] - share, 0.0) for i, share in enumerate(shares)]
    edges = [sum(beyond[:i]) / (1 - sum(shares)) for i in range(len(shares) + 1)]
    coin = row.coins(seed, "thresholds")[row.parents[node]]
    near = min(near, *(apart(coin, edge) for edge in edges))
    return alone or edges[place] <= coin < edges[place + 1], near


def fuzzy_js(row: Row, node: int, threshold: float = 0.2) -> Answer:
    _, p = row.at(node)
    q = row.q[row.parents[node]]
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    js = entropy_of(middle) - (entropy_of(p) + entropy_of(q)) / 2
    return js < threshold, apart(js, threshold)


def kl_judge(row: Row, node: int, threshold: float = 0.3, confidence: float = 0.9) -> Answer:
    _, p = row.at(node)
    q = row.q[row.parents[node]]
    kl = sum(p[token] * math.log(p[token] / q[token]) for token in row.known if p[token] > 0)
    outside = sum(p[token] for token in range(len(p)) if token not in row.known)
    kl += outside * math.log(outside / 1e-6) if outside > 0 else 0.0
    close = max(p) <= confidence and kl < threshold
    return close, min(apart(kl, threshold), apart(max(p), confidence))


def entropy_gate(
    row: Row, node: int, theta: float = 0.3, window: int = 6, entropy: str = "full"
) -> Answer:
    def matches_below(above: int) -> int:
        good = [c for c in row.drafted if row.parents[c] == above and row.said[c]]
        return max((1 + matches_below(child) for child in good), default=0)

    _, p = row.at(node)
    full = entropy_of(p) / math.log(len(p))
    unsure = full if entropy == "full" else entropy_of(sorted(p, reverse=True)[:3])
    alone = all(row.said[above] for above in row.up(node)[1 : window + 1])
    return unsure >= theta and matches_below(node) >= window and alone, apart(unsure, theta)


def regret_budget(
    row: Row, node: int, budget: float = 8.0, gap: float = 0.25, mismatches: int = 2
) -> Answer:
    def regret(missed: int) -> float:
        z = row.z[row.parents[missed]]
        return max(z) - z[row.tokens[missed]]

    missed = [each for each in row.up(node) if not row.said[each]]
    spent, own = sum(map(regret, missed)), regret(node)
    allowed = gap * (row.levels - (row.depths[node] - 1))
    fits = spent <= budget and len(missed) <= mismatches and own <= allowed
    return fits, min(apart(spent, budget), apart(own, allowed))


def floor(row: Row, node: int, floor: float = 1e-4) -> Answer:
    x, p = row.at(node)
    return p[x] >= floor, apart(p[x], floor)


def overshoot(row: Row, node: int, cap: float = 10.0) -> Answer:
    x, p = row.at(node)
    q = math.exp(row.scores[node] - row.scores[row.parents[node]])
    return q <= cap * p[x], apart(q, cap * p[x])


GUARDS = (floor, overshoot)  # they veto the target's own choice, too
CASES: dict[Callable[..., Answer], list[dict[str, Any]]] = {
    lenience: [{}, {"lenience": 0.6, "seed": 4}, {"lenience": 0.1}],
    typical: [{}, {"eps": 0.3, "delta": 0.5}, {"eps": 0.2, "delta": 9.0}, {"eps": 1.0}],
    min_p: [{}, {"alpha": 0.2}, {"alpha": 1.0}, {"alpha": -0.5}],
    margin: [{}, {"kappa": 0.7}, {"kappa": 0.0}, {"kappa": 1.5}],
    mars: [{}, {"theta": 0.4}, {"theta": 0.0}, {"variant": "released"}],
    top_k: [{}, {"k": 1}, {"k": 3}, {"k": 50}],
    relaxed_top_n: [{}, {"n": 1}, {"n": 2, "delta": 1.0}, {"n": 3, "delta": 0.2}],
    thresholds: [{}, {"single": 1.0, "accumulated": 0.6}, {"accumulated": 0.9, "seed": 3}],
    fuzzy_js: [{}, {"threshold": 0.1}, {"threshold": 0.05}],
    kl_judge: [{}, {"threshold": 2.0}, {"threshold": 3.0, "confidence": 0.6}],
    entropy_gate: [
        *({"window": window, "theta": theta} for window in (0, 1, 2) for theta in (0.3, 0.7)),
        {},
        {"theta": 0.9, "window": 1, "entropy": "top3"},
    ],
    regret_budget: [
        {},
        {"budget": 2.0, "gap": 9.0, "mismatches": 3},
        {"gap": 0.1, "mismatches": 9},
        {"budget": 1.0, "gap": 0.3, "mismatches": 1},
    ],
    floor: [{}, {"floor": 0.1}, {"floor": 0.3}],
    overshoot: [{}, {"cap": 2.0}, {"cap": 0.0}],
}


@every_sampler
@pytest.mark.parametrize("oracle", CASES, ids=[oracle.__name__ for oracle in CASES])
def test_a_rule_accepts_what_its_definition_says(
    oracle: Callable[..., Answer], sampler: Sampler
) -> None:
    seen = compared = 0
    answers = {True: 0, False: 0}
    for options in CASES[oracle]:
        rule = make_acceptor(oracle.__name__, **options)
        for number, scene in enumerate(SCENES):
            step = scene.step(rule, sampler)
            found = rule.accept(step).tolist()
            for index in range(len(found)):
                row = Row(step, index)
                for node in row.drafted:
                    own = row.said[node] and oracle not in GUARDS
                    wanted, distance = (True, 1.0) if own else oracle(row, node, **options)
                    seen += 1
                    if distance < NEAR:
                        continue
                    compared += 1
                    answers[wanted] += not own
                    assert found[index][node] == wanted, (options, number, index, node)
    assert compared > 0.8 * seen
    assert min(answers.values()) > 0.01 * compared, answers


def star(rows: int, z: list[float], children: list[int]) -> Scene:
    """Roots with the same logits and the same children, under as many row keys."""
    tokens = torch.tensor([[0, *children]]).expand(rows, -1)
    tree = DraftTree.from_parents(tokens, torch.tensor([[-1] + [0] * len(children)] * rows))
    hidden = torch.ones(rows, len(children) + 1, 1)
    return Scene(tree, hidden, linear_head(torch.tensor(z)[:, None]), keys=tuple(range(rows)))


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("min_p(alpha=0)", [True, True, False]),
        ("margin(kappa=1)", [True, True, False]),
        ("top_k(k=2)", [True, True, False]),
        ("relaxed_top_n(n=2, delta=0.01)", [True, True, False]),
        ("mars(theta=0.9)", [True, True, False]),
        ("top_k(k=1)", [True, False, False]),
        ("min_p(alpha=-inf)", [True, False, False]),
        ("lenience(lenience=1)", [True, False, False]),
        ("mars(theta=1)", [True, False, False]),
    ],
)
def test_a_token_that_ties_with_the_argmax_passes_where_the_definition_says(
    rule: str, kept: list[bool]
) -> None:
    made = make_acceptor(rule)
    found = made.accept(star(1, [1.0, 2.0, 1.5, 2.0], [1, 3, 2]).step(made))
    assert found[0, 1:].tolist() == kept


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_mars_keeps_no_token_that_cannot_be_said(variant: str) -> None:
    rule = make_acceptor("mars", theta=0.0, variant=variant)
    for sampler in (Sampler(1.0, top_k=1), Sampler(1.0, top_p=0.1)):
        step = star(5, [1.0, 2.0, 1.5, 0.5], [0, 2, 3, 1]).step(rule, sampler)
        assert rule.accept(step)[:, 1:].tolist() == [[False, False, False, True]] * 5


@pytest.mark.parametrize("missing", ["draft_logits", "draft_ids"])
def test_rules_that_compare_with_the_draft_say_so_where_it_has_nothing_to_show(
    missing: str,
) -> None:
    scene = SCENES[0]
    blind = (
        replace(scene, draft_ids=None)
        if missing == "draft_ids"
        else replace(scene, tree=replace(scene.tree, draft_logits=None))
    )
    names = [name for name, rule in {**ACCEPTORS, **PARTS}.items() if rule.needs_draft]
    assert {"js", "dropmatch", "fuzzy_js", "kl_judge"} <= set(names)
    for expression in (*names, "any_of(exact, js)", "all_of(fuzzy_js, floor)"):
        rule = make_acceptor(expression)
        assert rule.needs_draft
        with pytest.raises(UserError, match=r"draft's distribution.*none to show") as caught:
            rule.accept(blind.step(rule))
        assert "\n" not in str(caught.value)
