"""The mask and positions of tree attention, against literal masks and ancestor sets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_oracles import PlainTree, as_batch, batches

from eagle_dropmatch.tree import DraftTree, ancestor_matrix, position_ids, tree_attention

T, F = True, False
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def test_ancestors_of_a_small_tree() -> None:
    # 0 -- 1 -- 3    and    0 -- 1 -- 2
    #  \-- 2 -- 4            (two nodes of padding)
    parents = torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 1, -1, -1]])
    valid = torch.tensor([[T, T, T, T, T], [T, T, T, F, F]])
    assert ancestor_matrix(parents, valid).tolist() == [
        [
            [T, F, F, F, F],
            [T, T, F, F, F],
            [T, F, T, F, F],
            [T, T, F, T, F],
            [T, F, T, F, T],
        ],
        [
            [T, F, F, F, F],
            [T, T, F, F, F],
            [T, T, T, F, F],
            [F, F, F, T, F],
            [F, F, F, F, T],
        ],
    ]


def test_parents_written_at_padding_do_not_matter() -> None:
    parents = torch.tensor([[-1, 0, 1, 3]])
    valid = torch.tensor([[T, T, F, F]])
    assert ancestor_matrix(parents, valid).tolist() == [
        [[T, F, F, F], [T, T, F, F], [F, F, T, F], [F, F, F, T]]
    ]


def test_mask_and_positions_of_a_small_batch() -> None:
    tree = DraftTree.from_parents(
        torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]),
        torch.tensor([[-1, 0, 0, 1], [-1, 0, -1, -1]]),
        valid=torch.tensor([[T, T, T, T], [T, T, F, F]]),
    )
    prefix = torch.tensor([2, 0])
    mask = tree_attention(tree, prefix, 7, torch.float32)
    assert mask.shape == (2, 1, 4, 7)
    assert (mask[:, 0] == 0).tolist() == [
        [
            [T, T, T, F, F, F, F],
            [T, T, T, T, F, F, F],
            [T, T, T, F, T, F, F],
            [T, T, T, T, F, T, F],
        ],
        [
            [T, F, F, F, F, F, F],
            [T, T, F, F, F, F, F],
            [F, F, T, F, F, F, F],
            [F, F, F, T, F, F, F],
        ],
    ]
    assert position_ids(tree, prefix).tolist() == [[2, 3, 3, 4], [0, 1, 0, 0]]


@given(batches(), st.integers(0, 2), st.booleans())
def test_ancestors_equal_ancestor_sets(rows: list[PlainTree], extra: int, told: bool) -> None:
    tree = as_batch(rows, extra)
    depth = int(tree.depths.max()) if told else None
    matrix = ancestor_matrix(tree.parents, tree.valid, depth)
    for b, row in enumerate(rows):
        for node in range(tree.num_nodes):
            expected = row.path_to(node) if node < len(row.tokens) else [node]
            assert matrix[b, node].nonzero()[:, 0].tolist() == expected


@given(batches(), st.integers(0, 2), st.integers(0, 3), st.sampled_from(DTYPES), st.data())
def test_every_node_sees_its_context_and_its_path(
    rows: list[PlainTree], extra: int, slack: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    tree = as_batch(rows, extra)
    prefix = [data.draw(st.integers(0, 9)) for _ in rows]
    keys = max(prefix) + tree.num_nodes + slack
    mask = tree_attention(tree, torch.tensor(prefix), keys, dtype)
    assert mask.dtype == dtype
    assert mask.shape == (len(rows), 1, tree.num_nodes, keys)
    positions = position_ids(tree, torch.tensor(prefix))
    for b, row in enumerate(rows):
        for node in range(tree.num_nodes):
            path = row.path_to(node) if node < len(row.tokens) else [node]
            seen = {*range(prefix[b]), *(prefix[b] + above for above in path)}
            expected = [0.0 if key in seen else torch.finfo(dtype).min for key in range(keys)]
            assert mask[b, 0, node].tolist() == expected
            if node < len(row.tokens):
                assert positions[b, node] == prefix[b] + len(path) - 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_a_padded_tree_is_finite(dtype: torch.dtype) -> None:
    valid = torch.tensor([[T, T, F, F]])
    tree = DraftTree.chain(torch.ones(1, 4, dtype=torch.int64), valid=valid)
    mask = tree_attention(tree, torch.tensor([0]), 6, dtype)
    query = torch.full((1, 1, 4, 8), 30.0, dtype=dtype)
    keys = torch.full((1, 1, 6, 8), 30.0, dtype=dtype)
    out = torch.nn.functional.scaled_dot_product_attention(query, keys, keys, attn_mask=mask)
    assert bool(out.isfinite().all())


def test_attending_through_the_mask_equals_attending_along_the_path_alone() -> None:
    tree = DraftTree.from_parents(
        torch.zeros(1, 6, dtype=torch.int64), torch.tensor([[-1, 0, 0, 1, 3, 2]])
    )
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(1, 1, 6, 4, generator=generator)
    keys, values = torch.randn(2, 1, 1, 12, 4, generator=generator)
    attend = torch.nn.functional.scaled_dot_product_attention
    mask = tree_attention(tree, torch.tensor([3]), 12, torch.float32)
    whole = attend(queries, keys, values, attn_mask=mask)
    for node, path in enumerate([[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [0, 2, 5]]):
        slots = [0, 1, 2, *(3 + above for above in path)]
        alone = attend(queries[:, :, node : node + 1], keys[:, :, slots], values[:, :, slots])
        torch.testing.assert_close(whole[:, :, node : node + 1], alone)


def test_an_integer_mask_is_refused() -> None:
    tree = DraftTree.root_only(torch.tensor([1]))
    with pytest.raises(ValueError, match="must be a float"):
        tree_attention(tree, torch.tensor([0]), 4, torch.bool)


def test_more_nodes_than_key_slots_are_refused() -> None:
    tree = DraftTree.chain(torch.ones(1, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="5 nodes do not fit into 4 key slots"):
        tree_attention(tree, torch.tensor([0]), 4, torch.float32)
