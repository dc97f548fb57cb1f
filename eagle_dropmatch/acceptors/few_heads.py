"""Which drafted tokens some dropout head says, without the heads' products over the vocabulary.

A head can only say a drafted token that beats its siblings and the clean argmax, which takes their
few rows of W. Few (drafted token, head) pairs are left after that, and for each of them one
question: does the token beat the rest of the vocabulary, too? A head's logits are the clean ones
less what its dropped dimensions S gave, (W h - W_S h_S) / (1 - p), which costs p times a whole
product. That tells them to within the rounding of the clean logits; tokens as near as that are
looked at by their own rows of W. Where even these leave a doubt, a whole product settles it. So
verdicts are those of all heads over all tokens.

(A bound on the tail of all other tokens would need no look at them. On the reference target it
bounds nothing: with the deviation of each token known exactly, hundreds of tokens a node are still
likelier than one in ten million to win.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from eagle_dropmatch.acceptors import few_heads_native
from eagle_dropmatch.acceptors.heads import drop
from eagle_dropmatch.sampling import first_argmax
from eagle_dropmatch.tree import longest_accepted_path

if TYPE_CHECKING:
    from eagle_dropmatch.acceptors.step_heads import Heads

_PAIRS_AT_ONCE = 64  # whose logits over the vocabulary are held together
_RIVALS = 32  # of a pair, on average; with more of them a whole product is cheaper


def few_heads(heads: Heads, also: Tensor | None = None, eligible: Tensor | None = None) -> Tensor:
    """Whether some head's argmax at its parent is each node: [B, N] bool.

    For greedy decoding whose logits are the head's product itself.

    Args:
        also: [B, N] bool, nodes that are accepted for other reasons, and here without a look.
        eligible: [B, N] bool, nodes that may be on a path. Given, only as many nodes are looked at
            as it takes to know the longest path of accepted nodes: others may be refused.
    """
    context, parents, tree = heads.context, heads.parents, heads.context.tree
    if context.head.native:
        found = few_heads_native.few_heads(heads, also, eligible)
        if found is not None:
            return found
    slot, tokens = parents.slot, tree.tokens
    child = (tree.parents >= 0)[..., None]
    still = (heads.rates == 0)[slot]  # without dropout a head says what the target says
    accepted = context.exact & still.any(-1)
    if also is not None:
        accepted |= also

    # The heads' logits of the drafted tokens and, at the parents, of the clean argmax.
    asked = torch.cat((context.choice[parents.row, parents.node], tokens.flatten()))
    places = torch.cat((torch.arange(parents.count, device=slot.device), slot.flatten()))
    own = context.head.at(heads.noisy.index_select(0, places), asked)
    best, values = own[: parents.count], own[parents.count :].view(*slot.shape, -1)
    values = values.masked_fill(~child, -torch.inf)
    index = slot.flatten()[:, None].expand(-1, best.shape[1])
    best = best.scatter_reduce(0, index, values.flatten(0, 1), "amax")[slot]
    # Whole products are rounded to the model's dtype, and ties go to the lower id: what is this
    # near may win there.
    slack = 2 * torch.finfo(heads.noisy.dtype).eps * best.abs().clamp(min=1.0)
    maybe = child & ~still & (values >= best - slack)

    # The longest path of what may be accepted is the longest of what is, once all of it is known to
    # be. Each of its tokens is tried with its most promising head first, then with all others.
    promise = values.masked_fill(~maybe, -torch.inf)
    first = promise == promise.amax(-1, keepdim=True)
    while True:
        waiting = maybe & ~accepted[..., None] & first
        if eligible is not None:
            path = longest_accepted_path(tree, (accepted | maybe.any(-1)) & eligible).nodes
            on_path = torch.zeros_like(accepted).scatter_(1, path.clamp(min=0), True)
            waiting &= on_path[..., None]
        row, node, number = waiting.nonzero(as_tuple=True)
        failed = False
        for start in range(0, len(row), _PAIRS_AT_ONCE):
            part = slice(start, start + _PAIRS_AT_ONCE)
            at = row[part], node[part]
            pairs = _Pairs(heads, slot[at], number[part], tokens[at], values[(*at, number[part])])
            wins = pairs.beat_all()
            accepted[at[0][wins], at[1][wins]] = True
            first[at] = True
            maybe[(*at, pairs.number)] = False
            failed = failed or not bool(wins.all())
        if not failed:
            return accepted


@dataclass(frozen=True)
class _Pairs:
    """Some (drafted token, head) pairs: does the head say the token?"""

    heads: Heads
    slot: Tensor  # [n] int64, of the token's parent
    number: Tensor  # [n] int64, of the head
    token: Tensor  # [n] int64
    value: Tensor  # [n] float32, the head's logit of it

    def beat_all_whole(self) -> Tensor:
        """``beat_all`` by products over the vocabulary."""
        said = first_argmax(self.heads.context.head(self.heads.noisy[self.slot, self.number]))
        return said == self.token

    def beat_all(self) -> Tensor:
        """Whether each token beats the whole vocabulary: [n] bool."""
        rest, scale = self._rest()
        if rest is None:
            return self.beat_all_whole()
        noisy, head = self.heads.noisy, self.heads.context.head
        # Rounded are the clean logits, what was lost of them, the disturbed input and the head's
        # own product: a rival is what comes this near.
        size = noisy.shape[-1]
        slack = 3 * torch.finfo(noisy.dtype).eps + size * 2.0**-23
        bar = (self.value - slack * self.value.abs().clamp(min=1.0)) / scale
        owner, rival = _at_least(rest, bar)
        if not len(owner):
            return torch.ones_like(self.token, dtype=torch.bool)
        if len(owner) > _RIVALS * len(bar):
            return self.beat_all_whole()
        rivals = head.at(noisy[self.slot[owner], self.number[owner], None], rival)[:, 0]
        # Whole products add up in another order before they are rounded.
        values = torch.cat((self.value, rivals))
        order = size**0.5 * 2.0**-22 * values.abs().clamp(min=1.0)
        lows, highs = (values - order).to(noisy.dtype), (values + order).to(noisy.dtype)
        low, high, token = lows[owner], highs[owner], self.token[owner]
        worst, best = lows[len(bar) :], highs[len(bar) :]
        lost = (worst > high) | ((worst == high) & (rival < token))
        safe = (low > best) | ((low == best) & (token < rival))
        beaten, doubted = torch.zeros(2, len(bar), dtype=torch.bool, device=bar.device)
        beaten[owner[lost]] = True
        doubted[owner[~safe]] = True
        doubted &= ~beaten
        beaten = ~beaten
        if doubted.any():
            some = _Pairs(self.heads, *(each[doubted] for each in self._columns))
            beaten[doubted] = some.beat_all_whole()
        return beaten

    @property
    def _columns(self) -> tuple[Tensor, ...]:
        return self.slot, self.number, self.token, self.value

    def _rest(self) -> tuple[Tensor | None, Tensor]:
        """(1 - p) times the heads' logits of all other tokens, nearly: [n, V] float32.

        And 1 / (1 - p) as the heads take it, [n] float32. None where they are not cheaper than a
        whole product.
        """
        heads, context = self.heads, self.heads.context
        head, parents = context.head, heads.parents
        if heads.noise is not drop:
            return None, self.value
        # One index for both: a head of a node.
        which = self.slot * heads.rates.shape[1] + self.number
        rates = heads.rates.flatten().index_select(0, which)
        scale = (1.0 - rates).reciprocal().to(parents.hidden.dtype).float()
        dropped = heads.uniforms.flatten(0, 1).index_select(0, which) < rates[:, None]
        owner, dimension = dropped.nonzero(as_tuple=True)
        if len(dimension) > dropped.shape[1] // 2:
            return None, scale
        counts = dropped.sum(-1)
        lost = functional.embedding_bag(
            dimension,
            head.columns,
            counts.cumsum(0) - counts,
            mode="sum",
            per_sample_weights=parents.hidden[self.slot[owner], dimension],
        )
        rest = context.logits[parents.row[self.slot], parents.node[self.slot]].float()
        rest -= lost
        if head.bias is not None:
            rest += head.bias * (1 / scale[:, None] - 1)
        return rest.scatter_(1, self.token[:, None], -torch.inf), scale


def _at_least(scores: Tensor, bar: Tensor) -> tuple[Tensor, Tensor]:
    """The rows and columns of all scores [n, V] that reach their row's bar [n]."""
    # Blocks of tokens first: hardly any holds one.
    blocks = math.gcd(scores.shape[1], 64)
    folded = scores.view(len(scores), blocks, -1)
    row, block = (folded.amax(1) >= bar[:, None]).nonzero(as_tuple=True)
    found, which = (folded[row, :, block] >= bar[row, None]).nonzero(as_tuple=True)
    return row[found], which * folded.shape[2] + block[found]
