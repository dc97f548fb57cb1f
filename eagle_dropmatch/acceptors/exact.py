"""Plain EAGLE-3, greedy: a token is kept only if it is the target's own choice."""

from __future__ import annotations

from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, StepContext, exact_matches
from eagle_dropmatch.target import TargetOutput
from eagle_dropmatch.tree import DraftTree


class ExactAcceptor(Acceptor):
    """Accept a node iff it is the clean argmax at its parent (arXiv 2503.01840)."""

    name = "exact"
    lossless = True

    def accept(self, tree: DraftTree, output: TargetOutput, context: StepContext) -> Tensor:
        return exact_matches(tree, context.argmax)
