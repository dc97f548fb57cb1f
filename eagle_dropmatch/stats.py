"""The record of a generation, step by step, and every acceptance number that follows from it.

A step is one draft + verify cycle. It accepts ``a`` draft tokens and commits ``a + 1`` tokens: the
accepted ones and the target's own next token (the bonus). All published "acceptance lengths" are
functions of the list of these counts, so only the list is stored; nothing is averaged on the way.

The number called tau here is the one on which EAGLE's authors, Spec-Bench and vLLM agree: tokens
committed per step, bonus included, pooled over all steps of all sequences. The other definitions in
use are functions of the same record, named after the project that prints them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class RowStats:
    """One generated sequence; every list has one entry per verification step.

    All counts are taken after the cut at the first stop token and at ``max_new_tokens``. When the
    cut falls inside a step, the step's last committed token stands where the bonus would be: a step
    that committed ``c`` tokens always counts as ``c - 1`` accepted draft tokens and one more.
    """

    accept_lengths: list[int]
    """Tokens committed in the step: accepted draft tokens and the bonus."""
    strict_accept_lengths: list[int]
    """What the exact rule would have committed on the same tree, cut by the same limits."""
    relaxed_tokens: list[int]
    """Accepted draft tokens of the step that differ from the clean target's argmax."""
    draft_nodes: list[int]
    """Nodes of the verified tree without its root."""
    prompt_tokens: int
    output_tokens: int
    """Generated tokens: the one that the prefill gives, and those of all steps."""
    finish_reason: str
    """"stop" (a stop token) or "length" (``max_new_tokens``)."""

    def __post_init__(self) -> None:
        steps = len(self.accept_lengths)
        for name in ("strict_accept_lengths", "relaxed_tokens", "draft_nodes"):
            if len(getattr(self, name)) != steps:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {steps} steps")
        committed = sum(self.accept_lengths)
        # Zero output tokens is a call that asked for none.
        if self.output_tokens and self.output_tokens != 1 + committed:
            raise ValueError(
                f"{self.output_tokens} output tokens, but the prefill gives one and the steps "
                f"committed {committed}: a token was counted twice or lost"
            )


