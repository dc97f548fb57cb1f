"""Answers that one dropout head writes alone: DropMatch, table 1.

The paper has HumanEval's pass@1. A small model passes next to nothing there, so here stands what
such answers are to the clean target, with GSM8K's accuracy where its questions are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..acceptors.base import Acceptor, PromptContext, RowState, StepContext, Verdict
from ..acceptors.exact import ExactAcceptor
from ..acceptors.heads import head_choices, mask_uniforms
from ..evals.base import Benchmark
from ..evals.folder import answer_files, read_answers
from ..evals.records import QuestionResult, read_record
from ..evals.statistics import Estimate, paired_difference, ratio, wilson
from ..evals.table import inline
from . import paper

GRAM = 4
"""Tokens of the runs whose repetition is counted: distinct-4."""


class SingleHead(Acceptor):
    """Every token is what one dropout head says, the one after the accepted path too.

    The head's argmax stands in the place of the target's choice, with fresh masks at every node, so
    the text is that of plain decoding with dropout on the LM head's input. Only an answer's first
    token, which the prompt's forward gives, is the clean head's; the KV cache has clean states.
    For greedy decoding.

    Args:
        p_drop: dropout rate in [0, 1); at 0 it is exact acceptance.
        seed: of the masks.
    """

    name = "single_head"

    def __init__(self, p_drop: float, seed: int = 0) -> None:
        self.p_drop, self.seed = p_drop, seed

    def start(self, context: PromptContext) -> RowState:
        return {}

    def accept(self, context: StepContext) -> Tensor:
        return self._told(context).exact

    def verify(self, context: StepContext) -> Verdict:
        exact = ExactAcceptor()
        mine, clean = exact.verify(self._told(context)), exact.verify(context)
        on_path = mine.path.clamp(min=0)
        return mine._replace(
            strict_path=clean.path,
            strict=clean.accepted,
            strict_bonus=clean.bonus,
            relaxed=(mine.path > 0) & ~context.exact.gather(1, on_path),
        )

    def _told(self, context: StepContext) -> StepContext:
        """The step as if the head were the target."""
        if self.p_drop == 0:
            return context
        hidden = context.output.hidden
        rows, nodes, size = hidden.shape
        uniforms = mask_uniforms(
            context.row_keys, self.seed, context.steps, (nodes, 1, size), hidden.device
        )
        said = head_choices(
            hidden.flatten(0, 1),
            uniforms.flatten(0, 1),
            hidden.new_full((rows * nodes, 1), self.p_drop).float(),
            context.head,
            context.logits.shape[-1],
        )
        return replace(context, choice=said.view(rows, nodes))


def name_of(p_drop: float) -> str:
    """What the arm of a rate is called."""
    return f"one head, p_drop {p_drop:g}"


def rules(rates: Sequence[float]) -> dict[str, Acceptor]:
    """By the names of their arms; the clean head's answers are exact acceptance's."""
    return {name_of(p): SingleHead(p) for p in rates if p}


class Written(NamedTuple):
    """The answers that one head writes, over all questions and mask seeds."""

    p_drop: float
    log_probability: Estimate
    """Of an answer's token to the clean target, nats."""
    cost: Estimate | None
    """The clean head's log-probability less that; None for the clean head."""
    equal: Estimate
    """Share of tokens that are the clean argmax after the same text."""
    distinct: Estimate
    """Different runs of ``GRAM`` tokens / all runs in an answer: falls with repetition."""
    tokens: float
    """Mean length of an answer."""
    ended: float
    """Share of answers that end with a stop token."""


Answers = Mapping[str, Mapping[int | str, Sequence[Mapping[str, Any]]]]
"""By rule and question, the records of every seed."""


def answers_in(folder: Path) -> Answers:
    """All answers of a finished run."""
    found: dict[str, dict[int | str, list[Mapping[str, Any]]]] = {}
    for path in answer_files(folder):
        for qid, record in read_answers(path)[0].items():
            found.setdefault(record["acceptance"], {}).setdefault(qid, []).append(record)
    return found


