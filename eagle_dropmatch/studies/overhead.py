"""The paper's small tables (DropMatch, 1 to 5) measured on a pair, part by part.

A part is kept as soon as it is measured. A run that was killed goes on with the parts that are
missing, and within the parts that answer many questions where they stood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..evals import first_turns
from ..evals.base import Benchmark, Question
from ..evals.first_turns import FirstTurns
from ..evals.gsm8k import GSM8K
from ..evals.job import Loader, evaluate
from ..evals.mtbench import MTBench
from ..evals.options import EvalOptions
from ..evals.plan import EXACT
from ..evals.provenance import run_arguments
from ..evals.summary import Summary
from . import batch_gain, sweeps
from .parts import Found

if TYPE_CHECKING:  # torch comes with it, and bad arguments are refused without torch
    from ..acceptors import Acceptor
    from .head_votes import Averages

PARTS: Mapping[str, str] = {
    "split": "table 4: time of the LM head and of dropout heads in a verification forward",
    "single": "table 1: answers that one dropout head writes alone",
    "votes": "table 2: how many heads agree",
    "js": "table 3: how far the heads and the draft lie from the heads' centre",
    "batches": "table 5: tokens/s of naive over exact by batch size",
}
CHAIN = (5, 3, 1)
"""Nodes, depth, top-k of table 4's chain: its five tokens are the root and four drafted ones."""


