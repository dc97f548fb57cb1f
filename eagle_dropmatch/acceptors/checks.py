"""Checks of rules' options, each one line that says what was given and what was expected."""

from __future__ import annotations

import math
from typing import Any

from eagle_dropmatch.errors import UserError


def number(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
) -> float:
    """``value`` if it is a number between the bounds, which belong to the range unless open."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    good = good and (value > low if open_low else value >= low)
    if not (good and value <= high):
        left = "(" if open_low else "["
        raise UserError(f"{name} is {value!r}: expected a number in {left}{low:g}, {high:g}]")
    return float(value)


def count(name: str, value: Any, least: int = 1) -> int:
    """``value`` if it is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} is {value!r}: expected a whole number of at least {least}")
    return value


def one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    """``value`` if it is one of the ``known`` names."""
    if value not in known:
        raise UserError(
            f"{name} is {value!r}: expected {' or '.join(repr(each) for each in known)}"
        )
    return str(value)
