"""SGLang's two thresholds of speculative sampling."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, Options, StepContext
from eagle_dropmatch.acceptors.checks import number
from eagle_dropmatch.acceptors.heads import mask_uniforms


class ThresholdsAcceptor(Acceptor):
    """Walking the siblings: accept x iff p(x) >= single, or coin <= (p so far) / accumulated.

    "So far" is the sum over x and the siblings before it; one coin decides for all children of a
    node. Greedy there is no coin: the sum itself must reach ``accumulated``. The target's own
    choice always passes; at the thresholds' 1 nothing else does, which is exact.

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
        parents, tree = context.parents, context.tree
        p = parents.child_log_probs.exp().where(tree.valid & (tree.parents >= 0), 0.0)
        accepted = context.exact
        # Comparing with 1 would let through what merely rounds to it.
        if self.single < 1:
            accepted = accepted | (p >= self.single)
        if self.accumulated < 1:
            same = tree.parents[:, :, None] == tree.parents[:, None]
            so_far = (p[:, None] * same.tril()).sum(-1)
            if context.sampler.greedy:
                return accepted | (so_far >= self.accumulated)
            coins = mask_uniforms(
                context.row_keys, self.seed, context.step, (p.shape[1],), p.device
            )
            coins = coins.gather(1, tree.parents.clamp(min=0))
            accepted = accepted | ((coins <= so_far / self.accumulated) & (p > 0))
        return accepted