@dataclass
class Bench:
    """A pair, its trees and its questions, and how each part is measured on them.

    Args:
        options: with one tree, of a fixed size; ``depth`` of part batches aside.
        questions: first turns of MT-Bench.
        heads: K.
        rates: dropout rates of part single; 0 is the clean head.
        p_drop: of votes and js.
        steps: of each tree of split.
        batch_sizes: of batches; single uses the largest.
        batch_depth: EAGLE's depth of the trees of batches.
        gsm8k: its questions, whose answers part single checks; with the longest answer to them.
    """

    options: EvalOptions
    questions: Sequence[Question]
    folder: Path
    argv: Sequence[str]
    load: Loader
    heads: int
    rates: Sequence[float]
    p_drop: Sequence[float | str]
    steps: int
    batch_sizes: Sequence[int]
    batch_depth: int
    gsm8k: tuple[Path, int] | None = None

    def settings(self, part: str) -> dict[str, Any]:
        """What must be equal for an earlier measurement of the part to stand."""
        own: dict[str, Any] = {
            "split": {"heads": self.heads, "steps": self.steps},
            "single": {
                "rates": self.rates,
                "gsm8k": self.gsm8k,
                "batch_size": max(self.batch_sizes),
            },
            "votes": {"heads": self.heads, "p_drop": self.p_drop},
            "js": {"heads": self.heads, "p_drop": self.p_drop},
            "batches": {
                "heads": self.heads,
                "batch_sizes": self.batch_sizes,
                "batch_depth": self.batch_depth,
            },
        }
        name = FirstTurns(MTBench()).name
        return {**run_arguments(name, self.options, self.questions), **own[part]}

    def measure(self, part: str) -> Found:
        """One of ``PARTS``."""
        return {
            "split": self.split,
            "single": self.single,
            "votes": self.votes,
            "js": self.js,
            "batches": self.batches,
        }[part]()

    @cached_property
    def _once(self) -> Loader:
        return sweeps.fitting(sweeps.loading_once(self.load))

    def _decoder(self) -> tuple[Any, list[Sequence[int]]]:
        decoder = self._once(self.options)
        return decoder, first_turns.prompts_of(decoder, self.questions)

    def _about(self, decoder: Any) -> str:
        from ..machine import device_name

        tree = decoder.tree
        return (
            f"First turns of {len(self.questions)} MT-Bench questions, at most "
            f"{self.options.max_new_tokens} new tokens each, exact acceptance, tree "
            f"{tree.total_token}/{tree.depth}/{tree.top_k} (nodes/depth/top-k), "
            f"{str(decoder.target.dtype).removeprefix('torch.')} on "
            f"{device_name(decoder.target.device)}, {decoder.target.modules} modules."
        )

    def split(self) -> Found:
        from ..acceptors import NaiveAcceptor
        from ..drafts.base import TreeShape
        from . import head_times

        decoder, prompts = self._decoder()
        about, own = self._about(decoder), decoder.tree
        rule = NaiveAcceptor(K=self.heads)
        splits = [
            head_times.measure(
                decoder,
                prompts,
                shape,
                rule,
                steps=self.steps,
                max_new_tokens=self.options.max_new_tokens,
            )
            for shape in (TreeShape(*CHAIN), own)
        ]
        table = head_times.markdown(splits, self.heads)
        data = [
            {**each._asdict(), "parts": {n: t._asdict() for n, t in each.parts.items()}}
            for each in splits
        ]
        return Found(data, [about, "", *table])

    @cached_property
    def _averages(self) -> list[Averages]:
        """Tables 2 and 3 come from the same answers."""
        from . import head_votes

        decoder, prompts = self._decoder()
        return head_votes.measure(
            decoder,
            prompts,
            self.p_drop,
            heads=self.heads,
            max_new_tokens=self.options.max_new_tokens,
        )

    def votes(self) -> Found:
        from .head_votes import votes_table

        return self._of_averages(votes_table(self._averages, self.heads))

    def js(self) -> Found:
        from .head_votes import divergences_table

        return self._of_averages(divergences_table(self._averages, self.heads))

    def _of_averages(self, table: list[str]) -> Found:
        about = self._about(self._once(self.options))
        return Found([row._asdict() for row in self._averages], [about, "", *table])

    def single(self) -> Found:
        from . import single_head

        options = replace(self.options, batch_size=max(self.batch_sizes))
        heads = single_head.rules(self.rates)
        benchmark = FirstTurns(MTBench())
        self._evaluate(benchmark, options, "single", heads)
        rows = single_head.describe(single_head.answers_in(self.folder / "single"), self.rates)
        solved = None
        if self.gsm8k is not None:
            source, longest = self.gsm8k
            options = replace(options, questions=source, max_new_tokens=longest)
            self._evaluate(GSM8K(), options, "single-gsm8k", heads)
            answers = single_head.answers_in(self.folder / "single-gsm8k")
            solved = single_head.accuracies(answers, GSM8K(), source)
        data = {"answers": [row._asdict() for row in rows], "gsm8k": solved}
        about = self._asked("single/table.md")
        return Found(data, [about, "", *single_head.markdown(rows, solved)])

    def batches(self) -> Found:
        from ..acceptors import make_acceptor

        rule = f"naive(K={self.heads})"
        gains = []
        for size in self.batch_sizes:
            options = replace(self.options, batch_size=size, depth=self.batch_depth)
            rules = {rule: make_acceptor(rule)}
            summary = self._evaluate(FirstTurns(MTBench()), options, f"batch-{size:03}", rules)
            gains.append(batch_gain.gain(size, summary, rule))
        table = batch_gain.markdown(gains, rule, self.batch_depth + 1)
        about = self._asked("batch-*/table.md")
        return Found([each._asdict() for each in gains], [about, "", *table])

    def _asked(self, more: str) -> str:
        return (
            f"First turns of {len(self.questions)} MT-Bench questions, at most "
            f"{self.options.max_new_tokens} new tokens each; models, trees and machine: {more}."
        )

    def _evaluate(
        self,
        benchmark: Benchmark,
        options: EvalOptions,
        name: str,
        rules: Mapping[str, Acceptor],
    ) -> Summary:
        """exact and the rules, in a folder of their own; an interrupt is raised again."""
        summaries: list[Summary] = []
        options = replace(
            options,
            acceptors=tuple(rules),
            arms=(EXACT, *rules),
            output_dir=self.folder / name,
        )
        code = evaluate(
            benchmark,
            options,
            self.argv,
            load=self._once,
            after=lambda summary, _: summaries.append(summary),
            rules=rules,
            show=False,
        )
        if code:
            raise KeyboardInterrupt
        return summaries[0]
