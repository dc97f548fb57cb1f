"""Drafting from the text itself: what followed the last tokens where they stood before.

No network: prompt lookup, on trees. Where an n-gram occurs several times, the continuations become
branches, the most recent first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from eagle_dropmatch.cache import put_rows
from eagle_dropmatch.drafts.base import Drafter, DraftPrompt, Observation, TreeShape
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.tree import DraftTree

_STEP = -0.5  # log-probability that stands for one more token of a continuation


class NGramDrafter(Drafter):
    """Proposes what followed earlier occurrences of a row's last tokens.

    Longer n-grams are tried first; further ones fill the tree while there is room. Scores are no
    probabilities: they only order nodes by depth, then by how good their match was.

    Args:
        shape: ``levels`` bounds a continuation, ``total_token`` the tree, ``top_k`` the number of
            continuations.
        longest: tokens of the longest n-gram that is looked up, at least 1.
    """

    def __init__(self, shape: TreeShape, longest: int = 3) -> None:
        if longest < 1:
            raise UserError(f"the n-gram's length is {longest}: expected at least 1")
        self.shape, self.longest = shape, longest
        self._texts: list[_Text] = []
        self._roots: Tensor

    def describe(self) -> str:
        return f"n-gram {self.longest}"

    def start(self, prompt: DraftPrompt) -> None:
        self._roots = prompt.roots
        self._texts = []
        rows = zip(prompt.tokens.tolist(), prompt.lengths, prompt.roots.tolist(), strict=True)
        for tokens, length, root in rows:
            text = _Text(self.longest)
            text.add([*tokens[:length], root])
            self._texts.append(text)

    def observe(self, seen: Observation) -> None:
        self._roots = seen.bonus
        for text, tokens, count in zip(self._texts, seen.tokens.tolist(), seen.counts, strict=True):
            text.add(tokens[:count])

    def propose(self) -> DraftTree:
        branches = [text.continuations(self.shape.levels, self.shape.top_k) for text in self._texts]
        trees = [_Trie(self.shape.nodes).add_all(each) for each in branches]
        width = max(len(tree.tokens) for tree in trees)
        filled = [
            (
                [text.tokens[-1], *tree.tokens[1:], *[0] * (width - len(tree.tokens))],
                tree.parents + [-1] * (width - len(tree.tokens)),
                tree.scores + [0.0] * (width - len(tree.tokens)),
                [place < len(tree.tokens) for place in range(width)],
            )
            for text, tree in zip(self._texts, trees, strict=True)
        ]
        device = self._roots.device
        tokens, parents, scores, valid = (
            torch.tensor(list(each), device=device) for each in zip(*filled, strict=True)
        )
        levels = max((tree.depth for tree in trees), default=0)
        return DraftTree.from_parents(tokens, parents, scores, valid, levels=levels)

    def select(self, rows: Tensor) -> None:
        self._roots = self._roots[rows]
        self._texts = [self._texts[row] for row in rows.tolist()]

    def join(self, seats: Sequence[int], guests: Self) -> None:
        self._roots = put_rows(self._roots, seats, guests._roots)
        self._texts += [_Text(self.longest)] * (max(seats) + 1 - len(self._texts))
        for seat, text in zip(seats, guests._texts, strict=True):
            self._texts[seat] = text


class _Text:
    """A row's tokens, and where each n-gram ends."""

    def __init__(self, longest: int) -> None:
        self.tokens: list[int] = []
        self._ends: list[dict[tuple[int, ...], list[int]]] = [
            defaultdict(list) for _ in range(longest)
        ]

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for size, known in enumerate(self._ends, 1):
                if end >= size:
                    known[tuple(self.tokens[end - size :])].append(end)

    def continuations(self, levels: int, most: int) -> list[list[int]]:
        """At most so many different ones, of at most ``levels`` tokens, the best match first."""
        found: dict[tuple[int, ...], None] = {}
        here = len(self.tokens)
        for size in range(min(len(self._ends), here), 0, -1):
            ends = self._ends[size - 1].get(tuple(self.tokens[here - size :]), [])
            for end in reversed(ends):
                if end < here:
                    found.setdefault(tuple(self.tokens[end : end + levels]))
                if len(found) >= most:
                    return [list(each) for each in found]
        return [list(each) for each in found]


class _Trie:
    """Continuations merged at what they share; node 0 stands for the root."""

    def __init__(self, nodes: int) -> None:
        self.tokens, self.parents, self.scores = [0], [-1], [0.0]
        self.depth = 0
        self._most = nodes
        self._children: dict[tuple[int, int], int] = {}

    def add_all(self, branches: Sequence[Sequence[int]]) -> _Trie:
        for rank, branch in enumerate(branches):
            node = 0
            for depth, token in enumerate(branch, 1):
                if (node, token) not in self._children:
                    if len(self.tokens) >= self._most:
                        break
                    self._children[node, token] = len(self.tokens)
                    self.tokens.append(token)
                    self.parents.append(node)
                    self.scores.append(_STEP * depth - 0.01 * rank)
                    self.depth = max(self.depth, depth)
                node = self._children[node, token]
        return self
