"""What an acceptance rule costs: its output law on a toy that can be enumerated.

The target is a Markov chain over V tokens with hidden states and an LM head, logits = W h(last
token); the draft is a noisy copy of it, whose trees are grown as EAGLE grows them. One step is
worked out from its root: each combination of tokens that the target may sample at the tree's nodes
is a row of one batch, which the rule's own code judges. Steps follow each other as a Markov chain,
which gives the law of whole answers and the long-run tau without any simulation.

The target samples as in ``sampling.py``: the nodes of one depth share a number. Each step draws new
ones here; the package ties them to places of the answer and meets some again in the next step. That
is one law as long as a node's verdict depends on samples above it alone, since what a step commits
then says nothing about later numbers. ``entropy_gate`` looks below a node.

A rule's own random numbers are enumerated where only the picks of K heads matter (naive and
majority, with dropout) and drawn by its own generators elsewhere. Such rules judge the children of
a node by that node and its own numbers, so the law over a tree is a product: the draws only have to
tell single nodes' verdicts.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..acceptors import Acceptor, PromptContext, StepContext
from ..drafts.base import TreeShape
from ..errors import UserError
from ..sampling import Sampler, first_argmax
from ..target import LMHead, PrefillOutput, TargetOutput
from ..tree import DraftTree, Expansion, grow, path_sums

_MOST_TOKENS, _MOST_NODES, _MOST_MASKED = 16, 13, 12
_MOST_SAMPLES, _MOST_ANSWERS = 250_000, 100_000


@dataclass(frozen=True, eq=False)
class Toy:
    """A target and a draft that look at the last token alone.

    Attributes:
        hidden: [V, D] float32, the LM head's input after each token.
        draft_logits: [V, V] float32, the draft's after each token.
        shape: of the draft trees; a top_k of 1 drafts chains.
    """

    hidden: Tensor
    head: LMHead
    draft_logits: Tensor
    shape: TreeShape

    @property
    def vocab(self) -> int:
        """V."""
        return self.draft_logits.shape[0]

    @cached_property
    def logits(self) -> Tensor:
        """[V, V] float32, the target's after each token."""
        return self.head(self.hidden)

    @cached_property
    def drafted(self) -> Tensor:
        """[V, top_k] int64: what the draft proposes after each token, best first."""
        return self.draft_logits.topk(self.shape.top_k, dim=-1).indices

    @cached_property
    def trees(self) -> DraftTree:
        """The tree that is grown from each token: V rows."""
        log_probs = self.draft_logits.log_softmax(-1).gather(1, self.drafted)

        def children(tokens: Tensor) -> Expansion:
            return Expansion(self.drafted[tokens], log_probs[tokens], self.draft_logits[tokens])

        roots = torch.arange(self.vocab)
        first = children(roots[:, None])
        return grow(roots, first, lambda level: children(level.tokens), **vars(self.shape))

    @cached_property
    def families(self) -> Tensor:
        """[V, top_k + 1] bool: whether some tree has a node of this token with so many children.

        Those are the best of the drafted ones: growth leaves out the worst.
        """
        trees = self.trees
        counts = one_hot(trees.parents.clamp(min=0), trees.num_nodes)[:, 1:].sum(1)
        found = torch.zeros(self.vocab, self.shape.top_k + 1, dtype=torch.bool)
        found[trees.tokens, counts] = True
        return found

    def probabilities(self, sampler: Sampler) -> Tensor:
        """[V, V] float64: the target's own law after each token."""
        return token_law(self.logits, sampler)


