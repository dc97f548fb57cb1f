"""Rules that compare the draft's distribution with the target's."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, Options, StepContext
from eagle_dropmatch.acceptors.checks import number
from eagle_dropmatch.acceptors.divergence import js_from_draft, kl_to_draft
from eagle_dropmatch.acceptors.scores import Score, Scores, all_hold
from eagle_dropmatch.sampling import Scores as TokenScores


class _Judge(Acceptor):
    """Accept every child of a node where draft and target are close; elsewhere be exact."""

    needs_draft = True

    def accept(self, context: StepContext) -> Tensor:
        scores = self.explain(context)
        return context.exact | all_hold(scores) if scores else context.exact

    def explain(self, context: StepContext) -> Scores:
        parents = context.parents
        if not parents.count:
            return {}
        (log_q, ids), measured = context.draft, []
        for part, scores in parents.parts():
            log_p = TokenScores(scores.values - parents.log_z[part, None], scores.ids)
            measured.append(self.measure(log_q[part], ids, log_p.over(context.logits.shape[-1])))
        whole = [torch.cat(parts) for parts in zip(*measured, strict=True)]
        return {
            name: Score(parents.to_children(values), relation, bound)
            for values, (name, relation, bound) in zip(whole, self.bounds(), strict=True)
        }

    @abstractmethod
    def measure(self, log_q: Tensor, ids: Tensor, log_p: Tensor) -> tuple[Tensor, ...]:
        """What is compared, each [M], from log q [M, V_draft] over ``ids`` and log p [M, V]."""

    @abstractmethod
    def bounds(self) -> tuple[tuple[str, str, float], ...]:
        """The name, relation and bound of each number that ``measure`` gives."""


class FuzzyJSAcceptor(_Judge):
    """Accept x iff JS(p, q) < threshold, or it is the target's choice (arXiv 2502.20704).

    Args:
        threshold: in nats; 0 is exact.
    """

    name = "fuzzy_js"
    strict: ClassVar[Options] = {"threshold": 0.0}

    def __init__(self, threshold: float = 0.2) -> None:
        self.threshold = number("threshold", threshold, 0)

    def measure(self, log_q: Tensor, ids: Tensor, log_p: Tensor) -> tuple[Tensor, ...]:
        return (js_from_draft(log_q, ids, log_p),)

    def bounds(self) -> tuple[tuple[str, str, float], ...]:
        return (("JS(p, q)", "<", self.threshold),)


class KLJudgeAcceptor(_Judge):
    """Accept x iff it is the target's choice, or max p <= confidence and KL(p, q) < threshold.

    JuDi (arXiv 2601.04766). A draft of a reduced vocabulary has q = 0 outside it, and p never has:
    p's mass there counts as one token to which q gives 1e-6.

    Args:
        threshold: in nats; 0 is exact.
        confidence: in [0, 1].
    """

    name = "kl_judge"
    strict: ClassVar[Options] = {"threshold": 0.0}

    def __init__(self, threshold: float = 0.3, confidence: float = 0.9) -> None:
        self.threshold = number("threshold", threshold, 0)
        self.confidence = number("confidence", confidence, 0, 1)

    def measure(self, log_q: Tensor, ids: Tensor, log_p: Tensor) -> tuple[Tensor, ...]:
        return log_p.amax(-1).exp(), kl_to_draft(log_p, ids, log_q)

    def bounds(self) -> tuple[tuple[str, str, float], ...]:
        return (("max p", "<=", self.confidence), ("KL(p, q)", "<", self.threshold))
