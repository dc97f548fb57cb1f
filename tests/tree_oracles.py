"""Plain-Python trees for the tests of tree/: random ones, and the obvious way to read them."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from eagle_dropmatch.tree import DraftTree


@dataclass(frozen=True)
class PlainTree:
    """One row without padding; node 0 is the root, parents[0] is -1."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]

    def path_to(self, node: int) -> list[int]:
        """Node ids from the root down to the node."""
        path = [node]
        while self.parents[path[0]] >= 0:
            path.insert(0, self.parents[path[0]])
        return path

    def children_of(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]


@st.composite
def plain_trees(draw: st.DrawFn, max_nodes: int = 12) -> PlainTree:
    """Random recursive trees; scores are small integers, so that ties are common."""
    count = draw(st.integers(1, max_nodes))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, count)]
    scores = [0.0] + [float(draw(st.integers(-3, 0))) for _ in range(1, count)]
    return PlainTree(list(range(100, 100 + count)), parents, scores)


def batches(max_rows: int = 4) -> st.SearchStrategy[list[PlainTree]]:
    return st.lists(plain_trees(), min_size=1, max_size=max_rows)


def as_batch(rows: list[PlainTree], extra_padding: int = 0) -> DraftTree:
    """The rows as one DraftTree; padding arrives as rubbish that must not matter."""
    width = max(len(row.tokens) for row in rows) + extra_padding

    def padded(name: str, filler: float) -> torch.Tensor:
        lists = [getattr(row, name) for row in rows]
        return torch.tensor([values + [filler] * (width - len(values)) for values in lists])

    valid = torch.tensor([[node < len(row.tokens) for node in range(width)] for row in rows])
    return DraftTree.from_parents(
        padded("tokens", 7), padded("parents", 1), padded("scores", 5.0), valid
    )
