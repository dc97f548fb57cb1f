"""DraftTree: its constructors and its own checks."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_oracles import PlainTree, as_batch, batches

from eagle_dropmatch.tree import DraftTree, choice_parents, paths

SMALL = PlainTree([50, 51, 52, 53, 54], [-1, 0, 0, 1, 2], [0.0, -1.0, -2.0, -3.0, -4.0])
INF = float("inf")


def assert_same_tree(left: DraftTree, right: DraftTree) -> None:
    for field in ("tokens", "parents", "depths", "scores", "valid"):
        a, b = getattr(left, field), getattr(right, field)
        assert a.dtype == b.dtype, field
        assert torch.equal(a, b), field
    assert left.max_depth == right.max_depth


@given(batches(), st.integers(0, 3))
def test_from_parents_derives_depths_and_blanks_padding(rows: list[PlainTree], extra: int) -> None:
    tree = as_batch(rows, extra).validate()
    for b, row in enumerate(rows):
        count = len(row.tokens)
        blank = tree.num_nodes - count
        assert tree.tokens[b].tolist() == row.tokens + [0] * blank
        assert tree.parents[b].tolist() == row.parents + [-1] * blank
        depths = [len(row.path_to(node)) - 1 for node in range(count)]
        assert tree.depths[b].tolist() == depths + [0] * blank
        assert tree.scores[b].tolist() == row.scores + [-INF] * blank
        assert tree.valid[b].tolist() == [True] * count + [False] * blank
    assert tree.draft_counts.tolist() == [len(row.tokens) - 1 for row in rows]


def test_a_chain_is_the_tree_in_which_each_node_follows_the_one_before() -> None:
    tokens = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 1]])
    scores = torch.tensor([[0.0, -1, -2, -3], [0, -2, -4, -8]])
    parents = torch.tensor([[-1, 0, 1, 2]]).expand(2, 4)
    expected = DraftTree.from_parents(tokens, parents, scores, levels=3)
    assert_same_tree(DraftTree.chain(tokens, scores).validate(), expected)


def test_chains_of_unequal_length_are_padded() -> None:
    valid = torch.tensor([[True, True, True], [True, False, False]])
    tree = DraftTree.chain(torch.tensor([[3, 4, 5], [7, 8, 9]]), valid=valid).validate()
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, -1, -1]]
    assert tree.depths.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert tree.tokens.tolist() == [[3, 4, 5], [7, 0, 0]]


def test_a_root_alone_drafts_nothing() -> None:
    tree = DraftTree.root_only(torch.tensor([4, 9])).validate()
    assert tree.tokens.tolist() == [[4], [9]]
    assert tree.draft_counts.tolist() == [0, 0]
    assert tree.max_depth == 0


def test_choices_become_nodes_by_depth_and_rank() -> None:
    table = torch.arange(2 * 3 * 4).view(2, 3, 4) + 100
    log_probs = -torch.arange(12.0).view(1, 3, 4).expand(2, 3, 4)
    choices = [(1,), (0, 2), (0,), (0, 2, 1), (1, 0)]
    tree = DraftTree.from_choices(torch.tensor([8, 9]), table, choices, log_probs).validate()
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 3]] * 2
    assert tree.tokens.tolist() == [
        [8, 100, 101, 106, 104, 109],
        [9, 112, 113, 118, 116, 121],
    ]
    assert tree.scores.tolist() == [[0, 0, -1, -6, -5, -15]] * 2
    assert tree.max_depth == 3


def test_no_choices_are_a_root_alone() -> None:
    tree = DraftTree.from_choices(torch.tensor([8]), torch.zeros(1, 0, 0).long(), []).validate()
    assert_same_tree(tree, DraftTree.root_only(torch.tensor([8])))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([(0,), (1, 0)], r"no parent: add \(1,\)"),
        ([(0,), (0,)], "given twice"),
        ([()], "one or more child ranks"),
        ([(-1,)], "0 or greater"),
    ],
)
def test_bad_choices_are_named(choices: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choice_parents(choices)


def test_a_table_too_small_for_the_choices_is_named() -> None:
    with pytest.raises(ValueError, match="2 levels, 4 ranks"):
        DraftTree.from_choices(torch.tensor([1]), torch.zeros(1, 2, 3).long(), [(0,), (0, 3)])


@given(batches(), st.data())
def test_rows_takes_a_subset_of_the_batch(rows: list[PlainTree], data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
    tree = as_batch(rows)
    logits = torch.arange(tree.tokens.numel() * 2.0).view(*tree.tokens.shape, 2)
    part = dataclasses.replace(tree, draft_logits=logits).rows(torch.tensor(picked))
    width = tree.num_nodes
    padding = width - max(len(rows[b].tokens) for b in picked)
    assert_same_tree(part, as_batch([rows[b] for b in picked], padding))
    assert part.draft_logits is not None
    assert torch.equal(part.draft_logits, logits[picked])


def test_rows_takes_a_mask_and_keeps_the_known_depth() -> None:
    tree = DraftTree.from_parents(
        torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[-1, 0, 0]] * 2), levels=1
    )
    part = tree.rows(torch.tensor([False, True]))
    assert part.tokens.tolist() == [[4, 5, 6]]
    assert part.max_depth == 1
    assert part.draft_logits is None


@pytest.mark.parametrize(
    ("field", "node", "value", "message"),
    [
        ("valid", 0, False, r"root, node 0, must be valid \(row 1, node 0\)"),
        ("parents", 0, 0, "root's parent must be -1"),
        ("scores", 0, -1.0, "root's score must be 0"),
        ("valid", 2, False, r"padding must come after the valid nodes \(row 1, node 3\)"),
        ("parents", 3, 3, "a parent must be an earlier node"),
        ("parents", 3, -1, "a parent must be an earlier node"),
        ("parents", 1, 4, "a parent must be an earlier node"),
        ("depths", 3, 1, "one deeper than its parent"),
        ("depths", 0, 1, "the root at depth 0"),
        ("scores", 2, float("nan"), "a score must be a number"),
        ("parents", 5, 0, r"padding must hold parent -1.*\(row 1, node 5\)"),
        ("scores", 5, 0.0, "padding must hold"),
        ("depths", 5, 1, "padding must hold"),
        ("tokens", 2, 51, "siblings must have distinct tokens"),
    ],
)
def test_validate_names_the_broken_rule_and_its_place(
    field: str, node: int, value: float, message: str
) -> None:
    tree = as_batch([SMALL, SMALL], extra_padding=1).validate()
    broken = getattr(tree, field).clone()
    broken[1, node] = value
    changes: dict[str, Any] = {field: broken}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tree, **changes).validate()


def test_validate_finds_a_node_deeper_than_the_stated_levels() -> None:
    with pytest.raises(ValueError, match="at most levels = 1"):
        dataclasses.replace(as_batch([SMALL]), levels=1).validate()


def test_equal_siblings_may_be_allowed_and_cousins_always_are() -> None:
    siblings = torch.tensor([[-1, 0, 0]])
    tree = DraftTree.from_parents(torch.tensor([[5, 6, 6]]), siblings)
    assert tree.validate(distinct_siblings=False) is tree
    cousins = torch.tensor([[-1, 0, 0, 1, 2]])
    DraftTree.from_parents(torch.tensor([[5, 6, 7, 8, 8]]), cousins).validate()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("parents", torch.zeros(1, 5, dtype=torch.int32), "parents must be torch.int64"),
        ("scores", torch.zeros(1, 5, dtype=torch.float64), "scores must be torch.float32"),
        ("depths", torch.zeros(1, 4, dtype=torch.int64), r"got torch.int64 \[1, 4\]"),
        ("draft_logits", torch.zeros(1, 4, 3), "draft_logits must be"),
        ("tokens", torch.zeros(5, dtype=torch.int64), r"tokens must be \[B, N >= 1\]"),
    ],
)
def test_validate_names_a_tensor_of_the_wrong_kind(
    field: str, value: torch.Tensor, message: str
) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(as_batch([SMALL]), **changes).validate()


def test_stated_levels_narrow_the_paths_without_changing_them() -> None:
    tree = as_batch([SMALL])
    assert torch.equal(paths(tree), paths(dataclasses.replace(tree, levels=2)))