def make_toy(
    vocab: int,
    shape: TreeShape,
    seed: int,
    *,
    hidden_size: int = 10,
    sharpness: float = 3.0,
    draft_scale: float = 0.8,
    draft_noise: float = 0.5,
) -> Toy:
    """A random toy.

    Args:
        vocab: V, 2 to 16.
        shape: of the draft trees, of at most 13 nodes.
        hidden_size: D, at most 12: all 2^D dropout masks are enumerated.
        sharpness: standard deviation of the target's logits.
        draft_scale, draft_noise: the draft's logits are the target's times the one, plus normal
            noise of ``sharpness`` times the other.
    """
    for name, value, least, most in (
        ("vocab", vocab, 2, _MOST_TOKENS),
        ("top_k", shape.top_k, 1, vocab),
        ("the tree's total_token", shape.nodes, 2, _MOST_NODES),
        ("hidden_size", hidden_size, 1, _MOST_MASKED),
    ):
        if not least <= value <= most:
            raise UserError(f"{name} is {value}: this toy can have {least} to {most}")
    generator = torch.Generator().manual_seed(seed)
    module = torch.nn.Linear(hidden_size, vocab, bias=False).requires_grad_(False)
    weight = torch.randn(vocab, hidden_size, generator=generator)
    module.weight.copy_(weight * sharpness / math.sqrt(hidden_size))
    hidden = torch.randn(vocab, hidden_size, generator=generator)
    head = LMHead(module)
    noise = draft_noise * sharpness * torch.randn(vocab, vocab, generator=generator)
    return Toy(hidden, head, draft_scale * head(hidden) + noise, shape)


def token_law(logits: Tensor, sampler: Sampler) -> Tensor:
    """What is said from ``logits`` [M, V]: [M, V] float64."""
    if sampler.greedy:
        return one_hot(first_argmax(logits), logits.shape[-1]).double()
    return sampler.scores(logits).over(logits.shape[-1]).double().softmax(-1)


class Samples(NamedTuple):
    """All R combinations of tokens that the target may say in one step, root by root."""

    root: Tensor  # [R] int64
    choice: Tensor  # [R, N] int64, at every node; 0 at the deepest, which no verdict looks at
    weight: Tensor  # [R] float64, adding up to 1 for each root


def all_samples(toy: Toy, sampler: Sampler) -> Samples:
    """Cut each depth's number wherever the sample of one of its nodes changes."""
    trees, found = toy.trees, []
    for root in range(toy.vocab):
        tokens, levels = trees.tokens[root], []
        for depth in range(int(trees.depths.max())):
            nodes = (trees.depths[root] == depth).nonzero()[:, 0]
            levels.append((nodes, *_pieces(toy.logits[tokens[nodes]], sampler)))
        if (count := math.prod(len(each[1]) for each in levels)) * toy.vocab > _MOST_SAMPLES:
            raise UserError(
                f"the target can say {count} different things along the tree of token {root}, of "
                f"which at most {_MOST_SAMPLES // toy.vocab} can be enumerated: give a smaller "
                "vocabulary or tree"
            )
        rows = torch.tensor(list(itertools.product(*(range(len(each[1])) for each in levels))))
        choice = torch.zeros(len(rows), trees.num_nodes, dtype=torch.int64)
        weight = torch.ones(len(rows), dtype=torch.float64)
        for (nodes, widths, said), piece in zip(levels, rows.unbind(1), strict=True):
            choice[:, nodes] = said[piece]
            weight *= widths[piece]
        found.append((torch.full((len(rows),), root), choice, weight))
    return Samples(*(torch.cat(each) for each in zip(*found, strict=True)))


