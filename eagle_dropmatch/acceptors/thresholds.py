"""SGLang's two thresholds of speculative sampling."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, Options, StepContext
from eagle_dropmatch.acceptors.checks import number
from eagle_dropmatch.acceptors.heads import mask_uniforms
from eagle_dropmatch.acceptors.scores import Score, Scores, all_hold


class ThresholdsAcceptor(Acceptor):
    """Walking the siblings: accept x iff p(x) >= single, or coin <= (p so far) / accumulated.

    "So far" is the sum over x and the siblings before it, and the first sibling that reaches the
    coin is taken. The target's own choice always passes and has its part in these probabilities:
    where it is none of the children, a coin decides whether one of them is taken all the same, to
    make up what the walk gives a sibling beyond its p, as far as there is room. Greedy there is no
    coin: the first sibling whose sum reaches ``accumulated`` is taken. At the thresholds' 1 nothing
    but the target's choice passes, which is exact.

    Args:
        single: in (0, 1].
        accumulated: in (0, 1].
        seed: of the coins' own generators.
    """

    name = "thresholds"
    strict: ClassVar[Options] = {"single": 1.0, "accumulated": 1.0}

    def __init__(self, single: float = 0.3, accumulated: float = 1.0, seed: int = 0) -> None:
        self.single = number("single", single, 0, 1, open_low=True)
        self.accumulated = number("accumulated", accumulated, 0, 1, open_low=True)
        self.seed = seed

    def accept(self, context: StepContext) -> Tensor:
        p, accepted = self._probabilities(context), context.exact
        for scores in (self._alone(p), self._walk(context, p)):
            if scores:
                accepted = accepted | all_hold(scores)
        return accepted

    def explain(self, context: StepContext) -> Scores:
        p = self._probabilities(context)
        return {**self._alone(p), **self._walk(context, p)}

    def _probabilities(self, context: StepContext) -> Tensor:
        """[B, N] float32, 0 at the root and at padding."""
        tree = context.tree
        p = context.parents.child_log_probs.exp()
        return p.where(tree.valid & (tree.parents >= 0), 0.0)

    def _alone(self, p: Tensor) -> Scores:
        """What lets a token pass whatever its siblings are."""
        # Comparing with 1 would let through what merely rounds to it.
        return {"p(x)": Score(p, ">=", self.single)} if self.single < 1 else {}

    def _walk(self, context: StepContext, p: Tensor) -> Scores:
        """What tells the sibling that the walk takes; it is none where there is NaN."""
        if self.accumulated == 1:
            return {}
        tree = context.tree
        same = tree.parents[:, :, None] == tree.parents[:, None]
        so_far = (p[:, None] * same.tril()).sum(-1)
        if context.sampler.greedy:
            before = (so_far - p).masked_fill(p == 0, torch.nan)
            return {
                "p so far": Score(so_far, ">=", self.accumulated),
                "p before x": Score(before, "<", self.accumulated),
            }
        reach, before = ((each / self.accumulated).clamp(max=1) for each in (so_far, so_far - p))
        missed = ~(same & context.exact[:, None]).any(-1)
        # What the walk gives a sibling beyond what the target's own sample gives it, among the
        # cases in which that sample is none of the children.
        beyond = (reach - before - p).clamp(min=0)
        outside = (1 - (p[:, None] * same).sum(-1)).clamp(min=1e-9)
        share = beyond / outside
        upper = (share[:, None] * same.tril()).sum(-1)
        coins = mask_uniforms(
            context.row_keys, self.seed, context.steps, (p.shape[1],), p.device, self.name
        )
        coins = coins.gather(1, tree.parents.clamp(min=0)).masked_fill(~missed, torch.nan)
        return {
            "coin": Score(coins, "<", upper),
            "coin again": Score(coins, ">=", upper - share),
        }
