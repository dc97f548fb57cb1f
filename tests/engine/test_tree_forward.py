"""Verifying a tree in one forward says what plain forwards over its paths say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import rig
import torch
from torch import Tensor

from eagle_dropmatch.cache import TreeCache
from eagle_dropmatch.target import TargetModel
from eagle_dropmatch.tree import DraftTree, longest_accepted_path, tree_attention

NODES = 10


def random_tree(batch: int, nodes: int, generator: torch.Generator) -> DraftTree:
    tokens = torch.randint(rig.VOCAB, (batch, nodes), generator=generator)
    parents = torch.full((batch, nodes), -1)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(node, (batch,), generator=generator)
    return DraftTree.from_parents(tokens, parents)


def root_path(tree: DraftTree, row: int, node: int) -> list[int]:
    """Tokens from the root down to a node."""
    path = []
    while node >= 0:
        path.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return path[::-1]


def prefilled(
    target: TargetModel, prompts: Sequence[Sequence[int]], capacity: int = 64
) -> TreeCache:
    lengths = [len(prompt) for prompt in prompts]
    cache = target.new_cache(len(prompts), capacity)
    target.prefill(cache, rig.padded(prompts, "right")[0], lengths)
    return cache


def stored(cache: TreeCache, row: int) -> Tensor:
    """[layers, 2, H_kv, length, d] of a row's committed slots."""
    (store,) = cache._stores.values()
    return store[:, :, row, :, : int(cache.lengths[row])]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", list(rig.FAMILIES))
@torch.inference_mode()
def test_every_node_of_a_batch_of_trees_equals_its_root_path(family: str, attention: str) -> None:
    model = rig.tiny_model(family, attention=attention, layers=3)
    target = TargetModel(model)
    prompts = rig.prompts(1, 37)
    tree = random_tree(2, NODES, torch.Generator().manual_seed(3))
    out = target.verify(prefilled(target, prompts), tree)
    for row, prompt in enumerate(prompts):
        for node in range(NODES):
            path = prompt + root_path(tree, row, node)
            plain = rig.last_logits(model, path)
            torch.testing.assert_close(out.logits[row, node], plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 37])
