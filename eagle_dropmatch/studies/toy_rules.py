"""What a rule says of a toy's nodes, its law over answers, what that costs, and the bounds.

A rule that judges a node by that node and its own numbers alone has, for each node, a law over
which children it keeps: the law over a tree is their product, exact where the picks of K heads can
be enumerated, from draws of the rule's own generators elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..acceptors import Acceptor, StepContext, parts, seed_of
from ..acceptors.dropmatch import DropoutRule, MajorityAcceptor, NaiveAcceptor
from ..acceptors.entropy_gate import EntropyGateAcceptor
from ..acceptors.flip import flip_probability
from ..acceptors.heads import drop
from ..acceptors.regret_budget import RegretBudgetAcceptor
from ..acceptors.step_heads import Heads
from ..sampling import Sampler, first_argmax
from ..target import LMHead
from ..tree import DraftTree, longest_accepted_path
from .toy import Samples, StepLaw, Toy, answer_law, context_of, long_run, step_law, token_law

_COPIES, _ROWS = 32, 64  # where single nodes are judged: copies of them in a row, rows at once
_GROUPS = 5  # of draws, whose differences give the standard error
_MOST_PICKS = 5000  # multisets of K heads' picks; more are drawn


def judges_nodes_alone(rule: Acceptor) -> bool:
    """Whether a node's children are judged by this node and by numbers of its own alone."""
    return not any(
        isinstance(part, EntropyGateAcceptor | RegretBudgetAcceptor)
        or getattr(part, "mask", "node") == "step"
        for part in parts(rule)
    )


def judged_ends(
    toy: Toy, rule: Acceptor, sampler: Sampler, samples: Samples, step: int = 0
) -> Tensor:
    """The node at which each accepted path ends, by ``rule.verify``: [R, N] float64, 1 there."""
    trees = toy.trees.rows(samples.root)
    steps = [step] * len(trees.tokens)
    verdict = rule.verify(context_of(toy, rule, sampler, trees, samples.choice, steps=steps))
    end = verdict.path.gather(1, verdict.accepted[:, None])[:, 0]
    return one_hot(end, trees.num_nodes).double()


