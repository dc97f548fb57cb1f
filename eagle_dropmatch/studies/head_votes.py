"""Votes and divergences of the dropout heads at the nodes of real trees: DropMatch, tables 2 and 3.

The paper's table 2 may count only positions at which its JS test fails, which it does not say: both
are measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..acceptors import NaiveAcceptor
from ..acceptors.base import StepContext
from ..acceptors.divergence import js_divergence, js_from_draft
from ..acceptors.step_heads import Heads
from ..evals import first_turns
from . import paper
from .head_checks import Watching


@dataclass
class Divergences:
    """Tables 2 and 3 of DropMatch at the nodes with children, for one setting of the heads.

    Attributes, a list entry a node: votes, heads of the most frequent token; probability, its clean
    probability; draft, JS(q, c); mean_head, mean JS(p_i, c); radius, max JS(p_i, c); outside, c's
    mass outside the draft's vocabulary.
    """

    votes: list[int] = field(default_factory=list)
    probability: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    mean_head: list[float] = field(default_factory=list)
    radius: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)

    def add(self, heads: Heads, context: StepContext) -> None:
        parents, (draft, ids) = heads.parents, context.draft
        for logits, part in heads.logits():
            logits = logits.float()
            centre = logits.mean(1).log_softmax(-1)
            apart = js_divergence(logits.log_softmax(-1), centre[:, None])
            self.mean_head += apart.mean(-1).tolist()
            self.radius += apart.amax(-1).tolist()
            self.draft += js_from_draft(draft[part], ids, centre).tolist()
            self.outside += (1 - centre[:, ids].exp().sum(-1)).clamp(min=0).tolist()
            said = logits.argmax(-1)
            votes = (said[:, :, None] == said[:, None]).sum(-1)
            most, which = votes.max(-1)
            self.votes += most.tolist()
            token = said.gather(1, which[:, None])
            clean = parents.logits[part].float().log_softmax(-1).gather(1, token)[:, 0]
            self.probability += clean.exp().tolist()

    @property
    def passing(self) -> list[bool]:
        """Whether JS lets the node's children in."""
        return [q <= r for q, r in zip(self.draft, self.radius, strict=True)]


class Averages(NamedTuple):
    """What one setting of the heads says over all nodes. Lists by votes are from 1 to K."""

    p_drop: float | str
    nodes: int
    passes: float
    """Share of nodes at which JS lets the children in."""
    votes: list[float | None]
    """Share of nodes, by the heads of the most frequent token."""
    votes_failing: list[float | None]
    """The same over the nodes at which JS fails."""
    probability: list[float | None]
    """Mean clean probability of the most frequent token, by its heads."""
    draft: list[float | None]
    """Mean JS(q, c): dispersed (not all heads agree), concentrated (they do)."""
    heads: list[float | None]
    """Mean JS(p_i, c), likewise."""
    outside: float | None
    """Mean mass of c outside the draft's vocabulary."""


def measure(
    decoder: Any,
    prompts: Sequence[Sequence[int]],
    rates: Sequence[float | str],
    *,
    heads: int,
    max_new_tokens: int,
) -> list[Averages]:
    """Answer the prompts once, with exact acceptance; all rates look at the same trees."""
    rules = [NaiveAcceptor(K=heads, p_drop=p) for p in rates]  # type: ignore[arg-type]
    tables = [Divergences() for _ in rules]

    def watch(contexts: list[StepContext]) -> None:
        for rule, own, table in zip(rules, contexts, tables, strict=True):
            table.add(Heads(rule, own), own)

    first_turns.answer(decoder, prompts, Watching(rules, watch, draft=True), max_new_tokens)
    return [averages(p, table, heads) for p, table in zip(rates, tables, strict=True)]


def averages(p_drop: float | str, table: Divergences, heads: int) -> Averages:
    passing, every = table.passing, range(1, heads + 1)
    failing = [v for v, ok in zip(table.votes, passing, strict=True) if not ok]
    apart = [i for i, v in enumerate(table.votes) if v < heads]
    together = [i for i, v in enumerate(table.votes) if v == heads]
    return Averages(
        p_drop=p_drop,
        nodes=len(table.votes),
        passes=statistics.fmean(passing),
        votes=[_share(table.votes, v) for v in every],
        votes_failing=[_share(failing, v) for v in every],
        probability=[
            _mean([x for x, n in zip(table.probability, table.votes, strict=True) if n == v])
            for v in every
        ],
        draft=[_mean([table.draft[i] for i in part]) for part in (apart, together)],
        heads=[_mean([table.mean_head[i] for i in part]) for part in (apart, together)],
        outside=_mean(table.outside),
    )


