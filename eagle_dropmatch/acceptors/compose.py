"""Rules made of rules, and the two guards that are of use only with others."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import (
    Acceptor,
    PromptContext,
    RowState,
    StepContext,
    joined_states,
)
from eagle_dropmatch.acceptors.checks import number
from eagle_dropmatch.acceptors.scores import Score, Scores, all_hold
from eagle_dropmatch.errors import UserError


class _Composite(Acceptor):
    """Several rules at once. Each keeps its own state."""

    def __init__(self, *rules: Acceptor) -> None:
        if not rules or not all(isinstance(rule, Acceptor) for rule in rules):
            raise UserError(
                f"{self.name} was given {list(rules)!r}: expected one or more acceptance rules"
            )
        if any(getattr(rule, "p_drop", None) == "running" for rule in rules):
            raise UserError(f"{self.name}: a running p_drop follows its own paths, not shared ones")
        self.rules = rules
        self.needs_draft = any(rule.needs_draft for rule in rules)

    def start(self, context: PromptContext) -> RowState:
        return joined_states(self.rules, context)

    def _verdicts(self, context: StepContext) -> list[Tensor]:
        return [rule.accept(context.of_part(i)) for i, rule in enumerate(self.rules)]

    def explain(self, context: StepContext) -> Scores:
        return {
            f"{i + 1} {rule.name}: {name}": score
            for i, rule in enumerate(self.rules)
            for name, score in rule.explain(context.of_part(i)).items()
        }


class AnyOf(_Composite):
    """Accept a node iff one of the rules does."""

    name = "any_of"

    def __init__(self, *rules: Acceptor) -> None:
        super().__init__(*rules)
        self.lossless = all(rule.lossless for rule in rules)

    def accept(self, context: StepContext) -> Tensor:
        return reduce(torch.logical_or, self._verdicts(context))


class AllOf(_Composite):
    """Accept a node iff all of the rules do.

    A guard among them vetoes tokens that exact acceptance would keep, too: they then come as the
    bonus, one step later.
    """

    name = "all_of"

    def __init__(self, *rules: Acceptor) -> None:
        super().__init__(*rules)
        # Fewer of the target's own tokens are still its own.
        self.lossless = any(rule.lossless for rule in rules)

    def accept(self, context: StepContext) -> Tensor:
        return reduce(torch.logical_and, self._verdicts(context))


class FloorAcceptor(Acceptor):
    """Accept x iff p(x) >= floor, whatever else: a guard for ``all_of`` (PAD's is 1e-4).

    Args:
        floor: in [0, inf]; above 1 nothing passes.
    """

    name = "floor"

    def __init__(self, floor: float = 1e-4) -> None:
        self.floor = number("floor", floor, 0)

    def accept(self, context: StepContext) -> Tensor:
        return all_hold(self.explain(context))

    def explain(self, context: StepContext) -> Scores:
        return {"p(x)": Score(context.parents.child_log_probs.exp(), ">=", self.floor)}


class OvershootAcceptor(Acceptor):
    """Accept x iff the draft overrates it at most so much: q(x) <= cap * p(x). For ``all_of``.

    q is the draft's probability of x among its own vocabulary, which the tree's scores hold.

    Args:
        cap: of q / p, at least 0.
    """

    name = "overshoot"

    def __init__(self, cap: float = 10.0) -> None:
        self.cap = number("cap", cap, 0)

    def accept(self, context: StepContext) -> Tensor:
        return all_hold(self.explain(context))

    def explain(self, context: StepContext) -> Scores:
        tree = context.tree
        above = tree.scores.gather(1, tree.parents.clamp(min=0))
        q = (tree.scores - above).exp()
        return {"q(x)": Score(q, "<=", self.cap * context.parents.child_log_probs.exp())}
