"""FLy's deferred verification (arXiv 2511.22972) on trees."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, Options, StepContext
from eagle_dropmatch.acceptors.checks import count, number, one_of
from eagle_dropmatch.acceptors.scores import Score, Scores, all_hold
from eagle_dropmatch.tree import ancestor_matrix, path_sums


class EntropyGateAcceptor(Acceptor):
    """Accept a mismatch where the target is unsure and agrees with all that follows.

    A node that is not the target's choice is kept iff the entropy of its parent's distribution,
    divided by ln V, is at least ``theta``, some path of ``window`` matches follows it in the tree,
    and no other mismatch stands within ``window`` nodes before it. A mismatch so near the leaves
    that the window does not fit is not kept: nobody has seen how the target takes it. At a
    temperature above 0 the matches that follow are of the target's samples, whose numbers come
    again in the next step.

    Args:
        theta: at least 0; above 1 it is exact.
        window: matches that must follow; 0 asks for none.
        entropy: ``"full"``, the paper's; ``"top3"``, the released code's: over the three likeliest
            tokens, not renormalised and not divided by ln V.
    """

    name = "entropy_gate"
    strict: ClassVar[Options] = {"theta": math.inf}

    def __init__(self, theta: float = 0.3, window: int = 6, entropy: str = "full") -> None:
        self.theta = number("theta", theta, 0)
        self.window = count("window", window, 0)
        self.entropy = one_of("entropy", entropy, ("full", "top3"))

    def accept(self, context: StepContext) -> Tensor:
        scores = self.explain(context)
        return context.exact | all_hold(scores) if scores else context.exact

    def explain(self, context: StepContext) -> Scores:
        parents, tree = context.parents, context.tree
        if not parents.count:
            return {}
        if self.entropy == "full":
            name, unsure = "H / ln V", parents.entropy / math.log(context.logits.shape[-1])
        else:
            name = "H of the top 3"
            unsure = torch.special.entr(parents.top_log_probs(3).exp()).sum(-1)
        missed = tree.valid & (tree.parents >= 0) & ~context.exact
        within = ancestor_matrix(tree.parents, tree.valid, tree.max_depth)  # i holds ancestor j
        apart = tree.depths[:, :, None] - tree.depths[:, None]
        misses = path_sums(tree, missed.long())
        # From j down to i nothing but matches: as many misses up to i as up to j.
        clean = within & (misses[:, :, None] == misses[:, None])
        followed = torch.where(clean, apart, 0).amax(1)
        near = within & missed[:, None] & (apart > 0) & (apart <= self.window)
        return {
            name: Score(parents.to_children(unsure), ">=", self.theta),
            "matches that follow": Score(followed, ">=", self.window),
            "other mismatches near before": Score(near.sum(2), "<", 1),
        }
