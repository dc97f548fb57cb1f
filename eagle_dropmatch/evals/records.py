"""Answer records: one JSON object a question and arm.

The fields are a superset of FastChat's, EAGLE's and Spec-Bench's answer files, so that their
scripts read ours. Lists per step (``accept_lengths`` and its like) run through all turns of the
answer without a break, as Spec-Bench has them; ``decoding_steps`` says how many belong to each
turn. ``new_tokens`` counts what the steps committed, so that new_tokens / (idxs + 1) is tau;
``output_tokens`` counts the prefill's token as well and is the number of ids in the answer.
``log_probability`` (nats) and ``strays`` (place, probability, rank) are the target's view of it.
In a batch the times of an answer are its shares of the batch's, which add up to it; ``latency`` is
what the user waited, from the reading of the prompt to the answer's end.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..stats import RowStats, acceptance_histogram, eagle_idxs
from .arms import Turn
from .base import Question
from .plan import ArmSpec
from .quality import TurnQuality


@dataclass(frozen=True)
class Choice:
    """One repeat: the turns of an answer, their texts, and the target's view of them."""

    turns: tuple[Turn, ...]
    texts: tuple[str, ...]
    qualities: tuple[TurnQuality, ...]


@dataclass(frozen=True)
class QuestionResult:
    """What the statistics need of one record.

    Tokens and steps are the first repeat's (greedy decoding and a seeded rule repeat themselves),
    times are medians over the repeats.
    """

    question_id: int | str
    output_ids: tuple[tuple[int, ...], ...]
    rows: tuple[RowStats, ...]
    wall_seconds: float
    prefill_seconds: float | None
    decode_seconds: float | None
    repeats_wall_seconds: tuple[float, ...]
    log_probability: float
    """Of all turns' answers to the target, in nats."""
    strays: tuple[tuple[float, int], ...]
    """(probability, rank) of every token that was not the target's argmax."""
    latencies: tuple[float, ...] = ()
    """Of each turn, in a batch; seconds."""
    covered: int | None = None
    """Answer tokens that the draft can say; None where that is not recorded."""

    @property
    def output_tokens(self) -> int:
        return sum(row.output_tokens for row in self.rows)


def make_record(
    spec: ArmSpec, question: Question, choices: Sequence[Choice], model_id: str
) -> dict[str, Any]:
    """The JSON object of one question and arm; one choice a repeat."""
    return {
        "question_id": question.question_id,
        "category": question.category,
        "answer_id": uuid.uuid4().hex,
        "model_id": model_id,
        "arm": spec.name,
        "acceptance": spec.acceptance,
        "lossy": spec.lossy,
        "choices": [_choice_record(spec, index, choice) for index, choice in enumerate(choices)],
        "tstamp": time.time(),
    }


def _choice_record(spec: ArmSpec, index: int, choice: Choice) -> dict[str, Any]:
    turns = choice.turns
    rows = [turn.row for turn in turns]
    return {
        "index": index,
        "turns": list(choice.texts),
        "new_tokens": [sum(row.accept_lengths) for row in rows],
        "idxs": [eagle_idxs(row) for row in rows],
        "wall_time": [turn.wall_seconds for turn in turns],
        "decoding_steps": [len(row.accept_lengths) for row in rows],
        "accept_lengths": [n for row in rows for n in row.accept_lengths],
        "output_tokens": [row.output_tokens for row in rows],
        "prompt_tokens": [row.prompt_tokens for row in rows],
        "prefill_time": [turn.prefill_seconds for turn in turns],
        "decode_time": [turn.decode_seconds for turn in turns],
        **_where_known("latency", (turn.latency for turn in turns)),
        **_where_known("covered", (quality.covered for quality in choice.qualities)),
        "draft_nodes": [n for row in rows for n in row.draft_nodes],
        "acceptance_histogram": acceptance_histogram(n for row in rows for n in row.accept_lengths),
        "strict_accept_lengths": [n for row in rows for n in row.strict_accept_lengths],
        "relaxed_tokens": [n for row in rows for n in row.relaxed_tokens],
        "finish_reason": [row.finish_reason for row in rows],
        "seed": spec.seed,
        "output_ids": [list(turn.output_ids) for turn in turns],
        "log_probability": [quality.log_probability for quality in choice.qualities],
        "strays": [[list(stray) for stray in quality.strays] for quality in choice.qualities],
    }


def _where_known(name: str, values: Iterable[float | None]) -> dict[str, list[float]]:
    """A field of one value a turn, or no field where there are none."""
    known = [value for value in values if value is not None]
    return {name: known} if known else {}


def read_record(record: Mapping[str, Any]) -> QuestionResult:
    """The inverse of :func:`make_record`, as far as the statistics go."""
    choices = record["choices"]
    walls = tuple(sum(choice["wall_time"]) for choice in choices)
    return QuestionResult(
        question_id=record["question_id"],
        output_ids=tuple(tuple(ids) for ids in choices[0]["output_ids"]),
        rows=tuple(_rows(choices[0])),
        wall_seconds=statistics.median(walls),
        prefill_seconds=_median_total([choice["prefill_time"] for choice in choices]),
        decode_seconds=_median_total([choice["decode_time"] for choice in choices]),
        repeats_wall_seconds=walls,
        log_probability=sum(choices[0]["log_probability"]),
        strays=tuple((p, rank) for turn in choices[0]["strays"] for _, p, rank in turn),
        latencies=tuple(choices[0].get("latency", ())),
        covered=sum(choices[0]["covered"]) if "covered" in choices[0] else None,
    )


def _rows(choice: Mapping[str, Any]) -> list[RowStats]:
    """Cut the lists per step at the turns' numbers of steps."""
    per_step = {
        name: iter(choice[name])
        for name in ("accept_lengths", "strict_accept_lengths", "relaxed_tokens", "draft_nodes")
    }
    return [
        RowStats(
            **{name: list(islice(values, steps)) for name, values in per_step.items()},
            prompt_tokens=prompt,
            output_tokens=output,
            finish_reason=reason,
        )
        for steps, prompt, output, reason in zip(
            choice["decoding_steps"],
            choice["prompt_tokens"],
            choice["output_tokens"],
            choice["finish_reason"],
            strict=True,
        )
    ]


def _median_total(repeats: Sequence[Sequence[float | None]]) -> float | None:
    """Median over repeats of the sum over turns; None if any turn has no such time."""
    totals = []
    for turns in repeats:
        times = [seconds for seconds in turns if seconds is not None]
        if len(times) != len(turns):
            return None
        totals.append(sum(times))
    return statistics.median(totals)
