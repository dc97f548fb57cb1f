"""What a rule looks at in each node and what it compares that with, for verdicts and traces."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

#: How a value stands to its bound where a comparison holds.
RELATIONS: dict[str, Callable[[Tensor, Tensor | float], Tensor]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
}


class Score(NamedTuple):
    """A number of every node, with the bound that a rule holds against it.

    What stands at roots and padding is not read, and NaN says that a node has no such number: no
    comparison with it holds.
    """

    value: Tensor  # [B, N]
    relation: str = ""  # of RELATIONS; empty: shown beside the others, compared with nothing
    bound: Tensor | float = 0.0  # [B, N], or the same for all
    token: bool = False  # whether value and bound are token ids

    @property
    def holds(self) -> Tensor:
        """[B, N] bool: does the value stand to its bound as it should?"""
        return RELATIONS[self.relation](self.value, self.bound)


Scores = Mapping[str, Score]


def all_hold(scores: Scores) -> Tensor:
    """[B, N] bool: do all comparisons hold? At least one of the scores is compared."""
    return reduce(torch.logical_and, [each.holds for each in scores.values() if each.relation])
