"""What a drafter is: something that proposes trees and learns what became of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from torch import Tensor

from eagle_dropmatch.cache import put_rows
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.tree import DraftTree, candidate_count

if TYPE_CHECKING:
    from eagle_dropmatch.drafts.budget import TreeBudget


@dataclass(frozen=True)
class TreeShape:
    """The size of a tree in EAGLE's terms.

    Args:
        total_token: nodes of the tree, root included (verification width).
        depth: draft forwards after the first; the tree has ``depth + 1`` draft levels.
        top_k: beam width; 1 drafts a chain.
    """

    total_token: int = 60
    depth: int = 7
    top_k: int = 10

    def __post_init__(self) -> None:
        for name, value, least in (
            ("total_token", self.total_token, 1),
            ("depth", self.depth, 0),
            ("top_k", self.top_k, 1),
        ):
            if value < least:
                raise UserError(f"{name} is {value}: expected at least {least}")

    @property
    def levels(self) -> int:
        """Draft levels, the most draft tokens that one step can accept."""
        return self.depth + 1

    @property
    def nodes(self) -> int:
        """Nodes of the trees that come out: ``total_token``, or all candidates if fewer."""
        return min(self.total_token, candidate_count(self.depth, self.top_k) + 1)


#: The most that trees of their own choice become where nothing else is said.
ADAPTIVE_TREE = TreeShape(total_token=64, depth=9, top_k=8)


@dataclass(frozen=True)
class DraftPrompt:
    """What a drafter gets to see when an answer begins."""

    tokens: Tensor  # [B, S] int64, right-padded prompts
    lengths: Sequence[int]
    features: Tensor  # [B, S, taps * D]
    roots: Tensor  # [B] int64, the first token of each answer


@dataclass(frozen=True)
class Observation:
    """What a step committed: the accepted path and the token after it."""

    path: Tensor  # [B, A] int64 node ids from the root down, padded with -1
    counts: Sequence[int]  # nodes kept a row, root included; 0 for a row that has ended
    tokens: Tensor  # [B, A] int64: the accepted draft tokens of the path, then the bonus token
    bonus: Tensor  # [B] int64, the next root
    features: Tensor  # [B, N, taps * D], at every node of the tree

    def rows(self, index: Tensor, kept: Sequence[int]) -> Observation:
        """Only these rows of the batch; ``kept`` are the same indices on the host."""
        return Observation(
            self.path[index],
            [self.counts[row] for row in kept],
            self.tokens[index],
            self.bonus[index],
            self.features[index.to(self.features.device)],
        )


class Drafter(ABC):
    """Proposes a tree a step for each row of a batch."""

    #: Set before an answer begins: whether trees shall carry the draft's logits over each node's
    #: children, over the tokens of ``vocabulary``.
    keep_logits: bool = False
    #: Set before an answer begins: what chooses the size of each step's trees, within the shape;
    #: None: the shape does.
    budget: TreeBudget | None = None

    @property
    def vocabulary(self) -> Tensor | None:
        """[V_draft] int64, the target's ids of the draft's tokens; None where it has no logits."""
        return None

    @abstractmethod
    def start(self, prompt: DraftPrompt) -> None:
        """Begin new answers; everything of earlier ones is forgotten."""

    @abstractmethod
    def propose(self) -> DraftTree:
        """A tree for each row, rooted at the row's last committed token."""

    @abstractmethod
    def observe(self, seen: Observation) -> None:
        """Take in what the last tree's verification committed."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch, in this order."""

    def describe(self) -> str:
        """What its costs hang on, beside the shape of its trees."""
        return type(self).__name__

    def pretend(self, context: int) -> None:
        """For timing: go on as if so many tokens a row had been read."""
        return

    @abstractmethod
    def join(self, seats: Sequence[int], guests: Self) -> None:
        """Go on with another drafter's rows, at these places of the batch (see ``put_rows``).

        ``guests`` has started its answers and proposed nothing yet. Comes after ``observe``.
        """


class NoDrafter(Drafter):
    """Proposes the root alone: plain decoding in the same loop."""

    def start(self, prompt: DraftPrompt) -> None:
        self._roots = prompt.roots

    def propose(self) -> DraftTree:
        return DraftTree.root_only(self._roots)

    def observe(self, seen: Observation) -> None:
        self._roots = seen.bonus

    def select(self, rows: Tensor) -> None:
        self._roots = self._roots[rows]

    def join(self, seats: Sequence[int], guests: Self) -> None:
        self._roots = put_rows(self._roots, seats, guests._roots)
