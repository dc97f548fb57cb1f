"""Any number of prompts through a batch of a few seats: who ends makes room for who waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.loop import DecodingLoop, Row
from eagle_dropmatch.stats import RowStats


@dataclass(frozen=True)
class QueuedAnswer:
    """One prompt's answer.

    Attributes:
        tag: what ``submit`` was given.
        tokens: new tokens, a stop token included.
        stats: the record of its steps.
        prefill_seconds: its share of the time in which prompts were read.
        decode_seconds: its share of its steps: a step's time is split among the answers it is for.
            The sum of both over all answers is the time that all of them took together.
        latency: seconds from the reading of its prompt to its end, others' prompts included.
    """

    tag: Any
    tokens: list[int]
    stats: RowStats
    prefill_seconds: float
    decode_seconds: float
    latency: float


class _Waiting(NamedTuple):
    prompt: Sequence[int]
    seed: int
    tag: Any


@dataclass
class _Seated:
    """A row's times so far."""

    tag: Any
    row: Row
    began: float  # on the queue's own clock
    prefill: float
    decode: float = 0.0


class AnswerQueue:
    """Iterate over it to get answers as they end; prompts may be submitted all the while.

    Args:
        loops: makes loops that decode alike.
        seats: answers that are written at the same time.
        reserve: tree nodes to make room for in the cache.
    """

    def __init__(self, loops: Callable[[], DecodingLoop], seats: int, reserve: int) -> None:
        self._loops, self._seats, self._reserve = loops, seats, reserve
        self._loop: DecodingLoop | None = None
        self._waiting: deque[_Waiting] = deque()
        self._seated: list[_Seated] = []
        #: Spent on all answers so far; what the consumer does meanwhile is not in it.
        self.seconds = 0.0
        self._admitted = 0

    def submit(self, prompt: Sequence[int], *, seed: int = 0, tag: Any = None) -> None:
        """Let a prompt of token ids wait for a seat; its answer comes with ``tag``."""
        if not len(prompt):
            raise UserError("an empty prompt was submitted: every prompt needs at least one token")
        self._waiting.append(_Waiting(list(prompt), seed, tag))

    def __iter__(self) -> Iterator[QueuedAnswer]:
        while self._waiting or self._seated:
            if self._waiting and len(self._seated) < self._seats:
                self._seat()
            elif self._loop is not None:
                self._step(self._loop)
            ended = [each for each in self._seated if each.row.ended]
            self._seated = [each for each in self._seated if not each.row.ended]
            for each in ended:
                yield QueuedAnswer(
                    each.tag,
                    each.row.tokens,
                    each.row.stats(),
                    each.prefill,
                    each.decode,
                    self.seconds - each.began,
                )

    def _seat(self) -> None:
        """Read as many prompts as there are free seats, and let their answers join."""
        free = self._seats - len(self._seated)
        new = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        began = time.perf_counter()
        guests = self._loops()
        prompts, seeds = [each.prompt for each in new], [each.seed for each in new]
        guests.prefill(prompts, seeds, self._reserve, first=self._admitted)
        if self._loop is None or not self._loop.running:
            self._loop = guests
        else:
            ended = [seat for seat, row in enumerate(self._loop.seated) if row.ended]
            more = range(len(self._loop.seated), self._seats)
            self._loop.join(guests, [*ended, *more][: len(new)])
        took = time.perf_counter() - began
        self._seated += [
            _Seated(each.tag, row, self.seconds, took / len(new))
            for each, row in zip(new, guests.rows, strict=True)
        ]
        self.seconds += took
        self._admitted += len(new)

    def _step(self, loop: DecodingLoop) -> None:
        began = time.perf_counter()
        loop.step(leave=not self._waiting)
        took = time.perf_counter() - began
        for each in self._seated:
            each.decode += took / len(self._seated)
        self.seconds += took
