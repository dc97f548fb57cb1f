"""From the results of all arms to the numbers of the final table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..stats import GenerationStats
from .plan import ASSISTED, EXACT, HF, LOOKUP, NO_DRAFTING, PLAIN, ArmSpec
from .records import QuestionResult
from .statistics import Estimate, paired_difference, paired_ratio, ratio

Results = Mapping[str, Mapping[int | str, QuestionResult]]


@dataclass(frozen=True)
class Row:
    """One row of the table: an arm, or the arms of all mask seeds of a rule pooled."""

    group: str
    label: str
    drafting: bool
    lossy: bool
    tau: Estimate
    strict_tau: float
    relaxed_share: float
    tokens_per_second: float
    """All output tokens / all wall seconds, prefill included."""
    mean_question_speed: float
    """Mean over questions of the question's own tokens/s, which weighs short answers up."""
    decode_tokens_per_second: float | None
    """Tokens committed by steps / seconds of decoding alone; None where it is not measured."""
    seconds_per_question: float
    speedup: Mapping[str, Estimate]
    """Ratio of tokens/s over each baseline, by the baseline's group."""
    wall_ratio: Mapping[str, Estimate]
    """Ratio of the baseline's seconds to this row's for the same questions: above 1 is faster."""
    repeat_speeds: tuple[float, float]
    """Lowest and highest tokens/s of a repeat."""
    log_probability: Estimate
    """The target's mean log-probability of an answer's token, in nats."""
    histogram: tuple[int, ...]
    latency: tuple[float, float] | None
    """In batches: seconds from the reading of a prompt to its answer's end, median and 90%."""
    coverage: float | None
    """Share of the answers' tokens that the draft's vocabulary holds; None where not recorded."""


@dataclass(frozen=True)
class Difference:
    """How one arm's answers differ from another's on the same questions."""

    against: str
    questions: int
    differing: int
    first_difference: float | None
    """Mean 0-based token position of the first difference, in the first turn that differs."""
    length_ratio: float
    """All output tokens / all output tokens of the other arm."""


@dataclass(frozen=True)
class LossyComparison:
    """A lossy row beside exact acceptance of the same drafter on the same questions."""

    group: str
    against: str
    """The lossless row with the same drafts, called exact below."""
    drafting: bool
    tau_ratio: Estimate
    tau_ratio_by_seed: Mapping[int, Estimate]
    speed_ratio: Estimate
    """Ratio of tokens/s."""
    wall_ratio: Estimate
    """Ratio of exact's seconds to the row's for the same questions."""
    difference: Difference
    log_probability_cost: Estimate
    """exact's mean log-probability of an answer's token less the row's: above 0 the target finds
    the row's answers less likely."""
    stray_share: float
    """Answer tokens that are not the target's argmax / all answer tokens."""
    stray_probabilities: tuple[float, float, float] | None
    """Quartiles of these tokens' probability to the target; None where there are none."""
    stray_rank: float | None
    """Their median rank; the argmax has rank 0."""


class Sums(NamedTuple):
    """What one question adds to a row's numbers."""

    committed: float
    steps: float
    tokens: float
    log_probability: float


@dataclass(frozen=True)
class Summary:
    question_ids: tuple[int | str, ...]
    """The questions that every arm has answered: only these are in the numbers."""
    turns: int
    rows: tuple[Row, ...]
    comparisons: tuple[LossyComparison, ...]
    agreements: tuple[tuple[str, Difference], ...]
    """Arms that should give the target's own answers, each against the first baseline."""
    sums: Mapping[str, tuple[Sums, ...]]
    """By row, question for question."""


