"""Sampling the target under an acceptance rule's own truncation: the control for lossy rules.

A rule that keeps any token above some bar lets the draft choose among those tokens. Sampling the
target itself among the same tokens, without a draft, tells what the truncation costs alone, and so
what the draft's choosing adds (arXiv 2607.26627).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import Acceptor, RowState, StepContext
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.sampling import Sampler, Scores
from eagle_dropmatch.target import LMHead, TargetOutput
from eagle_dropmatch.tree import DraftTree

#: Tokens that can be sampled at a place: the likeliest, among which the rule chooses.
CANDIDATES = 64


def require_usable(rule: Acceptor) -> None:
    """UserError for a rule that cannot say what it would accept where nothing is drafted."""
    if rule.needs_draft:
        raise UserError(
            f"truncation {rule.name!r} compares with the draft's distribution: without a draft "
            "there is none"
        )


def truncate(
    rule: Acceptor,
    logits: Tensor,
    hidden: Tensor,
    head: LMHead,
    row_keys: Sequence[int],
    steps: Sequence[int],
    state: RowState,
) -> Scores:
    """The target's own scores, over the tokens that the rule would accept if they were drafted.

    The rule judges greedily: one tree a row, whose children are the ``CANDIDATES`` likeliest
    tokens. The likeliest of all is always kept.

    Args:
        logits: [B, V], clean.
        hidden: [B, D], the LM head's input.
        row_keys, steps, state: of the rule's random numbers and options, as in a step.
    """
    top = logits.float().topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
    kept = rule.accept(siblings(top.indices, logits, hidden, head, row_keys, steps, state))[:, 1:]
    kept[:, 0] = True
    return Scores(top.values.masked_fill(~kept, -torch.inf), top.indices)


def siblings(
    tokens: Tensor,
    logits: Tensor,
    hidden: Tensor,
    head: LMHead,
    row_keys: Sequence[int],
    steps: Sequence[int],
    state: RowState,
) -> StepContext:
    """A greedy step over trees of a root and its children alone.

    Args:
        tokens: [B, C] int64, the children; the first is what the target says.
        logits, hidden, row_keys, steps, state: as for ``truncate``.
    """
    batch, count = tokens.shape
    parents = torch.zeros(batch, count + 1, dtype=torch.int64, device=logits.device)
    parents[:, 0] = -1
    tree = DraftTree.from_parents(torch.cat((tokens[:, :1], tokens), dim=1), parents, levels=1)
    wide = logits[:, None].expand(-1, count + 1, -1)
    states = hidden[:, None].expand(-1, count + 1, -1)
    return StepContext(
        tree=tree,
        output=TargetOutput(wide, states, states),
        head=head,
        sampler=Sampler(),
        logits=wide,
        before=None,
        choice=tokens[:, :1].expand(-1, count + 1),
        stop_ids=torch.empty(0, dtype=torch.int64, device=logits.device),
        row_keys=row_keys,
        steps=steps,
        state=state,
    )
