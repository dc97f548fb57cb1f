"""What rules say of their verdicts: the very numbers that the verdicts follow from."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_scenes import Scene, random_scene

from eagle_dropmatch.acceptors import ACCEPTORS, PARTS, StepContext, make_acceptor
from eagle_dropmatch.acceptors.scores import Score
from eagle_dropmatch.sampling import Sampler
from eagle_dropmatch.tree import DraftTree

HOLDS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
}
#: Rules whose comparisons must all hold; and whether the target's own choice passes beside them.
ALL_OF_THEM = {
    "naive": False,
    "naive(K=3, p_drop=0.4, include_clean=True)": True,
    "majority": False,
    "majority(K=4, p_drop=[0.1, 0.2, 0.5, 0.0])": False,
    "js": False,
    "js(p_drop=0, include_clean=True)": True,
    "lenience": True,
    "typical": True,
    "min_p": True,
    "min_p(alpha=1)": True,
    "min_p(alpha=-inf)": True,
    "margin": True,
    "margin(kappa=inf)": True,
    "mars(theta=0.3)": True,
    "mars(variant=released)": True,
    "top_k(k=3)": True,
    "top_k(k=1)": True,
    "relaxed_top_n(n=3, delta=0.4)": True,
    "relaxed_top_n(n=1)": True,
    "thresholds(single=0.2)": True,
    "thresholds(single=1, accumulated=0.6)": True,
    "fuzzy_js": True,
    "kl_judge(threshold=2.0)": True,
    "entropy_gate(theta=0.4, window=1)": True,
    "entropy_gate(theta=0.6, window=0, entropy=top3)": True,
    "regret_budget(budget=3.0, gap=1.0)": True,
    "flip_probability": True,
    "floor(floor=0.1)": False,
    "overshoot(cap=2)": False,
    "all_of(floor(floor=0.05), overshoot(cap=3))": False,
}
SAMPLERS = (Sampler(), Sampler(1.3), Sampler(0.8, top_k=5, top_p=0.9))


def compared(scores: Mapping[str, Score], row: int, node: int) -> dict[str, bool]:
    """Each comparison of a node, from the numbers alone."""

    def at(values: torch.Tensor | float) -> float:
        return values if isinstance(values, float | int) else values[row, node].item()

    return {
        name: HOLDS[score.relation](at(score.value), at(score.bound))
        for name, score in scores.items()
        if score.relation
    }


def drafted(step: StepContext) -> list[list[int]]:
    return (step.tree.valid & (step.tree.parents >= 0)).nonzero().tolist()


def test_every_rule_that_compares_something_is_tried_here() -> None:
    """Beside exact acceptance, and what the next tests look at."""
    tried = {expression.partition("(")[0] for expression in ALL_OF_THEM}
    others = {"exact", "sampling", "dropmatch", "any_of"}
    assert tried | others == {*ACCEPTORS, *PARTS}
    assert make_acceptor("exact").explain(random_scene().step(make_acceptor("exact"))) == {}


@pytest.mark.parametrize("expression", ALL_OF_THEM)
@given(seed=st.integers(0, 10_000), vocab=st.integers(4, 9), sampler=st.sampled_from(SAMPLERS))
@settings(max_examples=12, deadline=None)
def test_the_explained_numbers_give_the_verdict(
    expression: str, seed: int, vocab: int, sampler: Sampler
) -> None:
    rule, scene = make_acceptor(expression), random_scene(3, 12, vocab=vocab, seed=seed, sharp=0.3)
    step = scene.step(rule, sampler)
    scores = rule.explain(step)
    verdict = rule.accept(scene.step(rule, sampler))
    for row, node in drafted(step):
        own = ALL_OF_THEM[expression] and bool(step.exact[row, node])
        comparisons = compared(scores, row, node)
        held = bool(comparisons) and all(comparisons.values())
        assert bool(verdict[row, node]) == (own or held), (row, node, comparisons)


@given(seed=st.integers(0, 10_000), sampler=st.sampled_from(SAMPLERS))
@settings(max_examples=15, deadline=None)
def test_where_one_of_several_reasons_is_enough_one_of_them_holds(
    seed: int, sampler: Sampler
) -> None:
    scene = random_scene(3, 12, vocab=5, seed=seed, sharp=0.3)
    for expression in ("dropmatch", "any_of(floor(floor=0.3), overshoot(cap=0.5), naive(K=2))"):
        rule = make_acceptor(expression)
        step = scene.step(rule, sampler)
        scores, verdict = rule.explain(step), rule.accept(step)
        for row, node in drafted(step):
            assert bool(verdict[row, node]) == any(compared(scores, row, node).values())
    both = make_acceptor("thresholds(single=0.3, accumulated=0.7)")
    step = scene.step(both, sampler)
    verdict = both.accept(step)
    for row, node in drafted(step):
        alone, *walk = compared(both.explain(step), row, node).values()
        assert bool(verdict[row, node]) == (bool(step.exact[row, node]) or alone or all(walk))


def test_heads_and_their_votes_are_told_with_the_rates_they_drop_at() -> None:
    scene: Scene = random_scene(vocab=5)
    rule = make_acceptor("majority(K=3, p_drop=[0.1, 0.4, 0.5])")
    step = scene.step(rule)
    scores = rule.explain(step)
    for row, node in drafted(step):
        said = [int(scores[f"head {i}"].value[row, node]) for i in (1, 2, 3)]
        votes = said.count(int(step.tree.tokens[row, node]))
        assert int(scores["heads that say x"].value[row, node]) == votes
        assert int(scores["most say"].value[row, node]) in said
        rates = [float(scores[f"p_drop of head {i}"].value[row, node]) for i in (1, 2, 3)]
        assert rates == pytest.approx([0.1, 0.4, 0.5])
    assert all(scores[f"head {i}"].token for i in (1, 2, 3))
    assert "p_drop" in make_acceptor("naive").explain(scene.step(make_acceptor("naive")))


def test_parts_of_a_rule_are_told_apart() -> None:
    rule = make_acceptor("any_of(floor(floor=0.1), floor(floor=0.2), any_of(top_k))")
    names = list(rule.explain(random_scene().step(rule)))
    assert names == ["1 floor: p(x)", "2 floor: p(x)", "3 any_of: 1 top_k: likelier tokens"]


@pytest.mark.parametrize("name", [*ACCEPTORS, "floor", "overshoot"])
def test_trees_of_a_root_alone_are_explained_too(name: str) -> None:
    scene = random_scene()
    assert scene.tree.draft_logits is not None
    roots = DraftTree.root_only(torch.tensor([3, 1]))
    tree = DraftTree(**{**vars(roots), "draft_logits": scene.tree.draft_logits[:2, :1]})
    alone = Scene(tree, scene.hidden[:2, :1], scene.head, scene.draft_ids)
    rule = make_acceptor(name)
    assert all(each.value.shape == (2, 1) for each in rule.explain(alone.step(rule)).values())
