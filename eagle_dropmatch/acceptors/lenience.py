"""Leviathan's lenience (arXiv 2211.17192, section 4.2) for proposals that are not drawn."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, Options, StepContext
from eagle_dropmatch.acceptors.checks import number
from eagle_dropmatch.acceptors.heads import mask_uniforms
from eagle_dropmatch.acceptors.scores import Score, Scores, all_hold


class LenienceAcceptor(Acceptor):
    """Accept x where a token ``lenience`` times as likely would have been accepted.

    Greedy: p(x) > lenience * max p, or x is the argmax. At a temperature above 0: with probability
    min(1, p(x) / lenience), each node by itself. A tree's proposals are chosen, not drawn from q,
    so q(x) counts as 1. The target's own sample always passes and accounts for p(x) of it; a coin
    decides the rest, so that 1 leaves lossless sampling, bit for bit.

    Args:
        lenience: in (0, 1]; 1 is exact.
        seed: of the coins' own generators.
    """

    name = "lenience"
    strict: ClassVar[Options] = {"lenience": 1.0}

    def __init__(self, lenience: float = 0.3, seed: int = 0) -> None:
        self.lenience = number("lenience", lenience, 0, 1, open_low=True)
        self.seed = seed

    def accept(self, context: StepContext) -> Tensor:
        return context.exact | all_hold(self.explain(context))

    def explain(self, context: StepContext) -> Scores:
        parents = context.parents
        log_p = parents.child_log_probs
        if context.sampler.greedy:
            best = parents.to_children(parents.best)
            return {"ln p(x)": Score(log_p, ">", best + math.log(self.lenience))}
        p = log_p.exp()
        rest = ((p / self.lenience).clamp(max=1) - p) / (1 - p).clamp(min=1e-12)
        coins = mask_uniforms(
            context.row_keys, self.seed, context.steps, (p.shape[1],), p.device, self.name
        )
        return {"coin": Score(coins, "<", rest)}