@dataclass(frozen=True)
class GenerationStats:
    """A call of ``generate``, or several joined with :meth:`merge`."""

    rows: tuple[RowStats, ...]
    prefill_seconds: float
    """From the call to the prefill's token, the device synchronised at both ends."""
    decode_seconds: float
    """All steps after it, the device synchronised at both ends."""

    @classmethod
    def merge(cls, parts: Iterable[GenerationStats]) -> GenerationStats:
        """Pool several calls: their rows side by side, their times added."""
        parts = list(parts)
        return cls(
            rows=tuple(row for part in parts for row in part.rows),
            prefill_seconds=math.fsum(part.prefill_seconds for part in parts),
            decode_seconds=math.fsum(part.decode_seconds for part in parts),
        )

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens committed in every step of every row."""
        return [length for row in self.rows for length in row.accept_lengths]

    @property
    def num_steps(self) -> int:
        return sum(len(row.accept_lengths) for row in self.rows)

    @property
    def committed_tokens(self) -> int:
        """Tokens committed by steps: all output but the prefill's token of each row."""
        return sum(sum(row.accept_lengths) for row in self.rows)

    @property
    def accepted_draft_tokens(self) -> int:
        """The sum of ``a`` over all steps."""
        return self.committed_tokens - self.num_steps

    @property
    def output_tokens(self) -> int:
        return sum(row.output_tokens for row in self.rows)

    @property
    def prompt_tokens(self) -> int:
        return sum(row.prompt_tokens for row in self.rows)

    @property
    def tau(self) -> float:
        """(sum of a + number of steps) / number of steps; NaN when there was no step."""
        return _ratio(self.committed_tokens, self.num_steps)

    @property
    def strict_tau(self) -> float:
        """tau of the exact rule on the same trees; NaN when there was no step."""
        strict = sum(sum(row.strict_accept_lengths) for row in self.rows)
        return _ratio(strict, self.num_steps)

    @property
    def relaxed_share(self) -> float:
        """Accepted draft tokens that differ from the clean argmax / all accepted draft tokens.

        0.0 when no draft token was accepted.
        """
        relaxed = sum(sum(row.relaxed_tokens) for row in self.rows)
        return relaxed / self.accepted_draft_tokens if self.accepted_draft_tokens else 0.0

    @property
    def histogram(self) -> list[int]:
        """Steps by accepted draft tokens: entry ``a`` is the number of steps that accepted a."""
        return acceptance_histogram(self.accept_lengths)

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens a second of decoding, the prefill left out; NaN without a step."""
        return _ratio(self.committed_tokens, self.decode_seconds)


def acceptance_histogram(accept_lengths: Iterable[int]) -> list[int]:
    """``accept_lengths``: tokens committed per step. Entry a counts steps with a + 1 of them."""
    accepted = [length - 1 for length in accept_lengths]
    counts = [0] * (max(accepted, default=-1) + 1)
    for a in accepted:
        counts[a] += 1
    return counts


def unconditional_acceptance(histogram: list[int]) -> list[float]:
    """P(a >= i) for i = 1 .. max a, over all steps (vLLM's per-position rate).

    It falls with i by construction: position i counts only if all positions before it were
    accepted. The sum of the list is tau - 1.
    """
    steps = sum(histogram)
    return [sum(histogram[i:]) / steps for i in range(1, len(histogram))]


def conditional_acceptance(histogram: list[int]) -> list[float]:
    """P(a > n | a >= n) for n = 0 .. max a - 1 (EAGLE's n-alpha, meant for chain drafting).

    The share of the steps that accepted the first n tokens which also accepted the next one.
    """
    return [
        sum(histogram[n + 1 :]) / sum(histogram[n:])
        for n in range(len(histogram) - 1)
        if sum(histogram[n:])
    ]


def depth_normalised_rate(stats: GenerationStats, levels: int) -> float:
    """(tau - 1) / levels: the part of the deepest possible path that was accepted.

    ``levels`` is the number of draft levels, EAGLE's ``--depth`` + 1. Accepted tokens over tree
    nodes would mean nothing: of all nodes on one level at most one can be accepted.
    """
    return (stats.tau - 1.0) / levels


def spec_bench_mean_accepted(stats: GenerationStats) -> float:
    """Spec-Bench's "mean accepted tokens": the pooled mean of a + 1, which is tau."""
    return _ratio(sum(stats.accept_lengths), len(stats.accept_lengths))


def vllm_mean_acceptance_length(stats: GenerationStats) -> float:
    """vLLM's and AIPerf's 1 + accepted / drafts, which is tau."""
    return 1.0 + _ratio(stats.accepted_draft_tokens, stats.num_steps)


def gpt_fast_mean_accepted(stats: GenerationStats) -> float:
    """gpt-fast's mean of a, the bonus left out: tau - 1."""
    return _ratio(stats.accepted_draft_tokens, stats.num_steps)


def sglang_accept_length(stats: GenerationStats) -> float:
    """SGLang's and SpecForge's completion tokens / verify count.

    Above tau by the prefill's token of every row, which no step committed.
    """
    return _ratio(stats.output_tokens, stats.num_steps)


def eagle_idxs(row: RowStats) -> int:
    """The field ``idxs`` of EAGLE's answer files: the 0-based number of the last step."""
    return len(row.accept_lengths) - 1


def eagle_answer_file_quotient(stats: GenerationStats) -> float:
    """sum(new_tokens) / sum(idxs), often computed from EAGLE's answer files and often called tau.

    ``idxs`` is one less than the number of steps in every row, so this overstates tau. The right
    quotient of the same fields is sum(new_tokens) / sum(idxs + 1).
    """
    return _ratio(stats.committed_tokens, sum(eagle_idxs(row) for row in stats.rows))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan
