"""Rules that compare the draft's distribution with the target's."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, Options, StepContext
from eagle_dropmatch.acceptors.checks import number
from eagle_dropmatch.acceptors.divergence import js_from_draft, kl_to_draft
from eagle_dropmatch.sampling import Scores


class _Judge(Acceptor):
    """Accept every child of a node where draft and target are close; elsewhere be exact."""

    needs_draft = True

    def accept(self, context: StepContext) -> Tensor:
        parents = context.parents
        if not parents.count:
            return context.exact
        (log_q, ids), close = context.draft, []
        for part, scores in parents.parts():
            log_p = Scores(scores.values - parents.log_z[part, None], scores.ids)
            close.append(self.close(log_q[part], ids, log_p.over(context.logits.shape[-1])))
        return context.exact | parents.to_children(torch.cat(close))

    @abstractmethod
    def close(self, log_q: Tensor, ids: Tensor, log_p: Tensor) -> Tensor:
        """[M] bool, from log q [M, V_draft] over the tokens ``ids`` and log p [M, V]."""


class FuzzyJSAcceptor(_Judge):
    """Accept x iff JS(p, q) < threshold, or it is the target's choice (arXiv 2502.20704).

    Args:
        threshold: in nats; 0 is exact.
    """

    name = "fuzzy_js"
    strict: ClassVar[Options] = {"threshold": 0.0}

    def __init__(self, threshold: float = 0.2) -> None:
        self.threshold = number("threshold", threshold, 0)

    def close(self, log_q: Tensor, ids: Tensor, log_p: Tensor) -> Tensor:
        return js_from_draft(log_q, ids, log_p) < self.threshold


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

    def close(self, log_q: Tensor, ids: Tensor, log_p: Tensor) -> Tensor:
        unsure = log_p.amax(-1).exp() <= self.confidence
        return unsure & (kl_to_draft(log_p, ids, log_q) < self.threshold)
