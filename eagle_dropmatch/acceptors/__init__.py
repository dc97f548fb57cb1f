"""Acceptance rules. A new rule is one file beside this one and one line in ``ACCEPTORS``."""

from __future__ import annotations

import inspect
from typing import Any

from eagle_dropmatch.acceptors.base import Acceptor, PromptContext, StepContext, Verdict
from eagle_dropmatch.acceptors.dropmatch import NaiveAcceptor
from eagle_dropmatch.acceptors.exact import ExactAcceptor
from eagle_dropmatch.errors import UserError

ACCEPTORS: dict[str, type[Acceptor]] = {
    "exact": ExactAcceptor,
    "naive": NaiveAcceptor,
}


def make_acceptor(name: str, **options: Any) -> Acceptor:
    """Build a rule by its name; unknown names and options are one clear error."""
    if name not in ACCEPTORS:
        raise UserError(f"unknown acceptor {name!r}: expected one of {', '.join(ACCEPTORS)}")
    rule = ACCEPTORS[name]
    known = [p for p in inspect.signature(rule).parameters if p not in ("args", "kwargs")]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UserError(
            f"acceptor {name!r} has no option {', '.join(unknown)}: it takes "
            f"{', '.join(known) or 'none'}"
        )
    return rule(**options)


__all__ = [
    "ACCEPTORS",
    "Acceptor",
    "ExactAcceptor",
    "NaiveAcceptor",
    "PromptContext",
    "StepContext",
    "Verdict",
    "make_acceptor",
]