def node_laws(
    toy: Toy, rule: Acceptor, sampler: Sampler, draws: int, seed: int = 0
) -> list[Tensor]:
    """Which of a node's children a rule accepts, if it ``judges_nodes_alone``.

    Args:
        draws: verdicts on each (token, sample), where numbers have to be drawn.

    Returns:
        Entry m - 1, for nodes with the m best of their drafted children: [G, V, V, 2^m] float64,
        with G groups of draws (1 where nothing is drawn), the chance of each set of accepted
        children, child i being bit i, after a token and with a sample there. All 0 where no tree
        has such a node.
    """
    picks = head_picks(toy, rule, sampler)
    groups = 1 if picks is not None or seed_of(rule) is None else _GROUPS
    laws = []
    for width in range(1, toy.shape.top_k + 1):
        law = torch.zeros(groups, toy.vocab, toy.vocab, 2**width, dtype=torch.float64)
        pairs = toy.probabilities(sampler).nonzero()  # [P, 2]
        pairs = pairs[toy.families[pairs[:, 0], width]]
        if picks is not None:
            weight = picks[1][pairs[:, 0]]
        else:
            each = -(-draws // groups) if groups > 1 else 1
            weight = torch.full((len(pairs), each * groups), 1 / each, dtype=torch.float64)
        count = weight.shape[1]
        nodes = pairs.repeat_interleave(count, 0)
        said = None if picks is None else picks[0].repeat(len(pairs), 1)
        group = torch.arange(count).remainder(groups).repeat(len(pairs))
        sets = [group[:0], *_judge_nodes(toy, rule, sampler, nodes, width, said, seed)]
        index = (group, *nodes.unbind(1), torch.cat(sets))
        laws.append(law.index_put_(index, weight.flatten(), accumulate=True))
    return laws


def _judge_nodes(
    toy: Toy,
    rule: Acceptor,
    sampler: Sampler,
    nodes: Tensor,
    width: int,
    said: Tensor | None,
    seed: int,
) -> Iterator[Tensor]:
    """The sets of accepted children of M nodes, as numbers: parts of [M] int64.

    Many nodes stand below one root that nobody reads, since a row's generator costs as much as
    many nodes' numbers.

    Args:
        nodes: [M, 2] int64, tokens and the target's samples there.
        width: children of each.
        said: [M, K] int64, what heads are made to say, or None.
    """
    above = torch.arange(1, 1 + _COPIES).repeat_interleave(width)
    parents = torch.cat([torch.tensor([-1]), torch.zeros(_COPIES, dtype=torch.int64), above])
    log_q = toy.draft_logits.log_softmax(-1)
    for start in range(0, len(nodes), _ROWS * _COPIES):
        index = torch.arange(start, min(start + _ROWS * _COPIES, len(nodes)))
        count, rows = len(index), -(-len(index) // _COPIES)
        index = index[torch.arange(rows * _COPIES) % count].view(rows, _COPIES)
        copies, samples = nodes[index].unbind(-1)
        children = toy.drafted[copies, :width]
        tokens = torch.cat([copies[:, :1], copies, children.flatten(1)], 1)
        scores = torch.zeros(tokens.shape)
        scores[:, 1 + _COPIES :] = log_q[copies].gather(2, children).flatten(1)
        tree = DraftTree.from_parents(tokens, parents.expand_as(tokens), scores, levels=2)
        tree = DraftTree(**{**vars(tree), "draft_logits": toy.draft_logits[tokens]})
        says = torch.zeros_like(tokens)
        says[:, 1 : 1 + _COPIES] = samples
        key = (seed * 64 + width) * 2**32 + start
        given: dict[str, Any] = {"row_keys": range(key, key + rows)}
        if said is not None:
            script = torch.cat([said[index[:, :1]], said[index]], 1)
            given["head"] = _ScriptedHead(toy.head, script)
        allowed = rule.accept(context_of(toy, rule, sampler, tree, says, **given))
        bits = allowed[:, 1 + _COPIES :].reshape(-1, width).long() << torch.arange(width)
        yield bits.sum(1)[:count]


class _ScriptedHead(LMHead):
    """Says what it is told to, whatever it sees: said [B, nodes, K], all of a step at once."""

    def __init__(self, head: LMHead, said: Tensor) -> None:
        # Something is done to the product: rules that know its rows of W must still ask.
        super().__init__(head.module, lambda logits: logits)
        self.said = said

    def __call__(self, hidden: Tensor) -> Tensor:
        size = self.weight.shape[0]
        # So far above the others that a sample is this token, too.
        return 1e4 * one_hot(self.said, size).to(hidden.dtype).view(*hidden.shape[:-1], size)


def head_picks(toy: Toy, rule: Acceptor, sampler: Sampler) -> tuple[Tensor, Tensor] | None:
    """What K heads can pick together, or None where their picks cannot be enumerated.

    Returns:
        picks [S, K] int64, in ascending order, and chances [V, S] float64 after each token.
    """
    if not isinstance(rule, NaiveAcceptor | MajorityAcceptor) or rule.noise != "dropout":
        return None
    rates = Heads(rule, _stars(toy, rule, sampler)).rates
    if math.comb(toy.vocab + rule.K - 1, rule.K) > _MOST_PICKS or (rates != rates[:, :1]).any():
        return None
    law = head_law(toy, sampler, rates[:, 0])
    every = itertools.combinations_with_replacement(range(toy.vocab), rule.K)
    picks = torch.tensor(list(every))
    repeated = torch.lgamma(one_hot(picks, toy.vocab).sum(1).double() + 1).sum(1)
    orders = (math.lgamma(rule.K + 1) - repeated).exp().round()
    return picks, orders * law[:, picks].prod(-1)


def head_law(toy: Toy, sampler: Sampler, rates: Tensor) -> Tensor:
    """What one dropout head says after each token, over all 2^D masks: [V, V] float64.

    Args:
        rates: [V] float32, p_drop after each token.
    """
    width = toy.hidden.shape[1]
    kept = torch.tensor(list(itertools.product((0.0, 1.0), repeat=width)))  # [2^D, D]
    # In the place of uniform numbers: any rate above 0 drops at a 0, and none at a 1.
    noisy = drop(toy.hidden[:, None], kept, rates[:, None, None])
    said = token_law(toy.head(noisy).flatten(0, 1), sampler).view(len(rates), len(kept), -1)
    rate, ones = rates.double()[:, None], kept.double().sum(1)
    return ((1 - rate) ** ones * rate ** (width - ones))[..., None].mul(said).sum(1)


def _stars(toy: Toy, rule: Acceptor, sampler: Sampler) -> StepContext:
    """V trees: each token with all of its drafted children."""
    tokens = torch.cat([torch.arange(toy.vocab)[:, None], toy.drafted], 1)
    parents = torch.tensor([-1, *[0] * toy.shape.top_k]).expand_as(tokens)
    tree = DraftTree.from_parents(tokens, parents, levels=1)
    return context_of(toy, rule, sampler, tree, torch.zeros_like(tokens))


def tree_ends(toy: Toy, laws: list[Tensor], samples: Samples) -> Tensor:
    """The chance of each node to end the accepted path: [R, N] float64.

    Given the target's samples, the sets of children that different nodes accept are independent.

    Args:
        laws: one group of ``node_laws``, [V, V, 2^m] each.
    """
    trees, nodes = toy.trees, toy.trees.num_nodes
    allowed = torch.tensor(list(itertools.product((False, True), repeat=nodes - 1)))
    allowed = torch.cat([torch.ones(len(allowed), 1, dtype=torch.bool), allowed], 1)
    ends = torch.zeros(len(samples.root), nodes, dtype=torch.float64)
    for root in range(toy.vocab):
        rows, parents = samples.root == root, trees.parents[root]
        inner = parents[1:].unique()  # only what is said at these matters
        choices, which = samples.choice[rows][:, inner].unique(dim=0, return_inverse=True)
        chance = ends.new_ones(len(choices), len(allowed))
        for node, said in zip(inner.tolist(), choices.unbind(1), strict=True):
            children = (parents == node).nonzero()[:, 0]
            accepted = (allowed[:, children].long() << torch.arange(len(children))).sum(1)
            chance *= laws[len(children) - 1][trees.tokens[root, node]][:, accepted][said]
        tree = trees.rows(torch.full((len(allowed),), root))
        path, count = longest_accepted_path(tree, allowed)
        end = path.gather(1, count[:, None])[:, 0]
        ends[rows] = (chance @ one_hot(end, nodes).double())[which]
    return ends


@dataclass(frozen=True)
class Cost:
    """What a rule costs on one toy.

    Attributes:
        tau: tokens committed a step, bonus included, in the long run.
        relaxed_share: of accepted draft tokens, those that the target did not say; likewise.
        tv, kl: of the answers' law from the target's own (KL of the rule's from the target's, in
            nats), the mean over all last tokens of a prompt.
        tv_error: standard error of ``tv``; 0 where nothing was drawn.
        bound: ``coupling_bound``, or None for a rule that does not judge nodes alone.
    """

    tau: float
    relaxed_share: float
    tv: float
    kl: float
    tv_error: float
    bound: float | None


def measure(
    toy: Toy,
    rule: Acceptor,
    sampler: Sampler,
    samples: Samples,
    *,
    length: int,
    draws: int = 2000,
    seed: int = 0,
) -> Cost:
    """Work out what ``rule`` costs. ``samples``: ``all_samples`` of the same toy and sampler.

    A rule that draws numbers and does not judge nodes alone is drawn five times on each sample.
    """
    laws = node_laws(toy, rule, sampler, draws, seed) if judges_nodes_alone(rule) else None
    fixed = seed_of(rule) is None
    judged = [
        judged_ends(toy, rule, sampler, samples, step)
        for step in range(1 if fixed else _GROUPS)
        if fixed or laws is None
    ]

    def law_of(groups: list[int]) -> tuple[StepLaw, Tensor]:
        if judged or laws is None:
            ends = torch.stack([judged[group] for group in groups]).mean(0)
        else:
            ends = tree_ends(toy, [law[groups].mean(0) for law in laws], samples)
        step = step_law(toy, sampler, samples, ends)
        return step, answer_law(step, length)

    def distance(law: Tensor) -> float:
        return float((law - own).abs().sum(1).mean() / 2)

    nothing = torch.zeros(toy.vocab, dtype=torch.float64)
    own = answer_law(StepLaw([toy.probabilities(sampler)], nothing), length)
    every = list(range(len(judged) if judged or laws is None else len(laws[0])))
    step, law = law_of(every)
    # Jackknife: how much the distance changes as each group of draws is left out.
    left = [distance(law_of(every[:i] + every[i + 1 :])[1]) for i in every if every[1:]]
    error = torch.tensor(left or [0.0], dtype=torch.float64).var(correction=0) * (len(every) - 1)
    tau, relaxed = long_run(step)
    return Cost(
        tau=tau,
        relaxed_share=relaxed,
        tv=distance(law),
        kl=max(float(torch.where(law > 0, law * (law / own).log(), 0.0).sum(1).mean()), 0.0),
        tv_error=float(error.sqrt()),
        bound=None if laws is None else coupling_bound(toy, sampler, laws, length),
    )


def coupling_bound(toy: Toy, sampler: Sampler, laws: list[Tensor], length: int) -> float:
    """A bound on ``tv`` for rules that judge nodes alone, from ``node_laws``.

    F(c, y) is the chance that at a node of token c, where the target says y, some child other than
    y is accepted; the greatest over the numbers of children that such nodes have in the trees. For
    naive it follows from the chance f(x) that one head says x:
    F(c, y) = 1 - (1 - sum of f(x | c) over children x != y)^K. Then, over the target's own answers,

        TV <= 1 - E[product over t < n of (1 - F(y_t, y_t+1))] <= sum over t of E[F(y_t, y_t+1)].

    Proof. Let y_0 be the prompt's last token, y_1 .. y_n the target's own answer, and let a decoder
    sample by the same numbers. While no node that it reaches has had a child accepted that is not
    the target's choice there, it reaches nodes on y alone: the committed path lies on y, and so
    does the bonus, the target's choice behind it. The node at y_t is then reached in one step at
    most, since that step commits y_t+1 and the next root lies behind y_t. Whether it is reached is
    up to other nodes' numbers, so given y and all that came before, a wrong child of it is accepted
    with a chance of at most F(y_t, y_t+1). Hence the two answers are equal with a chance of at
    least E[product of (1 - F)], and TV is at most the chance that they differ. Greedy, y is the
    greedy answer, and the sum runs over its nodes.
    """
    chance = torch.zeros(toy.vocab, toy.vocab, dtype=torch.float64)
    for width, law in enumerate(laws, 1):
        members = torch.arange(2**width)[:, None] >> torch.arange(width) & 1  # [2^m, m]
        other = toy.drafted[:, None, :width] != torch.arange(toy.vocab)[:, None]  # [V, V, m]
        wrong = (members.bool() & other[:, :, None]).any(-1)
        chance = torch.maximum(chance, (law.mean(0) * wrong).sum(-1))
    return _leaving(toy, sampler, chance, length)


def flip_bound(toy: Toy, rule: DropoutRule, length: int) -> float:
    """Greedy naive's ``coupling_bound`` in closed form, from the gaps alone: approximate.

    A head that says x prefers it to the argmax, so f(x) is at most the chance of that, which is
    about Phi(-D / s) (``flip_probability``). No mask is drawn. Under Gaussian noise this is exact,
    and so a bound; under dropout it may fall below the TV, as the fewer the dimensions and the
    lower the rate, the less the gap is normal.
    """
    sampler = Sampler()
    stars = _stars(toy, rule, sampler)
    rates = stars.parents.to_children(Heads(rule, stars).rates)
    flips = flip_probability(stars, toy.head, rates)[:, 1:].double()  # [V, top_k, K]
    best = first_argmax(toy.logits)
    flips = flips.masked_fill((toy.drafted == best[:, None])[..., None], 0.0)
    some = 1 - (1 - flips.sum(1).clamp(max=1)).prod(-1)
    return _leaving(toy, sampler, some[:, None].expand(-1, toy.vocab), length)


def _leaving(toy: Toy, sampler: Sampler, chance: Tensor, length: int) -> float:
    """1 - E[product of (1 - chance[y_t, y_t+1])] over the target's own answers."""
    stays = toy.probabilities(sampler) * (1 - chance)
    return float(1 - torch.linalg.matrix_power(stays, length).sum(1).mean())