def summarise(specs: Sequence[ArmSpec], results: Results, *, sampled: bool = False) -> Summary:
    """All numbers of the table, over the questions that every arm has answered.

    ``sampled``: at a temperature above 0 transformers draws other samples than we do, so that its
    answers say nothing about ours.
    """
    shared = [qid for qid in results[specs[0].name] if all(qid in results[s.name] for s in specs)]
    pools = {
        group: [[results[s.name][qid] for s in specs if s.group == group] for qid in shared]
        for group in dict.fromkeys(spec.group for spec in specs)
    }
    by_group = {spec.group: spec for spec in reversed(specs)}
    baselines = [group for group in (PLAIN, HF) if group in pools]
    rows = tuple(_row(by_group[group], pools, baselines) for group in pools)
    comparisons = tuple(
        _compare(group, [s for s in specs if s.group == group], results, pools)
        for group in pools
        if by_group[group].lossy and by_group[group].lossless_twin in pools
    )
    exact = [group for group in pools if by_group[group].acceptance == EXACT]
    own = [HF, PLAIN, LOOKUP, ASSISTED] if not sampled else [PLAIN]
    truthful = [*(group for group in own if group in pools), *exact]
    agreements = tuple(
        (group, difference(pools[group], pools[truthful[0]], truthful[0])) for group in truthful[1:]
    )
    turns = sum(len(pool[0].rows) for pool in pools[specs[0].group])
    sums = {
        group: tuple(
            map(
                Sums,
                _committed(pool),
                _steps(pool),
                _tokens(pool),
                _log_probabilities(pool),
            )
        )
        for group, pool in pools.items()
    }
    return Summary(tuple(shared), turns, rows, comparisons, agreements, sums)


Pool = Sequence[Sequence[QuestionResult]]
"""For every question, the results of the arms that a row pools."""


def difference(pool: Pool, other: Pool, against: str) -> Difference:
    """Compare each question's answers with the other arm's first answer to it.

    From the first difference on the two are answers to different contexts, so only its place and
    the total length say anything.
    """
    firsts = []
    compared = 0
    for mine, theirs in zip(pool, other, strict=True):
        for result in mine:
            compared += 1
            place = first_difference(result.output_ids, theirs[0].output_ids)
            if place is not None:
                firsts.append(place)
    lengths = [sum(r.output_tokens for r in mine) / len(mine) for mine in pool]
    other_lengths = [sum(r.output_tokens for r in theirs) / len(theirs) for theirs in other]
    total = sum(other_lengths)
    return Difference(
        against=against,
        questions=compared,
        differing=len(firsts),
        first_difference=statistics.fmean(firsts) if firsts else None,
        length_ratio=sum(lengths) / total if total else math.nan,
    )


def first_difference(
    answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]
) -> int | None:
    """Position of the first token that differs, in the first turn that differs; None if none.

    Where one answer is the other's beginning, it is the place where the shorter one ends.
    """
    for ids, other in zip(answers, others, strict=True):
        for place, (a, b) in enumerate(zip(ids, other, strict=False)):
            if a != b:
                return place
        if len(ids) != len(other):
            return min(len(ids), len(other))
    return None


def _row(spec: ArmSpec, pools: Mapping[str, Pool], baselines: Sequence[str]) -> Row:
    pool = pools[spec.group]
    results = [result for question in pool for result in question]
    stats = GenerationStats(tuple(row for result in results for row in result.rows), 0.0, 0.0)
    tokens, seconds = _tokens(pool), _seconds(pool)
    decode = [result.decode_seconds for result in results if result.decode_seconds is not None]
    repeats = [
        sum(r.output_tokens for r in results) / sum(walls)
        for walls in zip(*(result.repeats_wall_seconds for result in results), strict=True)
    ]
    others = [base for base in baselines if base != spec.group]
    return Row(
        group=spec.group,
        label=spec.label,
        drafting=spec.acceptance != NO_DRAFTING,
        lossy=spec.lossy,
        tau=ratio(_committed(pool), _steps(pool)),
        strict_tau=stats.strict_tau,
        relaxed_share=stats.relaxed_share,
        tokens_per_second=ratio(tokens, seconds).value,
        mean_question_speed=_mean(t / s for t, s in zip(tokens, seconds, strict=True)),
        decode_tokens_per_second=(
            stats.committed_tokens / sum(decode)
            if len(decode) == len(results) and sum(decode) > 0
            else None
        ),
        seconds_per_question=_mean(result.wall_seconds for result in results),
        speedup={
            base: paired_ratio(tokens, seconds, _tokens(pools[base]), _seconds(pools[base]))
            for base in others
        },
        wall_ratio={base: _wall_ratio(pool, pools[base]) for base in others},
        repeat_speeds=(min(repeats, default=math.nan), max(repeats, default=math.nan)),
        log_probability=ratio(_log_probabilities(pool), tokens),
        histogram=tuple(stats.histogram),
        latency=_latency([seconds for result in results for seconds in result.latencies]),
        coverage=_coverage(results),
    )


