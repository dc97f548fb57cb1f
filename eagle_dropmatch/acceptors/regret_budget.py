"""A budget of regret for each block of drafted tokens (ASD, arXiv 2608.03447)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, Options, StepContext
from eagle_dropmatch.acceptors.checks import count, number
from eagle_dropmatch.acceptors.scores import Score, Scores, all_hold
from eagle_dropmatch.tree import path_sums


class RegretBudgetAcceptor(Acceptor):
    """Accept mismatches while what they give up in logits stays within a budget.

    The gap of a node is max z - z(x) at its parent, of the logits before any temperature. A path of
    a step may hold mismatches as long as their gaps add up to at most ``budget``, there are at most
    ``mismatches`` of them, and each one's gap is at most ``gap`` times the levels from it to the
    end of the block, itself included: an early mismatch may cost more than a late one, since more
    can be won behind it.

    Args:
        budget: logits, at least 0.
        gap: logits a level, at least 0.
        mismatches: 0 is exact.
    """

    name = "regret_budget"
    strict: ClassVar[Options] = {"mismatches": 0}

    def __init__(self, budget: float = 8.0, gap: float = 0.25, mismatches: int = 2) -> None:
        self.budget = number("budget", budget, 0)
        self.gap = number("gap", gap, 0)
        self.mismatches = count("mismatches", mismatches, 0)

    def accept(self, context: StepContext) -> Tensor:
        scores = self.explain(context)
        return context.exact | all_hold(scores) if scores else context.exact

    def explain(self, context: StepContext) -> Scores:
        parents, tree = context.parents, context.tree
        missed = tree.valid & (tree.parents >= 0) & ~context.exact
        if not parents.count:
            return {}
        logits = parents.logits
        best = parents.to_children(logits.amax(-1).float())
        gaps = (best - logits[parents.slot, tree.tokens].float()).where(missed, 0.0)
        # The block's end is the deepest level that the tree was grown for.
        deepest = tree.depths.amax(1, keepdim=True) if tree.levels is None else tree.levels
        left = deepest - tree.depths + 1
        spent, number_missed = path_sums(tree, gaps), path_sums(tree, missed.long())
        return {
            "regret on the path": Score(spent, "<=", self.budget),
            "mismatches on the path": Score(number_missed, "<=", self.mismatches),
            "regret of x": Score(gaps, "<=", self.gap * left),
        }
