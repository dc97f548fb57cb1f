"""Acceptance rules. A new rule is one file beside this one and one line in ``ACCEPTORS``."""

from __future__ import annotations

import ast
import copy
import inspect
import math
from typing import Any

from eagle_dropmatch.acceptors.base import Acceptor, PromptContext, StepContext, Verdict
from eagle_dropmatch.acceptors.compose import AllOf, AnyOf, FloorAcceptor, OvershootAcceptor
from eagle_dropmatch.acceptors.dropmatch import (
    DropMatchAcceptor,
    JSAcceptor,
    MajorityAcceptor,
    NaiveAcceptor,
)
from eagle_dropmatch.acceptors.entropy_gate import EntropyGateAcceptor
from eagle_dropmatch.acceptors.exact import ExactAcceptor
from eagle_dropmatch.acceptors.flip import FlipProbabilityAcceptor
from eagle_dropmatch.acceptors.judges import FuzzyJSAcceptor, KLJudgeAcceptor
from eagle_dropmatch.acceptors.lenience import LenienceAcceptor
from eagle_dropmatch.acceptors.margin import MarginAcceptor, MarsAcceptor, MinPAcceptor
from eagle_dropmatch.acceptors.regret_budget import RegretBudgetAcceptor
from eagle_dropmatch.acceptors.sampling import SamplingAcceptor
from eagle_dropmatch.acceptors.thresholds import ThresholdsAcceptor
from eagle_dropmatch.acceptors.top_n import RelaxedTopNAcceptor, TopKAcceptor
from eagle_dropmatch.acceptors.typical import TypicalAcceptor
from eagle_dropmatch.errors import UserError

ACCEPTORS: dict[str, type[Acceptor]] = {
    "exact": ExactAcceptor,
    "sampling": SamplingAcceptor,
    "naive": NaiveAcceptor,
    "majority": MajorityAcceptor,
    "js": JSAcceptor,
    "dropmatch": DropMatchAcceptor,
    "lenience": LenienceAcceptor,
    "typical": TypicalAcceptor,
    "min_p": MinPAcceptor,
    "margin": MarginAcceptor,
    "mars": MarsAcceptor,
    "top_k": TopKAcceptor,
    "relaxed_top_n": RelaxedTopNAcceptor,
    "thresholds": ThresholdsAcceptor,
    "fuzzy_js": FuzzyJSAcceptor,
    "kl_judge": KLJudgeAcceptor,
    "entropy_gate": EntropyGateAcceptor,
    "regret_budget": RegretBudgetAcceptor,
    "flip_probability": FlipProbabilityAcceptor,
}
#: What rules can be put together from, beside rules; alone they make little sense.
PARTS: dict[str, type[Acceptor]] = {
    "any_of": AnyOf,
    "all_of": AllOf,
    "floor": FloorAcceptor,
    "overshoot": OvershootAcceptor,
}


def make_acceptor(rule: str, **options: Any) -> Acceptor:
    """Build a rule from its name, or from an expression; anything unknown is one clear error.

    Args:
        rule: a name of ``ACCEPTORS``, or a call that may nest, as in
            ``any_of(naive(K=3), margin(kappa=0.5))`` or ``all_of(naive(), floor(floor=1e-3))``.
        options: of the rule; not beside an expression's own.
    """
    if rule.isidentifier():
        return _build(rule, (), options)
    try:
        parsed = ast.parse(rule.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        parsed = None
    if not isinstance(parsed, ast.Call):
        raise UserError(
            f"acceptor {rule!r}: expected a name, or a rule with its options such as "
            "margin(kappa=0.5)"
        )
    if options:
        raise UserError(
            f"acceptor {rule!r} was given {', '.join(options)} beside its own options: write all "
            "of them into the brackets"
        )
    return _from_call(parsed, rule)


def _from_call(call: ast.expr, text: str) -> Acceptor:
    if isinstance(call, ast.Name):
        return _build(call.id, (), {})
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise UserError(f"acceptor {text!r}: {ast.unparse(call)} is not a rule")
    name = call.func.id
    if call.args and name not in ("any_of", "all_of"):
        raise UserError(
            f"acceptor {text!r}: {name} takes its options by name, as in {name}(option=value)"
        )
    options = {}
    for keyword in call.keywords:
        options[str(keyword.arg)] = _value(keyword.value)
    return _build(name, tuple(_from_call(each, text) for each in call.args), options)


def _value(written: ast.expr) -> Any:
    """A literal, inf or -inf, or a word that goes without quotes."""
    text = ast.unparse(written)
    if text in ("inf", "-inf"):
        return float(text)
    try:
        return ast.literal_eval(written)
    except ValueError:
        return text


def _build(name: str, rules: tuple[Acceptor, ...], options: dict[str, Any]) -> Acceptor:
    rule = {**ACCEPTORS, **PARTS}.get(name)
    if rule is None:
        known = ", ".join((*ACCEPTORS, *PARTS))
        raise UserError(f"unknown acceptor {name!r}: expected one of {known}")
    takes = option_names(rule)
    unknown = sorted(set(options) - set(takes))
    if unknown:
        raise UserError(
            f"acceptor {name!r} has no option {', '.join(unknown)}: it takes "
            f"{', '.join(takes) or 'none'}"
        )
    return rule(*rules, **options)


def option_names(rule: type[Acceptor]) -> list[str]:
    """The options that a rule takes by name."""
    return [
        name
        for name, parameter in inspect.signature(rule).parameters.items()
        if parameter.kind is not parameter.VAR_POSITIONAL
        and parameter.kind is not parameter.VAR_KEYWORD
    ]


def describe(rule: Acceptor) -> dict[str, Any]:
    """A rule's options with their values, also those that nobody gave, for records."""
    found = {name: value for name, value in vars(rule).items() if name in option_names(type(rule))}
    rules = getattr(rule, "rules", None)
    if rules is not None:
        found["rules"] = [{"rule": each.name, **describe(each)} for each in rules]
    # JSON has no infinities.
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in found.items()
    }


def parts(rule: Acceptor) -> list[Acceptor]:
    """A rule and the rules that it is made of."""
    inner: tuple[Acceptor, ...] = getattr(rule, "rules", ())
    return [rule, *(each for part in inner for each in parts(part))]


def seed_of(rule: Acceptor) -> int | None:
    """The seed of the first part of a rule that has one; None where nothing is random."""
    return next((vars(part)["seed"] for part in parts(rule) if _has_seed(part)), None)


def with_seed(rule: Acceptor, seed: int) -> Acceptor:
    """A copy of the rule whose random parts draw under this seed."""
    rule = copy.deepcopy(rule)
    for part in parts(rule):
        if _has_seed(part):
            vars(part)["seed"] = seed
    return rule


def _has_seed(rule: Acceptor) -> bool:
    return "seed" in option_names(type(rule))


__all__ = [
    "ACCEPTORS",
    "PARTS",
    "Acceptor",
    "ExactAcceptor",
    "NaiveAcceptor",
    "PromptContext",
    "StepContext",
    "Verdict",
    "describe",
    "make_acceptor",
    "option_names",
    "parts",
    "seed_of",
    "with_seed",
]
