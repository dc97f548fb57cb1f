"""Plain EAGLE-3: a token is kept only if it is the target's own choice."""

from __future__ import annotations

from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, StepContext


class ExactAcceptor(Acceptor):
    """Accept a node iff it is what the target says at its parent (arXiv 2503.01840).

    Greedy, that is the clean argmax. At a temperature above 0 it is the target's sample: see
    ``SamplingAcceptor``.
    """

    name = "exact"
    lossless = True

    def accept(self, context: StepContext) -> Tensor:
        return context.exact
