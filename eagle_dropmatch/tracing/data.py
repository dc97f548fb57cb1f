"""What a trace page shows, as JSON: written once, compact, read by the page's script alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .token_text import pieces, token_text
from .trace import AnswerTrace, ScoreColumn, TracedStep

DIGITS = 5
"""Significant digits of a number; what it was compared with in full stands beside it."""


def page_data(
    traces: Sequence[tuple[str, AnswerTrace, Mapping[str, float]]],
    tokenizer: Any,
    header: Mapping[str, str],
) -> dict[str, Any]:
    """Everything of a page with one rule or two on the same prompt.

    Args:
        traces: each rule as it was given, its answer, and numbers of it beside those of the steps.
        header: what holds for all, by the name it is shown under.
    """
    shown = {token for _, trace, _ in traces for token in _tokens(trace)}
    return {
        "header": dict(header),
        "texts": {str(token): token_text(tokenizer, token) for token in sorted(shown)},
        "parting": parting([trace.tokens for _, trace, _ in traces]),
        "traces": [
            {
                "rule": rule,
                "numbers": {
                    name: _number(value) for name, value in {**numbers(trace), **more}.items()
                },
                "tokens": trace.tokens,
                "kinds": [origin.kind for origin in trace.origins],
                "places": [[origin.step, origin.node] for origin in trace.origins],
                "pieces": [list(piece) for piece in pieces(tokenizer, trace.tokens)],
                "steps": [_step(step) for step in trace.steps],
            }
            for rule, trace, more in traces
        ],
    }


def numbers(trace: AnswerTrace) -> dict[str, float]:
    """What the steps come to, by the name it is shown under."""
    stats = trace.stats
    return {
        "tau": stats.tau,
        "strict tau": stats.strict_tau,
        "relaxed share": stats.relaxed_share,
        "given up, nats a token": trace.given_up,
        "tokens": len(trace.tokens),
        "steps": len(trace.steps),
    }


def parting(answers: Sequence[Sequence[int]]) -> int | None:
    """The place of the first token that two answers do not share; None where there is none."""
    if len(answers) < 2 or answers[0] == answers[1]:
        return None
    both = zip(*answers, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(map(len, answers)))


def as_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _tokens(trace: AnswerTrace) -> Iterable[int]:
    yield from trace.tokens
    for step in trace.steps:
        yield from step.tokens
        yield from step.choice
        for column in step.columns:
            if column.token:
                for number in (*column.values, *(column.bounds or ())):
                    if math.isfinite(number):
                        yield int(number)


def _step(step: TracedStep) -> dict[str, Any]:
    return {
        "tokens": step.tokens,
        "parents": step.parents,
        "log_q": _numbers(step.draft_scores),
        "p": _numbers(step.p),
        "ranks": step.ranks,
        "exact": _bits(step.exact),
        "eligible": _bits(step.eligible),
        "allowed": _bits(step.allowed),
        "choice": step.choice,
        "choice_p": _numbers(step.choice_p),
        "sayable": None if step.sayable is None else _bits(step.sayable),
        "path": step.path,
        "strict": step.strict_path,
        "bonus": step.bonus,
        "scores": [_column(column) for column in step.columns],
    }


def _column(column: ScoreColumn) -> dict[str, Any]:
    found = {"name": column.name, "token": column.token, "values": _numbers(column.values)}
    if column.bounds is None or column.holds is None:
        return found
    # A root has no bound; where all others share one it is written once.
    one = len(set(column.bounds[1:])) == 1
    bounds = _number(column.bounds[1]) if one else _numbers(column.bounds)
    return {**found, "relation": column.relation, "bounds": bounds, "holds": _bits(column.holds)}


def _bits(values: Iterable[bool]) -> str:
    return "".join("01"[value] for value in values)


def _numbers(values: Iterable[float]) -> list[float | str | None]:
    return [_number(value) for value in values]


def _number(value: float) -> float | str | None:
    """JSON knows no NaN, which becomes null, and no infinities, which become words."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return int(value) if value == int(value) else float(f"{value:.{DIGITS}g}")