@torch.inference_mode()
def test_every_node_of_a_single_tree_equals_its_root_path(target: TargetModel, length: int) -> None:
    (prompt,) = rig.prompts(length)
    tree = random_tree(1, NODES, torch.Generator().manual_seed(5))
    out = target.verify(prefilled(target, [prompt]), tree)
    for node in range(NODES):
        plain = rig.last_logits(target.model, prompt + root_path(tree, 0, node))
        torch.testing.assert_close(out.logits[0, node], plain, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_padding_nodes_change_nothing_and_stay_finite(target: TargetModel) -> None:
    (prompt,) = rig.prompts(5)
    tokens = torch.tensor([[7, 8, 9, 0, 0]])
    parents = torch.tensor([[-1, 0, 0, -1, -1]])
    valid = torch.tensor([[True, True, True, False, False]])
    ragged = DraftTree.from_parents(tokens, parents, valid=valid)
    full = DraftTree.from_parents(tokens[:, :3], parents[:, :3])
    wide = target.verify(prefilled(target, [prompt]), ragged)
    narrow = target.verify(prefilled(target, [prompt]), full)
    torch.testing.assert_close(wide.logits[:, :3], narrow.logits, atol=1e-4, rtol=1e-4)
    assert wide.logits.isfinite().all()


@torch.inference_mode()
def test_in_bfloat16_the_mask_has_the_models_dtype_and_nothing_overflows() -> None:
    target = TargetModel(rig.tiny_model(layers=3, dtype=torch.bfloat16))
    cache = prefilled(target, rig.prompts(1, 9))
    tree = random_tree(2, NODES, torch.Generator().manual_seed(3))
    out = target.verify(cache, tree)
    assert tree_attention(tree, cache.lengths, cache.key_length, target.dtype).dtype == (
        torch.bfloat16
    )
    assert out.logits.dtype == torch.bfloat16
    assert out.logits.isfinite().all()


@torch.inference_mode()
def test_hidden_states_are_what_the_lm_head_multiplies(target: TargetModel) -> None:
    (prompt,) = rig.prompts(6)
    cache = target.new_cache(1, 32)
    prefill = target.prefill(cache, rig.ids(prompt), [6])
    assert torch.equal(target.head(prefill.hidden[:, -1]), prefill.logits)
    out = target.verify(cache, random_tree(1, 4, torch.Generator().manual_seed(0)))
    torch.testing.assert_close(target.model.lm_head(out.hidden), out.logits)


@torch.inference_mode()
def test_prefill_takes_the_logits_at_each_rows_own_last_token(target: TargetModel) -> None:
    prompts = rig.prompts(1, 12, 5)
    cache = target.new_cache(3, 32)
    out = target.prefill(cache, rig.padded(prompts, "right")[0], [1, 12, 5])
    for row, prompt in enumerate(prompts):
        plain = rig.last_logits(target.model, prompt)
        torch.testing.assert_close(out.logits[row], plain, atol=1e-4, rtol=1e-4)
    assert cache.lengths.tolist() == [1, 12, 5]


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("at_once", [1, 5, 12])
@torch.inference_mode()
def test_a_prompt_read_in_parts_is_the_prompt_read_whole(
    at_once: int, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetModel(rig.tiny_model(layers=4), (0, 2, 4), fuse=fuse)
    prompts = rig.prompts(3, 12, 7)
    tree = random_tree(3, NODES, torch.Generator().manual_seed(2))
    said = []
    for size in (1024, at_once):
        monkeypatch.setattr("eagle_dropmatch.target.PREFILL_AT_ONCE", size)
        cache = target.new_cache(3, 6)  # too small for the whole: it grows on the way
        out = target.prefill(cache, rig.padded(prompts, "right")[0], [3, 12, 7])
        assert cache.lengths.tolist() == [3, 12, 7]
        said.append((*out, target.verify(cache, tree).logits))
    for whole, parts in zip(*said, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [(6,), (4, 4), (1, 9, 4)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
@torch.inference_mode()
def test_the_cache_after_accepted_paths_equals_a_fresh_prefill(
    lengths: tuple[int, ...], seed: int
) -> None:
    target = TargetModel(rig.tiny_model(layers=3))
    generator = torch.Generator().manual_seed(seed)
    committed = rig.prompts(*lengths, seed=seed)
    # Too small for the second tree already: the cache grows on the way.
    cache = prefilled(target, committed, capacity=max(lengths) + NODES)
    grown = cache.capacity
    for chance in (0.0, 0.5, 1.0, 0.8, 0.5, 0.9):  # none, some and all nodes accepted
        tree = random_tree(len(lengths), NODES, generator)
        target.verify(cache, tree)
        accept = torch.rand(tree.tokens.shape, generator=generator) < chance
        path = longest_accepted_path(tree, accept)
        cache.keep(path.nodes, (path.lengths + 1).tolist())
        for row, tokens in enumerate(committed):
            nodes = path.nodes[row, : int(path.lengths[row]) + 1]
            tokens += tree.tokens[row, nodes].tolist()
    assert cache.capacity >= 2 * grown
    fresh = prefilled(target, committed)
    assert cache.lengths.tolist() == [len(tokens) for tokens in committed]
    for row in range(len(lengths)):
        torch.testing.assert_close(stored(cache, row), stored(fresh, row), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_growth_keeps_contents_to_the_bit_and_doubles() -> None:
    target = TargetModel(rig.tiny_model(layers=3))
    prompts = rig.prompts(3, 8)
    cache = prefilled(target, prompts, capacity=8)
    before = [stored(cache, row).clone() for row in range(2)]
    cache.open(1)
    assert cache.capacity == 16
    assert all(torch.equal(stored(cache, row), before[row]) for row in range(2))


@torch.inference_mode()
def test_rows_that_leave_take_nothing_of_the_others_with_them(target: TargetModel) -> None:
    prompts = rig.prompts(3, 8, 5)
    cache = prefilled(target, prompts)
    cache.select(torch.tensor([2, 0]))
    assert (cache.batch, cache.max_length, cache.lengths.tolist()) == (2, 5, [5, 3])
    tree = random_tree(2, NODES, torch.Generator().manual_seed(1))
    out = target.verify(cache, tree)
    for row, prompt in enumerate([prompts[2], prompts[0]]):
        plain = rig.last_logits(target.model, prompt + root_path(tree, row, NODES - 1))
        torch.testing.assert_close(out.logits[row, -1], plain, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_row_that_keeps_nothing_stays_as_it_was(target: TargetModel) -> None:
    cache = prefilled(target, rig.prompts(4, 6))
    before = stored(cache, 0).clone()
    tree = DraftTree.chain(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    target.verify(cache, tree)
    cache.keep(torch.tensor([[0, 1, 2], [0, 1, 2]]), [0, 3])
    assert cache.lengths.tolist() == [4, 9]
    assert torch.equal(stored(cache, 0), before)
