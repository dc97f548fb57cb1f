"""EAGLE-2 and EAGLE-3 growth of draft trees (arXiv 2406.16858, section 4; 2503.01840).

Expansion: a beam of top_k rows, chosen by cumulative log-probability, is expanded `depth` times.
Re-ranking: of all candidates ever scored, the total_token - 1 best become the tree.

Flat candidate order, for top_k = k: candidates 0 .. k - 1 are the root's children; the expansion of
level i appends k * k more, beam row by beam row. A parent therefore precedes its children.

Both selections sort by descending score and, among equal scores, by ascending flat index. A child's
score is at most its parent's (log-probabilities are not positive) and its index is greater, so a
parent sorts before its children and no child is ever kept without its parent.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle_dropmatch.tree.draft_tree import DraftTree


class Expansion(NamedTuple):
    """The K best children of each of R beam rows, as a scorer returns them.

    tokens: [B, R, K] int64, ids in the target's vocabulary, best first.
    log_probs: [B, R, K] float, log-softmax over the draft's vocabulary; -inf marks a child that
        does not exist.
    logits: [B, R, V_draft] or None, over all of the draft's vocabulary, for the tree to keep.
    """

    tokens: Tensor
    log_probs: Tensor
    logits: Tensor | None = None


class BeamLevel(NamedTuple):
    """The beam that a scorer is asked to expand.

    tokens: [B, R] int64, tokens of the beam rows.
    parent_rows: [B, R] int64, the row of the previous level's beam that each row came from; zeros
        at level 0, whose rows all come from the root.
    visible: [B, R, (index + 1) * R] bool, the drafted slots that each row attends to: its ancestors
        and itself. Slots are level-major, R to a level; context slots are not included.
    index: the level, from 0. The rows of level i are i + 1 tokens after the root.
    """

    tokens: Tensor
    parent_rows: Tensor
    visible: Tensor
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


Scorer = Callable[[BeamLevel], Expansion]


class GrowthPolicy(Protocol):
    """Decides how far a tree grows, where that is not fixed. Answers are for the whole batch."""

    def deepen(self, level: int, beam: Tensor) -> bool:
        """Whether to expand the beam, whose rows are ``level`` tokens after the root.

        beam: [B, R] float32, cumulative log-probabilities, best first.
        """
        ...

    def choose(self, scores: Tensor, levels: int) -> int:
        """Nodes of the trees, the root included; more than ``total_token`` are not given.

        scores: [B, C] float32, of the best candidates, best first. levels: that were drafted.
        """
        ...


def candidate_count(depth: int, top_k: int) -> int:
    """Candidates that growth scores: no tree has more nodes than this, plus its root."""
    return top_k + depth * top_k * top_k


def grow(
    root: Tensor,
    first: Expansion,
    expand: Scorer,
    *,
    depth: int,
    top_k: int,
    total_token: int,
    policy: GrowthPolicy | None = None,
) -> DraftTree:
    """Grows one tree per row.

    root: [B] int64, the last committed tokens.
    first: [B, 1, top_k], the root's children.
    expand: scores one beam level; called `depth` times, or never if total_token is 1. On a CPU,
        where looking costs nothing, no more once no descendant of the beam could be kept.
    policy: may stop growth before `depth` and keep fewer nodes; it reads scores on the host.
    depth: expansions after the first. Nodes reach depth + 1 levels below the root, so a step
        commits at most depth + 2 tokens, the bonus included.
    top_k: beam width and children per node; 1 drafts a chain.
    total_token: nodes of the tree with its root. More than `candidate_count` + 1 cannot be had:
        the tree is then smaller.

    Returns trees of min(total_token, candidate_count + 1) nodes, in flat candidate order; a chosen
    candidate of probability zero is padding. Equal to the reference wherever scores are distinct.
    """
    if depth < 0 or top_k < 1 or total_token < 1:
        raise ValueError(
            f"a tree needs depth >= 0, top_k >= 1 and total_token >= 1, "
            f"got depth {depth}, top_k {top_k}, total_token {total_token}"
        )
    if total_token == 1:
        return DraftTree.root_only(root)
    beam_scores = _checked_log_probs(first, (root.shape[0], 1, top_k))[:, 0]
    beam_tokens = first.tokens[:, 0]
    beam_flat = torch.arange(top_k, device=root.device).expand_as(beam_tokens)
    parent_rows = torch.zeros_like(beam_tokens)
    itself = torch.eye(top_k, dtype=torch.bool, device=root.device)
    itself = itself.expand(root.shape[0], top_k, top_k)
    visible = itself
    tokens, scores, expanded, logits = [beam_tokens], [beam_scores], [], [first.logits]
    for index in range(depth):
        if policy is not None:
            if not policy.deepen(index + 1, beam_scores):
                break
        elif root.device.type == "cpu" and _settled(scores, beam_scores, total_token - 1):
            break
        level = expand(BeamLevel(beam_tokens, parent_rows, visible, index))
        log_probs = _checked_log_probs(level, (root.shape[0], top_k, top_k))
        expanded.append(beam_flat)
        logits.append(level.logits)
        tokens.append(level.tokens.flatten(1))
        scores.append((beam_scores[:, :, None] + log_probs).flatten(1))
        if index + 1 < depth:
            beam_scores, chosen = _best(scores[-1], top_k)
            beam_tokens = tokens[-1].gather(1, chosen)
            beam_flat = chosen + candidate_count(index, top_k)
            parent_rows = chosen // top_k
            ancestors = visible.gather(1, parent_rows[:, :, None].expand_as(visible))
            visible = torch.cat([ancestors, itself], dim=2)
    candidates = min(total_token - 1, candidate_count(len(expanded), top_k))
    kept = _best(torch.cat(scores, dim=1), candidates)
    if policy is not None:
        candidates = min(candidates, policy.choose(kept[0], len(expanded) + 1) - 1)
        if candidates < 1:
            return DraftTree.root_only(root)
        kept = kept[0][:, :candidates], kept[1][:, :candidates]
    return _rerank(root, kept, tokens, scores, expanded, logits, top_k=top_k)


def _settled(scores: list[Tensor], beam: Tensor, count: int) -> bool:
    """Whether the `count` best candidates [B, C] of each row cannot change any more.

    Descendants of the beam [B, R] score no better than it, and lose among equals.
    """
    if sum(level.shape[1] for level in scores) < count:
        return False
    least = torch.cat(scores, dim=1).topk(count, dim=1).values[:, -1]
    return bool((beam.amax(dim=1) <= least).all())


def _rerank(
    root: Tensor,
    best: tuple[Tensor, Tensor],
    tokens: list[Tensor],
    scores: list[Tensor],
    expanded: list[Tensor],
    logits: list[Tensor | None],
    *,
    top_k: int,
) -> DraftTree:
    """The best candidates of all levels, as a tree.

    best: their scores and flat indices, [B, N - 1] each, best first.
    tokens, scores: the flat candidates, level by level, [B, k] and then [B, k * k] each.
    expanded: [B, k] for each expansion, the flat index of every beam row.
    logits: of the root's and then of each expansion's rows, or None for each.
    """
    candidates = candidate_count(len(expanded), top_k)
    kept_scores, kept = best
    # An impossible candidate sorts last, under an index that no real one has.
    flat = kept.masked_fill(kept_scores == -torch.inf, candidates).sort(dim=1).values
    padding = flat == candidates
    index = flat.clamp(max=candidates - 1)
    # Block 0 is the root's, block 1 + r that of expanded row r: candidate f lies in block f // k.
    block_parent = torch.cat([root.new_full((root.shape[0], 1), -1), *expanded], dim=1)
    parent_flat = block_parent.gather(1, index // top_k)
    # Node ids follow the sorted flat indices, from 1; nothing is at or below -1, which gives 0.
    parents = torch.searchsorted(flat, parent_flat, right=True)
    depths = (index - top_k).div(top_k * top_k, rounding_mode="floor") + 2
    node_tokens = torch.cat(tokens, dim=1).gather(1, index)
    node_scores = torch.cat(scores, dim=1).gather(1, index)
    return DraftTree(
        tokens=torch.cat([root[:, None], node_tokens.masked_fill(padding, 0)], dim=1),
        parents=pad(parents.masked_fill(padding, -1), (1, 0), value=-1),
        depths=pad(depths.masked_fill(padding, 0), (1, 0), value=0),
        scores=pad(node_scores.masked_fill(padding, -torch.inf), (1, 0), value=0.0),
        valid=pad(~padding, (1, 0), value=True),
        draft_logits=_kept_logits(flat, expanded, logits),
        levels=min(len(expanded) + 1, index.shape[1]),
    )


def _kept_logits(
    flat: Tensor, expanded: list[Tensor], logits: list[Tensor | None]
) -> Tensor | None:
    """[B, N, V_draft]: the logits of each node that was expanded; of others, the root's.

    flat: [B, N - 1], the flat indices of the drafted nodes.
    """
    given = [each for each in logits if each is not None]
    if len(given) < len(logits):
        return None
    rows = torch.cat(given, dim=1)
    found = flat.new_zeros(flat.shape)
    if expanded:
        same = flat[:, :, None] == torch.cat(expanded, dim=1)[:, None]
        found = torch.where(same.any(2), same.long().argmax(2) + 1, 0)
    index = pad(found, (1, 0), value=0)
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest of scores [B, C] and their positions; equal scores by position.

    torch.topk would be cheaper, but promises no order among equal scores.
    """
    values, positions = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :count], positions[:, :count]


def _checked_log_probs(expansion: Expansion, shape: tuple[int, int, int]) -> Tensor:
    """The expansion's log-probabilities in float32, made safe to sort.

    A log-softmax may round to just above 0, which would let a child outrank its parent. NaN would
    outrank everything; it becomes impossible instead.
    """
    if expansion.tokens.shape != shape or expansion.log_probs.shape != shape:
        raise ValueError(
            f"the scorer must return [batch, rows, top_k] = {list(shape)}, got tokens "
            f"{list(expansion.tokens.shape)} and log_probs {list(expansion.log_probs.shape)}"
        )
    log_probs = expansion.log_probs.float()
    return log_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)
