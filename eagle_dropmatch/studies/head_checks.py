"""What the dropout heads do at the nodes of real draft trees: their verdicts, and the closed form.

All of it is watched while the decoder answers questions with exact acceptance, so the trees and the
texts are the same whatever is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..acceptors import ExactAcceptor, NaiveAcceptor
from ..acceptors.base import PromptContext, RowState, StepContext, Verdict, joined_states
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
