"""One answer with every decision on the way to it: trees, verdicts, and what they followed from.

The loop is not changed for it: a wrapper around the rule looks on, and copies what it sees to the
host. So a traced answer is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..acceptors import Acceptor, PromptContext, StepContext, Verdict
from ..acceptors.base import RowState
from ..acceptors.scores import Score
from ..decoder import SpeculativeDecoder
from ..sampling import Scores
from ..stats import GenerationStats

#: What became of a token of an answer: the prefill's, a draft token that is the target's own
#: choice, one that is not, and what the target says behind an accepted path.
FIRST, EXACT, RELAXED, BONUS = "first", "exact", "relaxed", "bonus"


@dataclass(frozen=True)
class ScoreColumn:
    """One of a rule's scores at the N nodes of a tree; see ``acceptors.scores.Score``.

    NaN stands where a node has none, and at the root.
    """

    name: str
    relation: str
    token: bool
    values: list[float]
    bounds: list[float] | None  # None where nothing is compared
    holds: list[bool] | None


@dataclass(frozen=True)
class TracedStep:
    """One verification step; lists have an entry for each of the N valid nodes, the root first."""

    tokens: list[int]
    parents: list[int]  # -1 at the root
    draft_scores: list[float]  # cumulative draft log-probabilities, in nats
    p: list[float]  # the target's probability at the parent, after the settings of sampling
    ranks: list[int]  # how many tokens are likelier there; 0 is the best
    exact: list[bool]  # is it the target's choice there?
    eligible: list[bool]  # False: a stop token that is not
    allowed: list[bool]  # the rule's verdict, whatever became of the parent
    choice: list[int]  # what the target says after each node
    choice_p: list[float]  # with which probability
    sayable: list[bool] | None  # whether the draft's vocabulary has that; None: not known
    path: list[int]  # nodes of the accepted path, the root first
    strict_path: list[int]  # of the path that exact acceptance keeps
    bonus: int
    columns: tuple[ScoreColumn, ...]


@dataclass(frozen=True)
class TokenOrigin:
    """Where a token of an answer comes from."""

    kind: str  # FIRST, EXACT, RELAXED or BONUS
    step: int  # -1 for the prefill's token
    node: int  # of the step's tree; a bonus has that of the path's end


@dataclass(frozen=True)
class AnswerTrace:
    """An answer and its steps."""

    tokens: list[int]
    origins: list[TokenOrigin]
    steps: list[TracedStep]
    stats: GenerationStats

    @property
    def given_up(self) -> float:
        """ln p(target's choice) - ln p(x) at relaxed tokens, in nats a token of the answer."""
        lost = 0.0
        for origin in self.origins:
            if origin.kind == RELAXED:
                step = self.steps[origin.step]
                own, wanted = step.p[origin.node], step.choice_p[step.parents[origin.node]]
                lost += math.log(wanted / own) if own > 0 else math.inf
        return lost / len(self.tokens)


class TracingAcceptor(Acceptor):
    """A rule that is looked at while it judges trees of one row.

    Args:
        rule: judges; nothing that it sees or says is changed.
        watch: told the tokens that each step commits, before any cut.
    """

    def __init__(self, rule: Acceptor, watch: Callable[[int], object] = lambda _: None) -> None:
        self.rule, self.watch = rule, watch
        self.steps: list[TracedStep] = []
        self.lossless, self.needs_draft = rule.lossless, rule.needs_draft

    def start(self, context: PromptContext) -> RowState:
        return self.rule.start(context)

    def accept(self, context: StepContext) -> Tensor:
        return self.rule.accept(context)

    def verify(self, context: StepContext) -> Verdict:
        if context.tree.batch_size != 1:
            raise ValueError(f"a trace is of one answer, not of {context.tree.batch_size}")
        # Before the verdict: a rule whose rates run on moves them in it.
        allowed = self.rule.accept(context) & context.eligible
        scores = self.rule.explain(context)
        verdict = self.rule.verify(context)
        self.steps.append(read_step(context, verdict, allowed, scores))
        self.watch(int(verdict.accepted) + 1)
        return verdict


def read_step(
    context: StepContext, verdict: Verdict, allowed: Tensor, scores: Mapping[str, Score]
) -> TracedStep:
    """A step of one row on the host. ``allowed``: [1, N] bool, the verdict at every node."""
    tree, parents = context.tree, context.parents
    nodes = int(tree.valid.sum())
    choice = context.choice[0, :nodes]

    def listed(values: Tensor) -> list[Any]:
        found: list[Any] = values[0, :nodes].tolist()
        return found

    def path(ids: Tensor) -> list[int]:
        return [node for node in ids[0].tolist() if node >= 0]

    known = context.draft_ids
    return TracedStep(
        tokens=listed(tree.tokens),
        parents=listed(tree.parents),
        draft_scores=listed(tree.scores),
        p=_of_drafted(parents.child_log_probs.exp(), tree.parents)[:nodes],
        ranks=listed(parents.child_ranks),
        exact=listed(context.exact),
        eligible=listed(context.eligible),
        allowed=listed(allowed),
        choice=choice.tolist(),
        choice_p=_probabilities(context, nodes).gather(1, choice[:, None])[:, 0].tolist(),
        sayable=None if known is None else torch.isin(choice, known).tolist(),
        path=path(verdict.path),
        strict_path=path(verdict.strict_path),
        bonus=int(verdict.bonus),
        columns=tuple(_column(name, each, tree.parents, nodes) for name, each in scores.items()),
    )


def _of_drafted(values: Tensor, parents: Tensor) -> list[float]:
    """The numbers of the one row, NaN at its root."""
    found: list[float] = values.double().masked_fill(parents < 0, torch.nan)[0].tolist()
    return found


def _column(name: str, score: Score, parents: Tensor, nodes: int) -> ScoreColumn:
    bounds = holds = None
    if score.relation:
        bound = torch.as_tensor(score.bound, device=parents.device).expand_as(parents)
        bounds = _of_drafted(bound, parents)[:nodes]
        holds = score.holds[0, :nodes].tolist()
    values = _of_drafted(score.value, parents)[:nodes]
    return ScoreColumn(name, score.relation, score.token, values, bounds, holds)


def _probabilities(context: StepContext, nodes: int) -> Tensor:
    """The target's distribution after each node of the one row: [N, V] float32."""
    logits = context.logits[0, :nodes]
    sampler = context.sampler
    scores = Scores(logits.float(), None) if sampler.greedy else sampler.scores(logits)
    return scores.over(logits.shape[-1]).softmax(-1)


def trace_answer(
    decoder: SpeculativeDecoder,
    rule: Acceptor,
    prompt_ids: Sequence[int],
    *,
    watch: Callable[[int], object] = lambda _: None,
    **settings: Any,
) -> AnswerTrace:
    """Answer one prompt under ``rule`` and keep everything that was decided.

    Args:
        decoder: its own rule is put back afterwards.
        prompt_ids: the rendered prompt.
        watch: told the tokens that each step commits.
        settings: as ``SpeculativeDecoder.generate`` takes them.
    """
    tracing, before = TracingAcceptor(rule, watch), decoder.acceptor
    decoder.acceptor = tracing
    try:
        out: Any = decoder.generate(
            torch.tensor([list(prompt_ids)]), return_dict_in_generate=True, **settings
        )
    finally:
        decoder.acceptor = before
    (row,) = out.stats.rows
    tokens = out.sequences[0, len(prompt_ids) :][: row.output_tokens].tolist()
    return AnswerTrace(tokens, origins(tracing.steps, row.accept_lengths), tracing.steps, out.stats)


def origins(steps: Sequence[TracedStep], committed: Sequence[int]) -> list[TokenOrigin]:
    """Where each token of an answer comes from.

    Args:
        steps: of the answer.
        committed: tokens that each step gave it. Where the answer ends inside a path its last token
            is told as what it was, a draft token, though the record counts it as the bonus.
    """
    found = [TokenOrigin(FIRST, -1, 0)]
    for number, (step, count) in enumerate(zip(steps, committed, strict=True)):
        drafted = [
            TokenOrigin(EXACT if step.exact[node] else RELAXED, number, node)
            for _, node in pairwise(step.path)
        ]
        found += [*drafted, TokenOrigin(BONUS, number, step.path[-1])][:count]
    return found
