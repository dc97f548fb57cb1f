"""The target's own choice of a token: its argmax, or at a temperature above 0 its sample.

A sample is drawn by inverting the distribution function at a uniform number that belongs to the
row's key and the token's place in the answer, not to the step or the tree. So all nodes of one
depth share a number, the number of one place is independent of all others, and an answer decoded
through trees is the very answer that plain decoding draws under the same seed: a tree whose nodes
are kept where they equal the target's choice is lossless, bit for bit and not in law alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_dropmatch import native
from eagle_dropmatch.errors import UserError

_ARGMAX = Path(__file__).with_name("argmax.cpp")
#: Of rows over the vocabulary in float32 or wider, that exist together: 64 MB of float32.
NUMBERS_AT_ONCE = 2**24


def rows_at_once(vocab_size: int) -> int:
    """How many rows over the vocabulary may exist together in float32 or wider."""
    return max(1, NUMBERS_AT_ONCE // vocab_size)


_BLOCKS, _LARGE = 64, 4096


class Scores(NamedTuple):
    """Scores of the tokens that may be chosen at some positions; all others cannot be."""

    values: Tensor  # [..., C], unnormalised log-probabilities, -inf where impossible
    ids: Tensor | None  # [..., C] int64, the tokens, or None: token c stands in column c

    def over(self, vocab_size: int) -> Tensor:
        """The scores of M positions over the whole vocabulary: [M, V]."""
        if self.ids is None:
            return self.values
        whole = self.values.new_full((self.values.shape[0], vocab_size), -torch.inf)
        return whole.scatter_(1, self.ids, self.values)


@dataclass(frozen=True)
class Sampler:
    """How the target chooses, in transformers' terms and with its logits processors.

    Args:
        temperature: 0 is greedy; the other settings but ``repetition_penalty`` have no meaning
            then.
        top_k: only the k likeliest tokens; 0 is all.
        top_p: only the likeliest tokens that hold this probability together.
        min_p: only tokens with at least this share of the likeliest token's probability.
        repetition_penalty: divides positive and multiplies negative logits of all tokens of the
            prompt and the answer so far (Keskar et al., 2019).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, ok, wanted in (
            ("temperature", 0 <= self.temperature < float("inf"), "a number of at least 0"),
            ("top_k", self.top_k >= 0, "a whole number of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "a share in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "a share in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "a number above 0"),
        ):
            if not ok:
                raise UserError(f"{name} is {getattr(self, name)}: expected {wanted}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether scores depend on the tokens before, beyond what the model makes of them."""
        return self.repetition_penalty != 1.0

    def penalise(self, logits: Tensor, before: Tensor) -> Tensor:
        """Logits [M, V] after the repetition penalty; ``before`` [M, S] int64, tokens so far."""
        if not self.penalises:
            return logits
        from transformers.generation import logits_process

        return logits_process.RepetitionPenaltyLogitsProcessor(self.repetition_penalty)(
            before, logits
        )

    def scores(self, logits: Tensor) -> Scores:
        """What may be chosen from ``logits`` [M, V], at a temperature above 0, in float32.

        In transformers' order: temperature, top-k, top-p, min-p. With a top-k only those k tokens
        are looked at from there on.
        """
        from transformers.generation import logits_process

        ids = None
        if 0 < self.top_k < logits.shape[-1]:
            logits, ids = logits.topk(self.top_k, dim=-1)
        values = logits.float() / self.temperature
        steps: list[Any] = []
        if self.top_p < 1:
            steps.append(logits_process.TopPLogitsWarper(self.top_p))
        if self.min_p > 0:
            steps.append(logits_process.MinPLogitsWarper(self.min_p))
        for step in steps:
            values = step(None, values)
        return Scores(values, ids)

    def choose(self, scores: Scores, uniforms: Tensor) -> Tensor:
        """The tokens at which the distribution functions reach ``uniforms``: [M] int64.

        Args:
            scores: of M positions.
            uniforms: [M] float64 in [0, 1).
        """
        # In float64: at 100,000 tokens the rounding of float32 sums would be of a token's size.
        reached = scores.values.double().softmax(-1).cumsum(-1)
        level = uniforms[:, None] * reached[:, -1:]
        column = torch.searchsorted(reached, level, right=True)
        # Nothing is above the last column that adds anything, whatever the rounding.
        last = (reached < reached[:, -1:]).sum(-1, keepdim=True)
        column = torch.minimum(column, last)
        if scores.ids is not None:
            column = scores.ids.gather(-1, column)
        return column.squeeze(-1)


def place_uniforms(
    keys: Sequence[object], first: Sequence[int], count: int, device: torch.device
) -> Tensor:
    """The uniform numbers of ``count`` places of each row's answer, from ``first`` on.

    They follow from (key, place) alone. Hashed, not drawn: a place's number must not depend
    on which others were asked for before.

    Args:
        keys: names of the rows.
        first: the first place of each row, 0 for the answer's first token.

    Returns:
        [B, count] float64 in [0, 1).
    """
    numbers = [
        [_uniform(f"{key} {start + place}") for place in range(count)]
        for key, start in zip(keys, first, strict=True)
    ]
    return torch.tensor(numbers, dtype=torch.float64).to(device)


def _uniform(name: str) -> float:
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"sampling").digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def first_argmax(logits: Tensor, *, machine_code: bool = False) -> Tensor:
    """Argmax over the last dimension, the lowest id on ties: int64, that dimension gone.

    On a CPU ``max`` finds the same index as ``argmax`` and is several times faster in bfloat16; and
    twice as fast again is the greatest of each block first, then its place in the first block that
    holds it.

    Args:
        machine_code: by argmax.cpp, which reads a row once; there, no number may be NaN.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    if machine_code and (run := native.kernel(_ARGMAX, logits.dtype)) is not None:
        found = torch.empty(logits.shape[:-1], dtype=torch.int64)
        rows = logits.contiguous()
        sizes = (found.numel(), logits.shape[-1], torch.get_num_threads())
        run(*native.numbers_and_places(rows, *sizes, found))
        return found
    size = logits.shape[-1]
    blocks = math.gcd(size, _BLOCKS)
    if blocks < _BLOCKS or size < _LARGE:
        return logits.max(dim=-1).indices
    folded = logits.reshape(-1, blocks, size // blocks)
    block = folded.amax(-1).max(dim=-1).indices
    inside = folded[torch.arange(len(folded)), block].max(dim=-1).indices
    return (block * folded.shape[-1] + inside).view(logits.shape[:-1])
