"""Rules that accept whatever ranks high with the target."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, Options, StepContext
from eagle_dropmatch.acceptors.checks import count, number


class TopKAcceptor(Acceptor):
    """Accept x iff fewer than k tokens are likelier, or it is the target's choice.

    Args:
        k: 1 is exact, but for tokens that tie with the argmax.
    """

    name = "top_k"
    strict: ClassVar[Options] = {"k": 1}

    def __init__(self, k: int = 2) -> None:
        self.k = count("k", k)

    def accept(self, context: StepContext) -> Tensor:
        return context.exact | in_top(context, self.k)


class RelaxedTopNAcceptor(Acceptor):
    """Accept x iff it is in the target's top N and p(x) > max p - delta (TensorRT-LLM).

    Args:
        n: 1 is exact.
        delta: in [0, 1].
    """

    name = "relaxed_top_n"
    strict: ClassVar[Options] = {"n": 1}

    def __init__(self, n: int = 10, delta: float = 0.6) -> None:
        self.n = count("n", n)
        self.delta = number("delta", delta, 0, 1)

    def accept(self, context: StepContext) -> Tensor:
        parents = context.parents
        near = parents.child_log_probs.exp() > parents.to_children(parents.best.exp()) - self.delta
        return context.exact | (in_top(context, self.n) & near)


def in_top(context: StepContext, n: int) -> Tensor:
    """Fewer than ``n`` tokens are likelier, and x can be said at all: [B, N] bool.

    The top 1 is the target's choice and no token that ties with it.
    """
    if n == 1:
        return context.exact
    parents = context.parents
    return (parents.child_ranks < n) & parents.child_scores.isfinite()
