"""Growth against a plain-Python EAGLE-2, with random scorers, forced ties and dead candidates."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_dropmatch.tree import BeamLevel, DraftTree, Expansion, candidate_count, grow

INF = float("inf")
Path = tuple[int, ...]
Scored = list[tuple[int, float]]  # (token, log-probability), best first
Drafter = Callable[[Path], Scored]  # the children of the node with these tokens, root included


@dataclass(frozen=True)
class Shape:
    depth: int
    top_k: int
    total_token: int


def shapes() -> st.SearchStrategy[Shape]:
    return st.builds(Shape, st.integers(0, 4), st.integers(1, 4), st.integers(1, 90))


def drafter(seed: int, top_k: int, kind: str) -> Drafter:
    """A language model over paths: the same path has the same children, whoever asks."""

    def score(path: Path) -> Scored:
        rng = random.Random(f"{seed} {path}")
        tokens = rng.sample(range(1, 30), top_k)
        if kind == "ties":
            values = [float(rng.randint(-2, 0)) for _ in tokens]
        elif kind == "flat":
            values = [0.0 for _ in tokens]
        else:
            values = [float(np.float32(-rng.expovariate(1.0))) for _ in tokens]
        if kind == "dead":
            values = [value if rng.random() < 0.6 else -INF for value in values]
        return list(zip(tokens, sorted(values, reverse=True), strict=True))

    return score


@dataclass(frozen=True)
class Node:
    path: Path
    score: np.float32
    flat: int
    up: "Node | None"


def plain_growth(root: int, children: Drafter, shape: Shape) -> dict[str, list[float]]:
    """EAGLE-2 as the paper tells it, on lists of nodes."""
    top = Node((root,), np.float32(0), -1, None)
    candidates: list[Node] = []

    def expand(node: Node) -> list[Node]:
        born = []
        for token, value in children(node.path):
            score = np.float32(node.score + np.float32(value))
            child = Node((*node.path, token), score, len(candidates), node)
            candidates.append(child)
            born.append(child)
        return born

    def best(nodes: list[Node], count: int) -> list[Node]:
        return sorted(nodes, key=lambda node: (-node.score, node.flat))[:count]

    beam = expand(top)
    for _ in range(shape.depth):
        beam = best([child for node in beam for child in expand(node)], shape.top_k)
    chosen = best(candidates, shape.total_token - 1)
    alive = sorted((c for c in chosen if c.score > -INF), key=lambda c: c.flat)
    order = [top, *alive]
    ids = {node.flat: place for place, node in enumerate(order)}
    return {
        "tokens": [node.path[-1] for node in order],
        "parents": [-1 if node.up is None else ids[node.up.flat] for node in order],
        "depths": [len(node.path) - 1 for node in order],
        "scores": [float(node.score) for node in order],
    }


class BatchScorer:
    """Asks one drafter per row, and checks that `visible` and `parent_rows` tell the same story."""

    def __init__(self, roots: list[int], drafters: list[Drafter]) -> None:
        self.roots = roots
        self.drafters = drafters
        self.slots: list[list[int]] = [[] for _ in roots]  # drafted tokens, level-major
        self.beams: list[list[Path]] = [[] for _ in roots]
        self.calls = 0

    def expansion(self, beams: list[list[Path]]) -> Expansion:
        scored = [
            [draft(path) for path in beam] for draft, beam in zip(self.drafters, beams, strict=True)
        ]
        pairs = torch.tensor(scored, dtype=torch.float64)
        return Expansion(pairs[..., 0].long(), pairs[..., 1].float())

    def first(self) -> Expansion:
        return self.expansion([[(root,)] for root in self.roots])

    def __call__(self, level: BeamLevel) -> Expansion:
        assert level.index == self.calls
        self.calls += 1
        for b, root in enumerate(self.roots):
            tokens = level.tokens[b].tolist()
            width = len(tokens)
            self.slots[b] += tokens
            assert level.visible.shape == (len(self.roots), width, (level.index + 1) * width)
            from_mask = [
                (root, *(t for t, seen in zip(self.slots[b], row, strict=True) if seen))
                for row in level.visible[b].tolist()
            ]
            before = self.beams[b] if level.index else [(root,)]
            from_rows = [
                (*before[up], token)
                for up, token in zip(level.parent_rows[b].tolist(), tokens, strict=True)
            ]
            assert from_mask == from_rows
            self.beams[b] = from_rows
        return self.expansion(self.beams)


def grown(roots: list[int], drafters: list[Drafter], shape: Shape) -> tuple[DraftTree, BatchScorer]:
    scorer = BatchScorer(roots, drafters)
    tree = grow(
        torch.tensor(roots),
        scorer.first(),
        scorer,
        depth=shape.depth,
        top_k=shape.top_k,
        total_token=shape.total_token,
    )
    return tree, scorer


def assert_row_is(tree: DraftTree, row: int, expected: dict[str, list[float]]) -> None:
    count = len(expected["tokens"])
    assert tree.valid[row].tolist() == [i < count for i in range(tree.num_nodes)]
    for field, values in expected.items():
        assert getattr(tree, field)[row, :count].tolist() == values, field


KINDS = st.sampled_from(["float", "ties", "flat", "dead"])


@settings(max_examples=150, deadline=None)
@given(shapes(), st.lists(st.tuples(st.integers(0, 10**6), KINDS), min_size=1, max_size=3))
def test_growth_equals_plain_eagle(shape: Shape, kinds: list[tuple[int, str]]) -> None:
    roots = list(range(40, 40 + len(kinds)))
    drafters = [drafter(seed, shape.top_k, kind) for seed, kind in kinds]
    tree, scorer = grown(roots, drafters, shape)
    tree.validate()
    possible = candidate_count(shape.depth, shape.top_k) + 1
    assert tree.num_nodes == min(shape.total_token, possible)
    assert scorer.calls <= (0 if shape.total_token == 1 else shape.depth)
    for row, (root, draft) in enumerate(zip(roots, drafters, strict=True)):
        assert_row_is(tree, row, plain_growth(root, draft, shape))


@settings(max_examples=40, deadline=None)
@given(shapes(), st.lists(st.tuples(st.integers(0, 10**6), KINDS), min_size=2, max_size=4))
def test_a_row_of_a_batch_equals_the_row_alone(shape: Shape, kinds: list[tuple[int, str]]) -> None:
    roots = list(range(40, 40 + len(kinds)))
    drafters = [drafter(seed, shape.top_k, kind) for seed, kind in kinds]
    together, _ = grown(roots, drafters, shape)
    for row, (root, draft) in enumerate(zip(roots, drafters, strict=True)):
        alone, _ = grown([root], [draft], shape)
        for field in ("tokens", "parents", "depths", "scores", "valid"):
            assert torch.equal(getattr(together, field)[row], getattr(alone, field)[0])


@pytest.mark.parametrize("total_token", [2, 7, 24, 60, 711])
def test_when_all_scores_tie_the_earliest_candidates_are_kept(total_token: int) -> None:
    shape = Shape(depth=7, top_k=10, total_token=total_token)
    tree, _ = grown([1], [drafter(3, 10, "flat")], shape)
    tree.validate()
    # flat order: ten children of the root, then the beam (the first ten), ten children each
    expected = [0] * 10 + [1 + i // 10 for i in range(100)]
    assert tree.parents[0, 1:].tolist()[:110] == expected[: total_token - 1]


def test_a_child_as_likely_as_its_parent_never_replaces_it() -> None:
    # "a" and "b" tie with each other and with all that follows them; two drafted nodes fit.
    def score(path: Path) -> Scored:
        return [(2 * len(path), -1.0 if len(path) == 1 else 0.0), (2 * len(path) + 1, -1.0)]

    tree, _ = grown([9], [score], Shape(depth=2, top_k=2, total_token=3))
    assert tree.tokens.tolist() == [[9, 2, 3]]
    assert tree.parents.tolist() == [[-1, 0, 0]]


def test_a_tree_worked_by_hand() -> None:
    table: dict[Path, Scored] = {
        (0,): [(1, -1.0), (2, -2.0)],
        (0, 1): [(3, -0.5), (4, -4.0)],
        (0, 2): [(5, -0.25), (6, -0.75)],
        (0, 1, 3): [(7, -2.0), (8, -3.0)],
        (0, 2, 5): [(9, -0.5), (10, -0.5)],
    }
    # beam 1: 1 (-1), 2 (-2); beam 2: 3 (-1.5), 5 (-2.25). Then 9 and 10 reach -2.75, which ties
    # with 6; 6 has the lower flat index and 10 the highest, so 10 is cut.
    tree, _ = grown([0], [table.__getitem__], Shape(depth=2, top_k=2, total_token=7))
    assert tree.tokens.tolist() == [[0, 1, 2, 3, 5, 6, 9]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 2, 4]]
    assert tree.scores.tolist() == [[0, -1, -2, -1.5, -2.25, -2.75, -2.75]]


@pytest.mark.parametrize(
    ("total_token", "calls"), [(3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (12, 3)]
)
def test_levels_that_could_give_no_node_are_not_drafted(total_token: int, calls: int) -> None:
    def score(path: Path) -> Scored:  # every level is a nat less likely than the one before
        return [(2 * len(path), -1.0), (2 * len(path) + 1, -1.0)]

    shape = Shape(depth=3, top_k=2, total_token=total_token)
    tree, scorer = grown([0], [score], shape)
    assert scorer.calls == calls
    assert_row_is(tree, 0, plain_growth(0, score, shape))


@given(st.integers(0, 6), st.integers(0, 10**6))
def test_top_k_one_drafts_a_chain(depth: int, seed: int) -> None:
    levels = depth + 1
    tree, scorer = grown([5], [drafter(seed, 1, "float")], Shape(depth, 1, levels + 1))
    assert scorer.calls == depth
    assert tree.parents[0].tolist() == list(range(-1, levels))
    assert tree.depths[0].tolist() == list(range(levels + 1))
    assert tree.max_depth == levels


@pytest.mark.parametrize("depth", range(8))
def test_depth_counts_the_expansions_after_the_first(depth: int) -> None:
    tree, scorer = grown([5], [drafter(1, 3, "flat")], Shape(depth, 3, 1000))
    assert scorer.calls == depth
    assert int(tree.depths.max()) == depth + 1 == tree.max_depth


def test_a_total_beyond_the_candidates_is_clipped() -> None:
    tree, _ = grown([5], [drafter(1, 3, "float")], Shape(depth=2, top_k=3, total_token=500))
    assert candidate_count(2, 3) == 21
    assert tree.num_nodes == 22
    assert bool(tree.valid.all())


def test_a_total_of_one_asks_the_scorer_nothing() -> None:
    tree, scorer = grown([5, 6], [drafter(1, 3, "float")] * 2, Shape(4, 3, 1))
    assert scorer.calls == 0
    assert tree.tokens.tolist() == [[5], [6]]


def test_a_draft_vocabulary_smaller_than_top_k_gives_padding() -> None:
    def score(path: Path) -> Scored:  # two tokens exist; four children are asked for
        return [(1, -0.5), (2, -1.0), (0, -INF), (0, -INF)]

    tree, _ = grown([5], [score], Shape(depth=1, top_k=4, total_token=15))
    tree.validate()
    assert tree.draft_counts.tolist() == [6]
    assert tree.num_nodes == 15
    assert set(tree.tokens[0, 1:7].tolist()) == {1, 2}


def test_nan_scores_give_no_nodes_instead_of_a_corrupt_tree() -> None:
    def score(path: Path) -> Scored:
        return [(1, -1.0), (2, float("nan"))] if len(path) < 3 else [(3, float("nan"))] * 2

    tree, _ = grown([5], [score], Shape(depth=3, top_k=2, total_token=9))
    tree.validate()
    assert tree.tokens[tree.valid].tolist() == [5, 1, 1]


def test_a_log_probability_rounded_above_zero_keeps_parents_before_children() -> None:
    def score(path: Path) -> Scored:
        return [(1, 1e-6), (2, -3.0)]

    for total in range(2, 8):
        tree, _ = grown([5], [score], Shape(depth=2, top_k=2, total_token=total))
        tree.validate()
        assert bool((tree.scores <= 0).all())


def test_half_precision_log_probs_are_summed_in_float32() -> None:
    first = Expansion(torch.tensor([[[1]]]), torch.tensor([[[-100.0]]], dtype=torch.bfloat16))
    second = Expansion(torch.tensor([[[2]]]), torch.tensor([[[-0.125]]], dtype=torch.bfloat16))
    tree = grow(torch.tensor([0]), first, lambda _: second, depth=1, top_k=1, total_token=3)
    assert tree.scores.tolist() == [[0.0, -100.0, -100.125]]


@pytest.mark.parametrize("name", ["depth", "top_k", "total_token"])
def test_impossible_shapes_are_refused(name: str) -> None:
    options = {"depth": 1, "top_k": 1, "total_token": 3, name: -1}
    scorer = BatchScorer([5], [drafter(1, 1, "float")])
    with pytest.raises(ValueError, match=f"{name} -1"):
        grow(torch.tensor([5]), scorer.first(), scorer, **options)


def test_a_scorer_that_returns_the_wrong_shape_is_named() -> None:
    scorer = BatchScorer([5], [drafter(1, 3, "float")])
    with pytest.raises(ValueError, match=r"\[1, 1, 2\].*\[1, 1, 3\]"):
        grow(torch.tensor([5]), scorer.first(), scorer, depth=1, top_k=2, total_token=3)
    with pytest.raises(ValueError, match=r"\[1, 3, 3\].*\[1, 1, 3\]"):
        grow(
            torch.tensor([5]),
            scorer.first(),
            lambda _: scorer.first(),
            depth=1,
            top_k=3,
            total_token=3,
        )