def describe(answers: Answers, rates: Sequence[float]) -> list[Written]:
    """A row a rate, in their order; 0 is the clean head."""
    clean = _columns(answers["exact"])
    rows = []
    for p in rates:
        mine = clean if p == 0 else _columns(answers[name_of(p)])
        cost = None
        if p:
            cost = paired_difference(clean.log_p, clean.tokens, mine.log_p, mine.tokens)
        rows.append(
            Written(
                p_drop=p,
                log_probability=ratio(mine.log_p, mine.tokens),
                cost=cost,
                equal=ratio(mine.equal, mine.tokens),
                distinct=ratio(mine.distinct, mine.runs),
                tokens=sum(mine.tokens) / mine.answers,
                ended=mine.ended / mine.answers,
            )
        )
    return rows


class _Columns(NamedTuple):
    """Sums of each question, and counts of all."""

    tokens: list[float]
    log_p: list[float]
    equal: list[float]
    distinct: list[float]
    runs: list[float]
    answers: int
    ended: int


def _columns(records: Mapping[int | str, Sequence[Mapping[str, Any]]]) -> _Columns:
    results = [[read_record(each) for each in records[qid]] for qid in sorted(records, key=str)]
    rows = [row for question in results for result in question for row in result.rows]
    grams = [[distinct_runs(result) for result in question] for question in results]
    return _Columns(
        tokens=[float(sum(r.output_tokens for r in question)) for question in results],
        log_p=[sum(r.log_probability for r in question) for question in results],
        equal=[float(sum(r.output_tokens - len(r.strays) for r in q)) for q in results],
        distinct=[float(sum(found for found, _ in question)) for question in grams],
        runs=[float(sum(every for _, every in question)) for question in grams],
        answers=len(rows),
        ended=sum(row.finish_reason == "stop" for row in rows),
    )


def distinct_runs(result: QuestionResult) -> tuple[int, int]:
    """Different and all runs of ``GRAM`` tokens in a question's answers, turn by turn."""
    distinct = every = 0
    for ids in result.output_ids:
        runs = [ids[i : i + GRAM] for i in range(len(ids) - GRAM + 1)]
        distinct, every = distinct + len(set(runs)), every + len(runs)
    return distinct, every


def accuracies(answers: Answers, benchmark: Benchmark, source: Path) -> dict[str, Estimate]:
    """By rule, the share of correct answers with Wilson's interval over questions."""
    questions = {question.question_id: question for question in benchmark.load(source)}
    found = {}
    for rule, records in answers.items():
        shares = [
            sum(
                benchmark.score(questions[qid], each["choices"][0]["turns"])["correct"]
                for each in mine
            )
            / len(mine)
            for qid, mine in records.items()
        ]
        found[rule] = wilson(sum(shares) / len(shares), len(shares))
    return found


def markdown(rows: Sequence[Written], solved: Mapping[str, Estimate] | None) -> list[str]:
    """The paper's table 1 as far as it can be measured, the paper's own numbers beside."""
    lines = [
        "**Table 1, answers that one dropout head writes alone**, to the clean target: nats a "
        f"token, share of tokens that are its argmax, different runs of {GRAM} tokens of all.",
        "",
        "| p_drop | log p /token (95%) | below clean (95%) | = clean argmax (95%) | "
        f"distinct-{GRAM} (95%) | tokens an answer | ended by itself | "
        f"{'GSM8K correct (95%) | ' if solved else ''}paper: HumanEval pass@1 (70B) |",
        f"|--:|{'--:|' * (8 if solved else 7)}",
    ]
    for row in rows:
        known = paper.SINGLE_HEAD_PASS.get(row.p_drop)
        told = [
            f"{row.p_drop:g}",
            inline(row.log_probability),
            "" if row.cost is None else inline(row.cost),
            inline(row.equal),
            inline(row.distinct),
            f"{row.tokens:.1f}",
            f"{row.ended:.0%}",
        ]
        if solved:
            told.append(inline(solved[name_of(row.p_drop) if row.p_drop else "exact"]))
        told.append("" if known is None else f"{known:.1f}%")
        lines.append(f"| {' | '.join(told)} |")
    return lines
