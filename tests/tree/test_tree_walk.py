"""Paths through trees, against exhaustive walks."""

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_oracles import PlainTree, as_batch, batches

from eagle_dropmatch.tree import (
    BeamLevel,
    DraftTree,
    Expansion,
    children,
    grow,
    longest_accepted_path,
    paths,
    position_ids,
    tree_attention,
)


def best_path(row: PlainTree, accept: list[bool]) -> list[int]:
    """Every node is tried; deepest, then higher score, then lower id."""
    reached = [
        node
        for node in range(len(row.tokens))
        if all(accept[above] for above in row.path_to(node)[1:])
    ]
    best = min(reached, key=lambda n: (-len(row.path_to(n)), -row.scores[n], n))
    return row.path_to(best)


@given(batches(), st.integers(0, 3), st.booleans(), st.floats(0.3, 1.0), st.integers(0, 10**6))
def test_longest_accepted_path_equals_an_exhaustive_walk(
    rows: list[PlainTree], extra: int, told: bool, chance: float, seed: int
) -> None:
    tree = as_batch(rows, extra)
    if told:
        tree = dataclasses.replace(tree, levels=int(tree.depths.max()))
    generator = torch.Generator().manual_seed(seed)
    accept = torch.rand(tree.tokens.shape, generator=generator) < chance
    path = longest_accepted_path(tree, accept)
    assert path.nodes.shape == (len(rows), tree.max_depth + 1)
    for b, row in enumerate(rows):
        expected = best_path(row, accept[b].tolist())
        assert path.nodes[b].tolist() == expected + [-1] * (tree.max_depth + 1 - len(expected))
        assert path.lengths[b] == len(expected) - 1


def walk(parents: list[int], scores: list[float], accept: list[int]) -> list[int]:
    tree = DraftTree.from_parents(
        torch.arange(len(parents))[None], torch.tensor([parents]), torch.tensor([scores])
    )
    path = longest_accepted_path(tree, torch.tensor([accept]).bool())
    return path.nodes[0, : int(path.lengths[0]) + 1].tolist()


def test_the_deeper_path_wins_over_the_likelier_one() -> None:
    assert walk([-1, 0, 0, 2], [0, -0.1, -5, -9], [1, 1, 1, 1]) == [0, 2, 3]


def test_equal_depths_are_decided_by_score_and_then_by_id() -> None:
    assert walk([-1, 0, 0, 0], [0, -3, -1, -2], [1, 1, 1, 1]) == [0, 2]
    assert walk([-1, 0, 0, 0], [0, -3, -1, -1], [1, 1, 1, 1]) == [0, 2]
    assert walk([-1, 0, 0], [0, -float("inf"), -float("inf")], [1, 0, 1]) == [0, 2]


def test_an_accepted_node_under_a_rejected_one_is_not_reached() -> None:
    assert walk([-1, 0, 1, 2, 0], [0, -1, -2, -3, -9], [1, 1, 0, 1, 1]) == [0, 1]


def test_the_root_needs_no_acceptance() -> None:
    assert walk([-1, 0, 1], [0, -1, -2], [0, 1, 1]) == [0, 1, 2]
    assert walk([-1, 0, 1], [0, -1, -2], [0, 0, 0]) == [0]


def test_an_empty_tree_gives_the_root_alone() -> None:
    path = longest_accepted_path(
        DraftTree.root_only(torch.tensor([3, 4])), torch.zeros(2, 1, dtype=torch.bool)
    )
    assert path.nodes.tolist() == [[0], [0]]
    assert path.lengths.tolist() == [0, 0]


@given(batches(), st.integers(0, 3))
def test_children_are_listed_by_id(rows: list[PlainTree], extra: int) -> None:
    tree = as_batch(rows, extra)
    exact = children(tree)
    wide = children(tree, exact.shape[2] + 2)
    assert torch.equal(wide[:, :, : exact.shape[2]], exact)
    assert bool((wide[:, :, exact.shape[2] :] == -1).all())
    assert exact.shape[2] == max(
        len(row.children_of(node)) for row in rows for node in range(len(row.tokens))
    )
    for b, row in enumerate(rows):
        for node in range(tree.num_nodes):
            listed = [child for child in exact[b, node].tolist() if child >= 0]
            assert listed == row.children_of(node)


def test_children_beyond_the_width_are_left_out() -> None:
    tree = DraftTree.from_parents(torch.zeros(1, 5).long(), torch.tensor([[-1, 0, 0, 0, 2]]))
    assert children(tree, 2)[0].tolist() == [[1, 2], [-1, -1], [4, -1], [-1, -1], [-1, -1]]


@given(batches(), st.integers(0, 3))
def test_paths_are_the_root_to_leaf_paths_by_leaf_id(rows: list[PlainTree], extra: int) -> None:
    listed = paths(as_batch(rows, extra)).tolist()
    expected = [
        [row.path_to(node) for node in range(len(row.tokens)) if not row.children_of(node)]
        for row in rows
    ]
    count = max(len(leaves) for leaves in expected)
    width = max(len(path) for leaves in expected for path in leaves)
    for got, leaves in zip(listed, expected, strict=True):
        filled = [path + [-1] * (width - len(path)) for path in leaves]
        assert got == filled + [[-1] * width] * (count - len(leaves))


def test_a_step_never_reads_a_tensor_on_the_host() -> None:
    """Meta tensors hold no values: whatever reads one fails."""
    top_k, depth, batch = 4, 3, 2

    def expansion(rows: int) -> Expansion:
        shape = (batch, rows, top_k)
        return Expansion(
            torch.empty(shape, dtype=torch.int64, device="meta"),
            torch.empty(shape, device="meta"),
        )

    def expand(level: BeamLevel) -> Expansion:
        return expansion(level.tokens.shape[1])

    prefix = torch.empty(batch, dtype=torch.int64, device="meta")
    tree = grow(prefix, expansion(1), expand, depth=depth, top_k=top_k, total_token=30)
    assert tree.tokens.shape == (batch, 30)
    assert tree_attention(tree, prefix, 99, torch.float16).shape == (batch, 1, 30, 99)
    assert position_ids(tree, prefix).shape == (batch, 30)
    accept = torch.empty(batch, 30, dtype=torch.bool, device="meta")
    assert longest_accepted_path(tree, accept).nodes.shape == (batch, depth + 2)
    assert children(tree, top_k).shape == (batch, 30, top_k)
