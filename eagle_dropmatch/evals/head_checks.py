"""What the dropout heads do at the nodes of real draft trees: cost, closed form, divergences.

All of it is watched while the decoder answers questions with exact acceptance, so the trees and the
texts are the same whatever is looked at.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..acceptors import ExactAcceptor, NaiveAcceptor
from ..acceptors.base import PromptContext, RowState, StepContext, Verdict, joined_states
from ..acceptors.divergence import js_divergence, js_from_draft
from ..acceptors.dropmatch import DropoutRule
from ..acceptors.heads import drop
from ..acceptors.step_heads import Heads
from ..target import LMHead, PrefillOutput
from ..truncation import siblings


class Watching(ExactAcceptor):
    """Exact acceptance that shows a watcher every step as each of some dropout rules sees it."""

    def __init__(
        self,
        rules: Sequence[DropoutRule],
        watch: Callable[[list[StepContext]], None],
        *,
        draft: bool = False,
    ) -> None:
        self.watched, self.watch, self.needs_draft = list(rules), watch, draft

    def start(self, context: PromptContext) -> RowState:
        return joined_states(self.watched, context)

    def verify(self, context: StepContext) -> Verdict:
        self.watch([context.of_part(index) for index in range(len(self.watched))])
        return super().verify(context)


@dataclass
class CheapHeads:
    """Naive's verdicts by few rows and columns of W, against all heads over all tokens.

    Attributes:
        pairs: (node with children, head) pairs compared.
        nodes: drafted nodes compared.
        differing: nodes with another verdict.
        accepted: nodes that all heads over all tokens let in.
        paths: steps; other_paths: steps whose accepted path differs.
    """

    rule: NaiveAcceptor
    pairs: int = 0
    nodes: int = 0
    differing: int = 0
    accepted: int = 0
    paths: int = 0
    other_paths: int = 0

    def __call__(self, contexts: list[StepContext]) -> None:
        (own,) = contexts
        heads = Heads(self.rule, own)
        child = own.tree.parents >= 0
        said = heads.parents.to_children(heads.choices)
        whole = (said == own.tree.tokens[..., None]).any(-1) & child
        cheap = heads.picks() & child
        self.pairs += heads.rates.numel()
        self.nodes += int(child.sum())
        self.differing += int((whole != cheap).sum())
        self.accepted += int(whole.sum())
        self.paths += own.tree.batch_size
        path, pruned = _path(self.rule, own, whole), self.rule.verify(own).path
        self.other_paths += int((path != pruned).any(-1).sum())


def _path(rule: NaiveAcceptor, context: StepContext, allowed: Tensor) -> Tensor:
    """The path that the walk keeps of these nodes."""

    class Told(NaiveAcceptor):
        def accept_path(self, context: StepContext, eligible: Tensor) -> Tensor:
            return allowed

    return Told(K=rule.K).verify(context).path


def random_step(head: LMHead, rule: NaiveAcceptor, nodes: int, seed: int) -> StepContext:
    """Trees of a root and its eight likeliest tokens, after random states: ``nodes`` of them.

    The states are scaled so that logits have a standard deviation of 4. Where all tokens are alike
    many are near the top, which is the hardest case for heads that look at few.
    """
    size = head.weight.shape[1]
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(nodes, size, generator=generator)
    states *= 4.0 / (states.square() * head.column_variance.cpu()).sum(-1, keepdim=True).sqrt()
    hidden = states.to(head.weight)
    logits = head(hidden)
    top = logits.float().topk(8, dim=-1).indices
    prefill = PrefillOutput(logits, hidden, hidden[:, None], hidden[:, None])
    state = rule.start(PromptContext(prefill, [1] * nodes, head))
    return siblings(top, logits, hidden, head, range(nodes), [seed] * nodes, state)


@dataclass
class HeadTimes:
    """Seconds a step of the verification forward, of naive's cheap heads, and of all heads.

    The forward's are put in by ``timing``, which wraps the target's verify.
    """

    rule: NaiveAcceptor
    forward: list[float] = field(default_factory=list)
    cheap: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def __call__(self, contexts: list[StepContext]) -> None:
        (own,) = contexts
        order = [(self.cheap, self._cheap), (self.whole, self._whole)]
        if len(self.cheap) % 2:  # neither always finds the caches as the other left them
            order.reverse()
        for seconds, work in order:
            # What exact acceptance has no need of belongs to the rule's time.
            own.__dict__.pop("parents", None)
            began = time.perf_counter()
            work(own)
            seconds.append(time.perf_counter() - began)

    def _cheap(self, context: StepContext) -> None:
        self.rule.accept_path(context, context.eligible)

    def _whole(self, context: StepContext) -> None:
        heads = Heads(self.rule, context)
        said = heads.parents.to_children(heads.choices)
        (said == context.tree.tokens[..., None]).any(-1)

    def timing(self, verify: Callable[..., Any]) -> Callable[..., Any]:
        """``verify`` with its seconds kept."""

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            out = verify(*args)
            self.forward.append(time.perf_counter() - began)
            return out

        return timed

    def shares(self) -> tuple[float, float]:
        """Median cheap and whole seconds as shares of the median forward."""
        forward = statistics.median(self.forward)
        return statistics.median(self.cheap) / forward, statistics.median(self.whole) / forward


@dataclass
class FlipCheck:
    """The closed form of a head's preference, beside the share of many sampled masks.

    Takes every ``every``-th drafted node that is not its parent's argmax.

    Attributes:
        closed: Phi(-D / s); beats: share of masks under which the node's token beats the argmax;
            wins: share under which it beats the ``rivals`` likeliest tokens, too; terms: how many
            dimensions carry the gap, (sum x^2)^2 / sum x^4.
    """

    every: int = 40
    most: int = 400
    masks: int = 10_000
    rivals: int = 64
    seen: int = 0
    closed: list[float] = field(default_factory=list)
    beats: list[float] = field(default_factory=list)
    wins: list[float] = field(default_factory=list)
    terms: list[float] = field(default_factory=list)

    def __call__(self, contexts: list[StepContext]) -> None:
        (context,) = contexts
        tree, rates = context.tree, context.state["p_drop"]
        wanted = (tree.parents >= 0) & ~context.exact
        for row, node in wanted.nonzero().tolist():
            self.seen += 1
            if self.seen % self.every or len(self.closed) >= self.most:
                continue
            parent = int(tree.parents[row, node])
            self._one(
                context.output.hidden[row, parent].float(),
                context.logits[row, parent].float(),
                context.head,
                int(tree.tokens[row, node]),
                float(rates[row, 0]),
            )

    def _one(self, h: Tensor, logits: Tensor, head: LMHead, token: int, rate: float) -> None:
        tops = logits.topk(self.rivals).indices
        tops = tops[tops != token]
        rows = head.weight[torch.cat((tops, tops.new_tensor([token])))].float()
        gap = (rows[0] - rows[-1]) * h
        if rate == 0 or gap.sum() <= 0:
            return
        s = (rate / (1 - rate) * gap.square().sum()).sqrt()
        generator = torch.Generator(h.device).manual_seed(self.seen)
        uniforms = torch.rand(self.masks, len(h), generator=generator, device=h.device)
        noisy = drop(h.expand(self.masks, -1), uniforms, torch.tensor(rate)) @ rows.T
        mine = noisy[:, -1]
        self.closed.append(float(torch.special.ndtr(-gap.sum() / s)))
        self.beats.append(float((mine > noisy[:, 0]).float().mean()))
        self.wins.append(float((mine > noisy[:, :-1].amax(1)).float().mean()))
        squares = gap.square()
        self.terms.append(float(squares.sum().square() / squares.square().sum()))


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