def markdown(rows: Sequence[Averages], heads: int) -> list[str]:
    """Everything, a line a rate."""
    lines = [
        f"**Votes and divergences** at {rows[0].nodes:,} nodes with children. Votes: heads "
        "of the most frequent token. JS in nats.",
        "",
        f"| p_drop | JS passes | share of nodes with 1 .. {heads} votes | the same where JS "
        "fails | mean clean probability of the most frequent token, 1 .. votes | JS(q, c) "
        "dispersed / concentrated | mean JS(p_i, c) dispersed / concentrated | c outside the "
        "draft's vocabulary |",
        "|---|--:|---|---|---|---|---|--:|",
    ]
    lines += [
        f"| {row.p_drop} | {row.passes:.1%} | {_list(row.votes, '.1%')} | "
        f"{_list(row.votes_failing, '.1%')} | {_list(row.probability, '.3f')} | "
        f"{_list(row.draft, '.4f')} | {_list(row.heads, '.4f')} | {_told(row.outside, '.3f')} |"
        for row in rows
    ]
    return lines


def votes_table(rows: Sequence[Averages], heads: int) -> list[str]:
    """The paper's table 2, a line for each number of agreeing heads."""
    columns = [
        f"p_drop {row.p_drop}: {what}"
        for row in rows
        for what in ("nodes", "nodes where JS fails", "probability")
    ]
    published = paper.VOTES if heads == paper.HEADS else {}
    lines = [
        f"**Table 2, heads that agree on their most frequent token**, K = {heads}, at "
        f"{rows[0].nodes:,} nodes with children; its mean clean probability. The paper: p_drop "
        f"{paper.P_DROP}, 70B, positions of HumanEval answers.",
        "",
        f"| heads | {' | '.join(columns)} | paper: positions | paper: probability |",
        f"|--:|{'--:|' * (len(columns) + 2)}",
    ]
    for index in range(heads):
        told = [
            text
            for row in rows
            for text in (
                _told(row.votes[index], ".2%"),
                _told(row.votes_failing[index], ".2%"),
                _told(row.probability[index], ".3f"),
            )
        ]
        known = published.get(index + 1)
        told += ["", ""] if known is None else [f"{known.share:.2%}", f"{known.probability:.3f}"]
        lines.append(f"| {index + 1} | {' | '.join(told)} |")
    return lines


def divergences_table(rows: Sequence[Averages], heads: int) -> list[str]:
    """The paper's table 3."""
    apart, together = paper.DISPERSED, paper.CONCENTRATED
    lines = [
        f"**Table 3, mean JS divergence to the heads' centre**, nats, K = {heads}: where the heads "
        "disagree (dispersed) and where all say the same token (concentrated). What the centre "
        "gives to tokens outside the draft's vocabulary adds ln 2 / 2 of it to the draft's "
        "distance.",
        "",
        "| p_drop | JS passes | draft, dispersed | heads, dispersed | draft, concentrated | heads, "
        "concentrated | mass outside |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        told = [
            _told(value, ".4f") for pair in zip(row.draft, row.heads, strict=True) for value in pair
        ]
        lines.append(
            f"| {row.p_drop} | {row.passes:.1%} | {' | '.join(told)} | "
            f"{_told(row.outside, '.3f')} |"
        )
    published = [apart.draft, apart.heads, together.draft, together.heads]
    told = [f"{value:.4f}" for value in published]
    lines.append(f"| paper ({paper.P_DROP}, 8B draft for 70B) | | {' | '.join(told)} | |")
    return lines


def _share(values: Sequence[int], wanted: int) -> float | None:
    return sum(v == wanted for v in values) / len(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _told(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _list(values: Sequence[float | None], form: str) -> str:
    return " / ".join(_told(value, form) for value in values)
