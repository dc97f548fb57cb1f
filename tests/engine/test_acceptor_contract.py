"""What every rule of the registry must show, and how rules are made by name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from eagle_dropmatch.acceptors import (
    ACCEPTORS,
    Acceptor,
    ExactAcceptor,
    NaiveAcceptor,
    PromptContext,
    StepContext,
    Verdict,
    make_acceptor,
)
from eagle_dropmatch.acceptors.base import exact_matches
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.target import PrefillOutput, TargetOutput
from eagle_dropmatch.tree import DraftTree

BATCH, NODES, SIZE, VOCAB = 5, 14, 24, 6
every_rule = pytest.mark.parametrize("name", list(ACCEPTORS))


def scene(seed: int = 0) -> tuple[DraftTree, torch.Tensor, torch.Tensor]:
    """Random trees (the last row padded), hidden states at their nodes, an LM head."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((BATCH, NODES), -1)
    for node in range(1, NODES):
        parents[:, node] = torch.randint(node, (BATCH,), generator=generator)
    tokens = torch.randint(VOCAB, (BATCH, NODES), generator=generator)
    valid = torch.ones(BATCH, NODES, dtype=torch.bool)
    valid[-1, NODES // 2 :] = False
    tree = DraftTree.from_parents(tokens, parents, valid=valid)
    hidden = torch.randn(BATCH, NODES, SIZE, generator=generator)
    return tree, hidden, torch.randn(VOCAB, SIZE, generator=generator)


def verify(
    rule: Acceptor,
    rows: list[int] | None = None,
    *,
    seed: int = 0,
    step: int = 2,
    stops: tuple[int, ...] = (),
) -> Verdict:
    """The rule's verdict on some rows of a scene."""
    tree, hidden, weight = scene(seed)
    index = torch.tensor(list(range(BATCH)) if rows is None else rows)
    tree, hidden = tree.rows(index), hidden[index]
    output = TargetOutput(hidden @ weight.T, hidden, hidden)
    prefill = PrefillOutput(output.logits[:, 0], hidden, hidden)

    def head(states: torch.Tensor) -> torch.Tensor:
        return states @ weight.T

    return rule.verify(
        tree,
        output,
        StepContext(
            head=head,
            argmax=output.logits.argmax(-1),
            stop_ids=torch.tensor(stops, dtype=torch.int64),
            row_keys=[70 + row for row in index.tolist()],
            step=step,
            state=rule.start(PromptContext(prefill, [NODES] * len(index), head, weight)),
        ),
    )


@every_rule
def test_shapes_types_and_the_path_fit_together(name: str) -> None:
    tree, hidden, weight = scene()
    verdict = verify(make_acceptor(name))
    width = tree.max_depth + 1
    assert (
        verdict.path.shape == verdict.strict_path.shape == verdict.relaxed.shape == (BATCH, width)
    )
    for value in (verdict.accepted, verdict.bonus, verdict.strict, verdict.strict_bonus):
        assert value.shape == (BATCH,)
        assert value.dtype == torch.int64
    assert verdict.allowed.shape == (BATCH, NODES)
    assert verdict.allowed.dtype == verdict.relaxed.dtype == torch.bool
    argmax = (hidden @ weight.T).argmax(-1)
    for row in range(BATCH):
        path = [node for node in verdict.path[row].tolist() if node >= 0]
        assert len(path) == int(verdict.accepted[row]) + 1
        assert path[0] == 0
        for parent, node in pairwise(path):
            assert int(tree.parents[row, node]) == parent
            assert bool(verdict.allowed[row, node])
        assert int(verdict.bonus[row]) == int(argmax[row, path[-1]])
        strict = [node for node in verdict.strict_path[row].tolist() if node >= 0]
        assert int(verdict.strict_bonus[row]) == int(argmax[row, strict[-1]])
        assert not (verdict.allowed[row] & ~tree.valid[row]).any()


@every_rule
def test_a_verdict_does_not_depend_on_the_other_rows(name: str) -> None:
    whole = verify(make_acceptor(name))
    for rows in ([3], [4, 0, 2]):
        part = verify(make_acceptor(name), rows)
        for field, value in part._asdict().items():
            assert torch.equal(value, getattr(whole, field)[rows]), field


@every_rule
def test_a_verdict_repeats_itself_and_leaves_the_global_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, again = verify(make_acceptor(name)), verify(make_acceptor(name))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


@every_rule
def test_the_strict_path_is_what_exact_acceptance_keeps(name: str) -> None:
    exact, other = verify(make_acceptor("exact")), verify(make_acceptor(name))
    assert torch.equal(other.strict_path, exact.path)
    assert torch.equal(other.strict, exact.accepted)
    assert torch.equal(other.strict_bonus, exact.bonus)


@every_rule
def test_a_lossless_rule_relaxes_nothing_and_a_lossy_one_says_where_it_does(name: str) -> None:
    rule = make_acceptor(name)
    tree, hidden, weight = scene()
    exact = exact_matches(tree, (hidden @ weight.T).argmax(-1))
    verdict = verify(rule)
    on_path = verdict.path.clamp(min=0)
    drafted = verdict.path > 0
    assert torch.equal(verdict.relaxed, drafted & ~exact.gather(1, on_path))
    if rule.lossless:
        assert not verdict.relaxed.any()


@every_rule
def test_no_rule_is_relaxed_into_a_stop_token(name: str) -> None:
    tree, hidden, weight = scene()
    exact = exact_matches(tree, (hidden @ weight.T).argmax(-1))
    stops = (1, 4)
    verdict = verify(make_acceptor(name), stops=stops)
    stopping = torch.isin(tree.tokens, torch.tensor(stops)) & tree.valid
    assert (stopping & exact).any()
    assert not (verdict.allowed & stopping & ~exact).any()


def test_other_steps_and_seeds_draw_other_masks() -> None:
    def allowed(step: int, seed: int) -> torch.Tensor:
        return verify(NaiveAcceptor(K=3, p_drop=0.5, seed=seed), step=step).allowed

    assert not torch.equal(allowed(0, 0), allowed(1, 0))
    assert not torch.equal(allowed(0, 0), allowed(0, 1))


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
    assert all(rule.name == name for name, rule in ACCEPTORS.items())
    assert [ACCEPTORS[name].lossless for name in ("exact", "naive")] == [True, False]


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("nave", {}, ("'nave'", "exact, naive")),
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