def _pieces(logits: Tensor, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """The intervals of a number on which no sample from ``logits`` [m, V] changes.

    Returns their widths [w] float64 and the samples [w, m] there.
    """
    if sampler.greedy:
        return torch.ones(1, dtype=torch.float64), first_argmax(logits)[None]
    reached = sampler.scores(logits).values.double().softmax(-1).cumsum(-1)
    ends = reached.new_tensor([0.0, 1.0])
    edges = torch.cat([ends, reached[:, :-1].flatten()]).clamp(0, 1).unique()
    middles = (edges[1:] + edges[:-1]) / 2
    every = sampler.scores(logits.repeat(len(middles), 1))
    said = sampler.choose(every, middles.repeat_interleave(len(logits)))
    return edges.diff(), said.view(len(middles), len(logits))


def context_of(
    toy: Toy, rule: Acceptor, sampler: Sampler, tree: DraftTree, choice: Tensor, **given: Any
) -> StepContext:
    """A step over ``tree`` in which the target says ``choice`` [B, N]; ``given``: other fields.

    The prompt, on which ``p_drop="auto"`` is solved, holds every token once.
    """
    hidden, logits = toy.hidden[tree.tokens], toy.logits[tree.tokens]
    prompt = PrefillOutput(logits[:1, 0], toy.hidden[-1:], toy.hidden[None], toy.hidden[None])
    state = rule.start(PromptContext(prompt, [toy.vocab], toy.head))
    rows = len(choice)
    fields: dict[str, Any] = {
        "tree": tree,
        "output": TargetOutput(logits, hidden, hidden),
        "head": toy.head,
        "sampler": sampler,
        "logits": logits,
        "before": None,
        "choice": choice,
        "stop_ids": choice.new_zeros(0),
        "row_keys": range(rows),
        "steps": [0] * rows,
        "draft_ids": torch.arange(toy.vocab),
        "state": {name: value.expand(rows, *value.shape[1:]) for name, value in state.items()},
    }
    return StepContext(**{**fields, **given})


class StepLaw(NamedTuple):
    """The law of one step from each root token."""

    commits: list[Tensor]  # entry j - 1: [V, V^j] float64, of committing these j tokens
    relaxed: Tensor  # [V] float64, expected accepted tokens that are not the target's samples


def step_law(toy: Toy, sampler: Sampler, samples: Samples, ends: Tensor) -> StepLaw:
    """What is committed: the accepted path, which ends at a node with chances [R, N], and bonus."""
    trees, size = toy.trees, toy.vocab
    deepest = int(trees.depths.max())
    codes = torch.zeros_like(trees.tokens)  # paths' tokens, in base V
    for node in range(1, trees.num_nodes):
        above = codes.gather(1, trees.parents[:, node : node + 1])[:, 0]
        codes[:, node] = above * size + trees.tokens[:, node]
    mass = samples.weight[:, None] * ends
    commits = []
    for depth in range(deepest + 1):
        row, end = (trees.depths[samples.root] == depth).nonzero(as_tuple=True)
        root, flat = samples.root[row], mass.new_zeros(size ** (depth + 2))
        place = (root * size**depth + codes[root, end]) * size
        if depth < deepest:
            flat.index_add_(0, place + samples.choice[row, end], mass[row, end])
        else:  # no verdict knows the samples there: the bonus follows the target's own law
            bonus = toy.probabilities(sampler)[trees.tokens[root, end]]
            places = place[:, None] + torch.arange(size)
            flat.index_add_(0, places.flatten(), (mass[row, end, None] * bonus).flatten())
        commits.append(flat.view(size, -1))
    drawn = trees.rows(samples.root)
    missed = drawn.tokens != samples.choice.gather(1, drawn.parents.clamp(min=0))
    relaxed = (mass * path_sums(drawn, missed.long())).sum(1)
    return StepLaw(commits, mass.new_zeros(size).index_add_(0, samples.root, relaxed))


def answer_law(step: StepLaw, length: int) -> Tensor:
    """The law of answers of ``length`` tokens after each last prompt token: [V, V^length] float64.

    What the last step commits beyond the length is cut off.
    """
    size = len(step.relaxed)
    if size**length > _MOST_ANSWERS:
        raise UserError(
            f"{size} tokens form {size**length} answers of {length}, of which at most "
            f"{_MOST_ANSWERS} can be enumerated: give a smaller vocabulary or length"
        )
    reached = [step.relaxed.new_zeros(size, size**written) for written in range(length + 1)]
    for written in range(length):
        for count, commit in enumerate(step.commits, 1):
            count = min(count, length - written)
            more = commit.view(size, size**count, -1).sum(-1)
            if written:
                before = reached[written].view(size, -1, size)
                more = torch.einsum("pac,ck->pack", before, more).reshape(size, -1)
            reached[written + count] += more
    return reached[length]


def long_run(step: StepLaw) -> tuple[float, float]:
    """tau and the relaxed share of long answers: roots follow each other as a Markov chain."""
    size = len(step.relaxed)
    moves, tokens = step.relaxed.new_zeros(size, size), step.relaxed.new_zeros(size)
    for count, commit in enumerate(step.commits, 1):
        moves += commit.view(size, -1, size).sum(1)
        tokens += count * commit.sum(1)
    # Staying half of the time changes no share, and lets greedy chains, which run in circles, rest.
    lazy = (moves + torch.eye(size, dtype=moves.dtype)) / 2
    share = torch.linalg.matrix_power(lazy, 2**20).mean(0)
    share = share / share.sum()
    tau, relaxed = float(share @ tokens), float(share @ step.relaxed)
    return tau, relaxed / (tau - 1) if relaxed > 0 else 0.0
