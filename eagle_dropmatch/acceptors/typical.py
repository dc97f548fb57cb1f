"""Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, Options, StepContext
from eagle_dropmatch.acceptors.checks import number
from eagle_dropmatch.acceptors.scores import Score, Scores, all_hold


class TypicalAcceptor(Acceptor):
    """Accept x iff p(x) > min(eps, delta * exp(-H(p))), H in nats, or it is the target's choice.

    Args:
        eps: the most that is ever asked for. 1 with an infinite ``delta`` is exact.
        delta: of the entropy-dependent bound.
    """

    name = "typical"
    strict: ClassVar[Options] = {"eps": 1.0, "delta": float("inf")}

    def __init__(self, eps: float = 0.09, delta: float = 0.3) -> None:
        self.eps = number("eps", eps, 0)
        self.delta = number("delta", delta, 0)

    def accept(self, context: StepContext) -> Tensor:
        return context.exact | all_hold(self.explain(context))

    def explain(self, context: StepContext) -> Scores:
        parents = context.parents
        bound = ((-parents.entropy).exp() * self.delta).clamp(max=self.eps)
        return {"p(x)": Score(parents.child_log_probs.exp(), ">", parents.to_children(bound))}
