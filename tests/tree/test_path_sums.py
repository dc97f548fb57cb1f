"""Sums along paths, and the draft's logits that grown trees keep, against plain walks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tree_oracles import PlainTree, as_batch, batches

from eagle_dropmatch.tree import BeamLevel, DraftTree, Expansion, grow, path_sums

Path = tuple[int, ...]
DRAFT_VOCABULARY = 7


def assert_sums(tree: DraftTree, values: Tensor) -> None:
    before = values.clone()
    sums = path_sums(tree, values)
    assert sums.shape == values.shape
    assert sums.dtype == values.dtype
    assert torch.equal(values, before)
    for row in range(tree.batch_size):
        for node in range(tree.num_nodes):
            if not tree.valid[row, node]:
                continue
            total, at = 0.0, node
            while at > 0:
                total += values[row, at].item()
                at = int(tree.parents[row, at])
            assert sums[row, node].item() == pytest.approx(total, abs=1e-9), (row, node)


@settings(deadline=None)
@given(batches(), st.integers(0, 3), st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_path_sums_are_those_of_a_walk_to_the_root(
    rows: list[PlainTree], extra: int, told: bool, whole: bool, seed: int
) -> None:
    tree = as_batch(rows, extra)
    if told:
        tree = replace(tree, levels=int(tree.depths.max()))
    generator = torch.Generator().manual_seed(seed)
    shape = tree.tokens.shape
    if whole:
        values = torch.randint(-9, 9, shape, generator=generator)
    else:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
    assert_sums(tree, values)


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 100])
def test_path_sums_reach_the_root_of_chains_of_any_length(depth: int) -> None:
    valid = torch.ones(2, depth + 1, dtype=torch.bool)
    valid[1, max(1, depth // 2) :] = False
    tree = DraftTree.chain(torch.zeros(2, depth + 1, dtype=torch.int64), valid=valid)
    assert path_sums(tree, torch.ones(2, depth + 1).long())[0].tolist() == list(range(depth + 1))
    assert_sums(tree, torch.randn(2, depth + 1, dtype=torch.float64))


def test_path_sums_keep_float32_and_carry_infinities_to_those_below_alone() -> None:
    tree = DraftTree.from_parents(torch.zeros(1, 6).long(), torch.tensor([[-1, 0, 0, 1, 2, 3]]))
    values = torch.tensor([[99.0, float("inf"), 0.5, 1.0, 2.0, float("inf")]])
    sums = path_sums(tree, values)
    assert sums.dtype == torch.float32
    inf = float("inf")
    assert sums.tolist() == [[0.0, inf, 0.5, inf, 2.5, inf]]


class Drafter:
    """Scores paths by logits that belong to the path alone; -inf for tokens that cannot be."""

    def __init__(self, roots: list[int], top_k: int, seed: int, dead: float) -> None:
        self.roots, self.top_k, self.seed, self.dead = roots, top_k, seed, dead
        self.beams: list[list[Path]] = []

    def logits(self, row: int, path: Path) -> Tensor:
        rng = random.Random(f"{self.seed} {row} {path}")
        values = [rng.gauss(0, 2) for _ in range(DRAFT_VOCABULARY)]
        alive = [value if rng.random() >= self.dead else -float("inf") for value in values]
        return torch.tensor([values[0], *alive[1:]])

    def expansion(self, beams: list[list[Path]]) -> Expansion:
        self.beams = beams
        logits = torch.stack(
            [
                torch.stack([self.logits(row, path) for path in beam])
                for row, beam in enumerate(beams)
            ]
        )
        top = logits.log_softmax(-1).topk(self.top_k, dim=-1)
        return Expansion(top.indices + 100, top.values, logits)

    def first(self) -> Expansion:
        return self.expansion([[(root,)] for root in self.roots])

    def __call__(self, level: BeamLevel) -> Expansion:
        return self.expansion(
            [
                [(*beam[up], token) for up, token in zip(ups, tokens, strict=True)]
                for beam, ups, tokens in zip(
                    self.beams, level.parent_rows.tolist(), level.tokens.tolist(), strict=True
                )
            ]
        )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 4),
    st.integers(1, 4),
    st.integers(2, 40),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 10**6),
)
def test_every_node_with_children_carries_the_logits_of_its_own_expansion(
    depth: int, top_k: int, total_token: int, dead: float, seed: int
) -> None:
    drafter = Drafter([40, 41], top_k, seed, dead)
    roots = torch.tensor(drafter.roots)
    tree = grow(
        roots, drafter.first(), drafter, depth=depth, top_k=top_k, total_token=total_token
    ).validate()
    kept = tree.draft_logits
    assert kept is not None
    assert kept.shape == (*tree.tokens.shape, DRAFT_VOCABULARY)
    for row in range(2):
        paths: list[Path] = []
        for node in range(int(tree.valid[row].sum())):
            above = paths[int(tree.parents[row, node])] if node else ()
            paths.append((*above, int(tree.tokens[row, node])))
            expanded = bool((tree.parents[row] == node).any())
            own = torch.equal(kept[row, node], drafter.logits(row, paths[node]))
            assert own or not expanded, (row, node)
            # A node that was never expanded shows the root's, which nobody reads.
            assert own or torch.equal(kept[row, node], kept[row, 0]), (row, node)


def test_rows_taken_from_a_batch_keep_their_own_logits() -> None:
    together = Drafter([40, 41, 42], 3, 5, 0.0)
    grown = grow(
        torch.tensor(together.roots), together.first(), together, depth=3, top_k=3, total_token=20
    )
    index = torch.tensor([2, 0])
    assert grown.draft_logits is not None
    chosen = grown.rows(index).draft_logits
    assert chosen is not None
    assert torch.equal(chosen, grown.draft_logits[index])
    assert not torch.equal(grown.draft_logits[0], grown.draft_logits[1])


@pytest.mark.parametrize("without", ["first", "later", "all"])
def test_a_scorer_that_shows_no_logits_gives_trees_without(without: str) -> None:
    drafter = Drafter([40], 2, 1, 0.0)
    first = drafter.first()
    if without != "later":
        first = first._replace(logits=None)

    def expand(level: BeamLevel) -> Expansion:
        expansion = drafter(level)
        return expansion if without == "first" else expansion._replace(logits=None)

    tree = grow(torch.tensor([40]), first, expand, depth=2, top_k=2, total_token=7)
    assert tree.num_nodes == 7
    assert tree.draft_logits is None
