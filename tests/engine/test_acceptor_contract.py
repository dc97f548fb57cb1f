"""What every rule of the registry must show, and how rules are made by name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from rule_scenes import Scene, random_scene

from eagle_dropmatch.acceptors import (
    ACCEPTORS,
    PARTS,
    Acceptor,
    ExactAcceptor,
    NaiveAcceptor,
    Verdict,
    describe,
    make_acceptor,
)
from eagle_dropmatch.acceptors.dropmatch import DropoutRule
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.sampling import Sampler
from eagle_dropmatch.tree import DraftTree

#: Greedy, and sampling with everything that can be set.
SAMPLERS = {
    "greedy": Sampler(),
    "t1": Sampler(1.0),
    "settings": Sampler(0.7, top_k=6, top_p=0.9, min_p=0.05),
}
SCENE = random_scene()
BATCH, NODES = SCENE.tree.tokens.shape
every_rule = pytest.mark.parametrize("name", list(ACCEPTORS))
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=list(SAMPLERS))


def verify(
    rule: Acceptor, sampler: Sampler | None = None, scene: Scene = SCENE, **changes: Any
) -> Verdict:
    return rule.verify(scene.step(rule, sampler, **changes))


def choices(sampler: Sampler, scene: Scene = SCENE) -> torch.Tensor:
    return scene.step(ExactAcceptor(), sampler).choice


@every_sampler
@every_rule
def test_shapes_types_and_the_path_fit_together(name: str, sampler: Sampler) -> None:
    tree = SCENE.tree
    verdict = verify(make_acceptor(name), sampler)
    width = tree.max_depth + 1
    assert (
        verdict.path.shape == verdict.strict_path.shape == verdict.relaxed.shape == (BATCH, width)
    )
    for value in (verdict.accepted, verdict.bonus, verdict.strict, verdict.strict_bonus):
        assert value.shape == (BATCH,)
        assert value.dtype == torch.int64
    assert verdict.allowed.shape == (BATCH, NODES)
    assert verdict.allowed.dtype == verdict.relaxed.dtype == torch.bool
    said = choices(sampler)
    for row in range(BATCH):
        path = [node for node in verdict.path[row].tolist() if node >= 0]
        assert len(path) == int(verdict.accepted[row]) + 1
        assert path[0] == 0
        for parent, node in pairwise(path):
            assert int(tree.parents[row, node]) == parent
            assert bool(verdict.allowed[row, node])
        assert int(verdict.bonus[row]) == int(said[row, path[-1]])
        strict = [node for node in verdict.strict_path[row].tolist() if node >= 0]
        assert int(verdict.strict_bonus[row]) == int(said[row, strict[-1]])
        assert not (verdict.allowed[row] & ~tree.valid[row]).any()


@every_sampler
@every_rule
def test_a_verdict_does_not_depend_on_the_other_rows(name: str, sampler: Sampler) -> None:
    whole = verify(make_acceptor(name), sampler)
    for rows in ([3], [4, 0, 2]):
        part = verify(make_acceptor(name), sampler, SCENE.rows(rows))
        for field, value in part._asdict().items():
            assert torch.equal(value, getattr(whole, field)[rows]), field


@every_sampler
@every_rule
def test_a_verdict_repeats_itself_and_leaves_the_global_generator_alone(
    name: str, sampler: Sampler
) -> None:
    before = torch.get_rng_state()
    first, again = (verify(make_acceptor(name), sampler) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


@every_sampler
@every_rule
def test_the_strict_path_is_what_exact_acceptance_keeps(name: str, sampler: Sampler) -> None:
    exact, other = (verify(make_acceptor(each), sampler) for each in ("exact", name))
    assert torch.equal(other.strict_path, exact.path)
    assert torch.equal(other.strict, exact.accepted)
    assert torch.equal(other.strict_bonus, exact.bonus)


@every_sampler
@every_rule
def test_the_strict_setting_is_exact_to_the_bit(name: str, sampler: Sampler) -> None:
    strict = make_acceptor(name, **ACCEPTORS[name].strict)
    for seed in range(8):
        # Few tokens, so that many of them are tied or nearly so.
        scene = random_scene(vocab=5, seed=seed, nodes=12)
        scene.hidden[:2] = scene.hidden[:2].round()
        exact, found = (verify(rule, sampler, scene) for rule in (ExactAcceptor(), strict))
        for field in ("path", "accepted", "bonus", "relaxed"):
            assert torch.equal(getattr(found, field), getattr(exact, field)), field


@every_sampler
@every_rule
def test_from_one_prefix_no_rule_that_contains_exact_keeps_less(
    name: str, sampler: Sampler
) -> None:
    clean = issubclass(ACCEPTORS[name], DropoutRule) and name != "flip_probability"
    rule = make_acceptor(name, **({"include_clean": True} if clean else {}))
    for seed in range(8):
        verdict = verify(rule, sampler, random_scene(seed=seed, vocab=6))
        assert (verdict.accepted >= verdict.strict).all()


@every_rule
def test_every_lossy_rule_relaxes_something_somewhere(name: str) -> None:
    loose = {
        "entropy_gate": "entropy_gate(theta=0.1, window=1)",
        "majority": "majority(K=2, p_drop=0.5)",
    }
    rule = make_acceptor(loose.get(name, name))
    found = [verify(rule, scene=random_scene(seed=seed, vocab=6)) for seed in range(30)]
    assert any(bool(verdict.relaxed.any()) for verdict in found) != rule.lossless


@every_sampler
@every_rule
def test_a_lossless_rule_relaxes_nothing_and_a_lossy_one_says_where_it_does(
    name: str, sampler: Sampler
) -> None:
    rule = make_acceptor(name)
    exact = SCENE.step(rule, sampler).exact
    verdict = verify(rule, sampler)
    drafted = verdict.path > 0
    assert torch.equal(verdict.relaxed, drafted & ~exact.gather(1, verdict.path.clamp(min=0)))
    if rule.lossless:
        assert not verdict.relaxed.any()


@every_rule
def test_no_rule_is_relaxed_into_a_stop_token(name: str) -> None:
    tree, stops = SCENE.tree, (1, 4)
    step = SCENE.step(make_acceptor(name), stops=stops)
    verdict = verify(make_acceptor(name), stops=stops)
    stopping = torch.isin(tree.tokens, torch.tensor(stops)) & tree.valid
    assert (stopping & step.exact).any()
    assert not (verdict.allowed & stopping & ~step.exact).any()


@every_sampler
@every_rule
def test_trees_of_a_root_alone_give_the_bonus_alone(name: str, sampler: Sampler) -> None:
    roots = torch.tensor([3, 1])
    draft = SCENE.tree.draft_logits
    assert draft is not None
    tree = DraftTree(**{**vars(DraftTree.root_only(roots)), "draft_logits": draft[:2, :1]})
    scene = Scene(tree, SCENE.hidden[:2, :1], SCENE.head, SCENE.draft_ids)
    verdict = verify(make_acceptor(name), sampler, scene)
    assert verdict.path.tolist() == [[0], [0]]
    assert verdict.accepted.tolist() == [0, 0]
    assert torch.equal(verdict.bonus, choices(sampler, scene)[:, 0])


@pytest.mark.parametrize("expression", ["naive(K=3, p_drop=0.5)", "lenience", "thresholds"])
def test_other_steps_and_seeds_draw_other_numbers(expression: str) -> None:
    def allowed(step: int, seed: int) -> list[torch.Tensor]:
        rule = make_acceptor(expression)
        vars(rule)["seed"] = seed
        if expression == "thresholds":
            vars(rule)["accumulated"] = 0.5
        scenes = [random_scene(seed=i, vocab=5) for i in range(5)]
        return [verify(rule, Sampler(1.0), each, steps=[step] * 5).allowed for each in scenes]

    def differ(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
        return any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))

    assert not differ(allowed(0, 0), allowed(0, 0))
    assert differ(allowed(0, 0), allowed(1, 0))
    assert differ(allowed(0, 0), allowed(0, 1))


def test_rules_are_made_by_name_with_their_options() -> None:
    assert isinstance(make_acceptor("exact"), ExactAcceptor)
    rule = make_acceptor("naive", K=3, p_drop=0.1, include_clean=True, mask="step", seed=4)
    assert isinstance(rule, NaiveAcceptor)
    assert (rule.K, rule.p_drop, rule.include_clean, rule.mask, rule.seed) == (
        3,
        0.1,
        True,
        "step",
        4,
    )
    for name, each in {**ACCEPTORS, **PARTS}.items():
        assert each.name == name
    lossless = {name for name, each in ACCEPTORS.items() if each.lossless}
    assert lossless == {"exact", "sampling"}


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("nave", {}, ("'nave'", "exact, sampling, naive", "any_of")),
        ("exact", {"K": 3}, ("'exact'", "K", "none")),
        ("naive", {"heads": 3, "drop": 1}, ("drop, heads", "p_drop")),
        ("naive", {"p_drop": -0.1}, ("-0.1", "[0, 1)")),
        ("naive", {"p_drop": 1.0}, ("1.0", "[0, 1)")),
        ("naive", {"p_drop": float("nan")}, ("nan", "[0, 1)")),
        ("naive", {"p_drop": float("inf")}, ("inf", "[0, 1)")),
        ("naive", {"p_drop": "0.3"}, ("'0.3'", "auto")),
        ("naive", {"p_drop": None}, ("None", "auto")),
        ("naive", {"K": 0}, ("K is 0", "at least one")),
        ("naive", {"K": 2.5}, ("K is 2.5", "whole number")),
        ("naive", {"K": "5"}, ("K is '5'", "whole number")),
        ("naive", {"head_agreement": 0}, ("head_agreement is 0", "(0, 1]")),
        ("naive", {"head_agreement": 1.1}, ("head_agreement is 1.1", "(0, 1]")),
        ("naive", {"head_agreement": float("nan")}, ("head_agreement is nan",)),
        ("naive", {"mask": "x"}, ("'x'", "'node' or 'step'")),
        ("naive", {"noise": "pink"}, ("'pink'", "'dropout' or 'gaussian' or 'swag'")),
        ("naive", {"adapt": 1}, ("adapt is 1", "'entropy'")),
        ("naive", {"K": 2, "p_drop": (0.1, 0.2, 0.3)}, ("3 rates", "K = 2")),
        ("naive", {"K": 2, "p_drop": (0.1, 1.5)}, ("1.5", "[0, 1)")),
        ("js", {"p_drop": True}, ("True", "[0, 1)")),
        ("js", {"noise": "swag"}, ("'swag'", "'dropout' or 'gaussian'")),
        ("naive", {"noise": "swag", "p_drop": "running"}, ("'running'", "gaussian")),
        ("any_of(naive(p_drop=running))", {}, ("any_of", "running")),
        ("lenience", {"lenience": 0}, ("lenience is 0", "(0, 1]")),
        ("typical", {"eps": -1}, ("eps is -1", "[0, inf]")),
        ("typical", {"delta": "a"}, ("delta is 'a'",)),
        ("min_p", {"alpha": 1.5}, ("alpha is 1.5", "[-inf, 1]")),
        ("margin", {"kappa": float("nan")}, ("kappa is nan",)),
        ("mars", {"theta": -0.1}, ("theta is -0.1",)),
        ("mars", {"variant": "mine"}, ("'mine'", "'paper' or 'released'")),
        ("top_k", {"k": 0}, ("k is 0", "at least 1")),
        ("relaxed_top_n", {"delta": 2}, ("delta is 2", "[0, 1]")),
        ("thresholds", {"single": 0}, ("single is 0", "(0, 1]")),
        ("fuzzy_js", {"threshold": -1}, ("threshold is -1",)),
        ("kl_judge", {"confidence": 1.2}, ("confidence is 1.2", "[0, 1]")),
        ("entropy_gate", {"window": -1}, ("window is -1", "at least 0")),
        ("regret_budget", {"mismatches": 1.5}, ("mismatches is 1.5", "whole number")),
        ("flip_probability", {"threshold": 0}, ("threshold is 0", "(0, 1]")),
        ("flip_probability", {"seed": 1}, ("no option seed", "threshold")),
        ("floor", {"floor": -1}, ("floor is -1",)),
        ("overshoot", {"cap": "x"}, ("cap is 'x'",)),
        ("any_of", {}, ("any_of was given []", "one or more")),
        ("margin(kappa=2", {}, ("'margin(kappa=2'", "a rule with its options")),
        ("margin(0.5)", {}, ("takes its options by name", "margin(option=value)")),
        ("any_of(naive, 3)", {}, ("3 is not a rule",)),
        ("any_of(naive, nave)", {}, ("'nave'",)),
        ("margin(kapa=0.5)", {}, ("no option kapa", "kappa")),
        ("margin(kappa=0.5)", {"kappa": 1}, ("beside its own options",)),
        ("naive + margin", {}, ("expected a name",)),
    ],
)
def test_options_that_make_no_sense_are_one_line(
    name: str, options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        make_acceptor(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def test_expressions_build_nested_rules_and_records_describe_them() -> None:
    rule = make_acceptor("all_of(any_of(naive(K=3), min_p(alpha=-inf), margin), floor(floor=1e-3))")
    described = describe(rule)
    assert [each["rule"] for each in described["rules"]] == ["any_of", "floor"]
    inner = described["rules"][0]["rules"]
    assert [each["rule"] for each in inner] == ["naive", "min_p", "margin"]
    assert (inner[0]["K"], inner[1]["alpha"], inner[2]["kappa"]) == (3, "-inf", 0.3)
    assert described["rules"][1]["floor"] == 1e-3
    released = make_acceptor("mars(variant=released, theta=0.8)")
    assert describe(released) == {"theta": 0.8, "variant": "released"}
    rates = make_acceptor("naive(K=2, p_drop=[0.1, 0.2])")
    assert describe(rates)["p_drop"] == [0.1, 0.2]


@every_sampler
def test_any_of_is_the_union_and_all_of_the_intersection(sampler: Sampler) -> None:
    parts = ["naive(K=2, p_drop=0.4)", "margin(kappa=0.2)", "fuzzy_js(threshold=0.3)"]
    for seed in range(5):
        scene = random_scene(seed=seed, vocab=6)
        each = [make_acceptor(part) for part in parts]
        alone = torch.stack([rule.accept(scene.step(rule, sampler)) for rule in each])
        for name, wanted in (("any_of", alone.any(0)), ("all_of", alone.all(0))):
            rule = make_acceptor(f"{name}({', '.join(parts)})")
            assert rule.needs_draft
            assert torch.equal(rule.accept(scene.step(rule, sampler)), wanted)
    assert make_acceptor("all_of(exact, naive)").lossless
    assert not make_acceptor("any_of(exact, naive)").lossless