def _compare(
    group: str, specs: Sequence[ArmSpec], results: Results, pools: Mapping[str, Pool]
) -> LossyComparison:
    against = specs[0].lossless_twin
    exact, mine = pools[against], pools[group]
    shared = [question[0].question_id for question in exact]

    def tau_ratio(pool: Pool) -> Estimate:
        return paired_ratio(_committed(pool), _steps(pool), _committed(exact), _steps(exact))

    strays = [stray for question in mine for answer in question for stray in answer.strays]
    by_seed = {
        spec.seed: tau_ratio([[results[spec.name][qid]] for qid in shared])
        for spec in specs
        if spec.seed is not None
    }
    return LossyComparison(
        group=group,
        against=against,
        drafting=specs[0].acceptance != NO_DRAFTING,
        tau_ratio=tau_ratio(mine),
        tau_ratio_by_seed=by_seed,
        speed_ratio=paired_ratio(_tokens(mine), _seconds(mine), _tokens(exact), _seconds(exact)),
        wall_ratio=_wall_ratio(mine, exact),
        difference=difference(mine, exact, against),
        log_probability_cost=paired_difference(
            _log_probabilities(exact), _tokens(exact), _log_probabilities(mine), _tokens(mine)
        ),
        stray_share=len(strays) / sum(_tokens(mine)),
        stray_probabilities=_quartiles([p for p, _ in strays]),
        stray_rank=statistics.median(rank for _, rank in strays) if strays else None,
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float, float] | None:
    if not values:
        return None
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _coverage(results: Sequence[QuestionResult]) -> float | None:
    covered = [result.covered for result in results if result.covered is not None]
    total = sum(result.output_tokens for result in results)
    return sum(covered) / total if len(covered) == len(results) and total else None


def _latency(seconds: Sequence[float]) -> tuple[float, float] | None:
    if len(seconds) < 2:
        return (seconds[0],) * 2 if seconds else None
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return statistics.median(seconds), tenths[-1]


def _log_probabilities(pool: Pool) -> list[float]:
    return [sum(answer.log_probability for answer in question) for question in pool]


def _wall_ratio(pool: Pool, base: Pool) -> Estimate:
    """Seconds a question of ``base`` / seconds a question of ``pool``."""
    counts, base_counts = ([float(len(question)) for question in p] for p in (pool, base))
    return paired_ratio(_seconds(base), base_counts, _seconds(pool), counts)


def _committed(pool: Pool) -> list[float]:
    return [float(sum(sum(r.accept_lengths) for a in q for r in a.rows)) for q in pool]


def _steps(pool: Pool) -> list[float]:
    return [float(sum(len(r.accept_lengths) for a in q for r in a.rows)) for q in pool]


def _tokens(pool: Pool) -> list[float]:
    return [float(sum(answer.output_tokens for answer in question)) for question in pool]


def _seconds(pool: Pool) -> list[float]:
    return [sum(answer.wall_seconds for answer in question) for question in pool]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return statistics.fmean(listed) if listed else math.nan
