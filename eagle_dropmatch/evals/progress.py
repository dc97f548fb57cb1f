"""The progress of a run on stderr: a bar with live numbers, or a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from .records import QuestionResult


class RunProgress:
    """tau and tokens/s of every arm so far, this session's answers and those found in the folder.

    On a terminal it is a tqdm bar over questions; elsewhere a line at most every ``interval``
    seconds, so that a log file shows that the run is alive without filling up.
    """

    def __init__(
        self,
        total: int,
        arms: Sequence[str],
        *,
        stream: TextIO | None = None,
        interval: float = 20.0,
    ) -> None:
        self._total = total
        self._done = 0
        self._arms = list(arms)
        self._steps = dict.fromkeys(arms, 0)
        self._committed = dict.fromkeys(arms, 0)
        self._tokens = dict.fromkeys(arms, 0)
        self._seconds = dict.fromkeys(arms, 0.0)
        self._stream = stream if stream is not None else sys.stderr
        self._interval = interval
        self._printed = time.monotonic()
        self._bar = None
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="question", file=self._stream, dynamic_ncols=True)

    def warming_up(self, arm: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"warming up {arm}")

    def answered(self, arm: str, result: QuestionResult) -> None:
        self.count(arm, result)
        self._show(f"question {self._done + 1}/{self._total}")

    def count(self, arm: str, result: QuestionResult) -> None:
        """Add an answer to the live numbers without a word."""
        self._steps[arm] += sum(len(row.accept_lengths) for row in result.rows)
        self._committed[arm] += sum(sum(row.accept_lengths) for row in result.rows)
        self._tokens[arm] += result.output_tokens
        self._seconds[arm] += result.wall_seconds

    def question_done(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def live(self) -> str:
        """For example "exact tau 2.41 33/s"; arms that draft nothing show their speed alone."""
        parts = []
        for arm in self._arms:
            if not self._seconds[arm]:
                continue
            speed = f"{self._tokens[arm] / self._seconds[arm]:.0f}/s"
            drafts = self._committed[arm] > self._steps[arm]
            tau = f"tau {self._committed[arm] / self._steps[arm]:.2f} " if drafts else ""
            parts.append(f"{arm} {tau}{speed}")
        return ", ".join(parts)

    def _show(self, where: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self.live())
        elif time.monotonic() - self._printed >= self._interval:
            print(f"{where}: {self.live()}", file=self._stream, flush=True)
            self._printed = time.monotonic()
