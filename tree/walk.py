"""Walking draft trees: the path to commit, and the lists of children and of paths."""

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_dropmatch.tree.draft_tree import DraftTree


class AcceptedPath(NamedTuple):
    """What a step commits of each tree.

    nodes: [B, A] int64, node ids from the root (0) down, padded with -1; A = tree.max_depth + 1.
    lengths: [B] int64, accepted draft tokens; the root is not counted.
    """

    nodes: Tensor
    lengths: Tensor


def longest_accepted_path(tree: DraftTree, accept: Tensor) -> AcceptedPath:
    """The deepest node that is reached through accepted nodes only, and the path to it.

    Equally deep nodes are decided by the higher score, then by the lower node id. The root always
    counts as accepted, and padding is never chosen.

    accept: [B, N] bool, may node i follow its parent?
    """
    reached = reachable(tree, accept)
    depths = tree.depths.masked_fill(~reached, -1)
    deepest = depths == depths.amax(dim=1, keepdim=True)
    scores = tree.scores.masked_fill(~deepest, -torch.inf)
    winners = deepest & (scores == scores.amax(dim=1, keepdim=True))
    # argmax returns the first maximum: the lowest id among the winners
    best = winners.long().argmax(dim=1, keepdim=True)
    nodes = _paths_to(tree, best)[:, 0]
    return AcceptedPath(nodes, tree.depths.gather(1, best)[:, 0])


def reachable(tree: DraftTree, accept: Tensor) -> Tensor:
    """[B, N] bool: is the node accepted and every ancestor of it too? The root always is.

    accept: [B, N] bool, may node i follow its parent? Padding holds nothing of use.
    """
    is_root = torch.arange(accept.shape[1], device=accept.device) == 0
    # An accepted padding node does no harm: at depth 0 and -inf it loses to the root.
    reached = accept | is_root
    # After round s a node is reached if it and its nearest 2^(s+1) - 1 ancestors are accepted.
    for jump in tree.jumps:
        reached = reached & reached.gather(1, jump)
    return reached


def path_sums(tree: DraftTree, values: Tensor) -> Tensor:
    """[B, N]: the sum of ``values`` over each node and its ancestors, the root left out.

    values: [B, N] numbers. Padding holds nothing of use.
    """
    sums = values.clone()
    sums[:, 0] = 0  # the root stands in for ancestors that are not there
    # After round s each node holds its nearest 2^(s+1) nodes upwards.
    for jump in tree.jumps:
        sums = sums + sums.gather(1, jump)
    return sums


def children(tree: DraftTree, width: int | None = None) -> Tensor:
    """[B, N, width] int64: the children of each node by ascending id, padded with -1.

    width: at least the greatest number of children of a node, such as the top_k of growth; further
    children are left out. If not given it is read from the tree, which costs a device sync.
    """
    batch, nodes = tree.tokens.shape
    ids = torch.arange(nodes, device=tree.tokens.device)
    drafted = tree.parents >= 0
    siblings = (tree.parents[:, :, None] == tree.parents[:, None, :]) & drafted[:, None, :]
    rank = (siblings & (ids < ids[:, None])).sum(dim=2)
    if width is None:
        width = int(rank.where(drafted, -1).max()) + 1
    # One more entry takes what has no place: the root, padding, children beyond the width.
    place = (tree.parents * width + rank).where(drafted & (rank < width), nodes * width)
    listed = ids.new_full((batch, nodes * width + 1), -1)
    listed.scatter_(1, place, ids.expand(batch, nodes))
    return listed[:, :-1].view(batch, nodes, width)


def paths(tree: DraftTree) -> Tensor:
    """[B, P, D + 1] int64: every root-to-leaf path by ascending leaf id, padded with -1.

    P is the greatest number of leaves in a row, D the greatest depth in the batch. This is EAGLE's
    `retrieve_indices` for greedy decoding. Reads sizes on the host.
    """
    ids = torch.arange(tree.num_nodes, device=tree.tokens.device)
    child_counts = torch.zeros_like(tree.parents)
    child_counts.scatter_add_(1, tree.parents.clamp(min=0), (tree.parents >= 0).long())
    leaves = tree.valid & (child_counts == 0)
    width = int(leaves.sum(dim=1).max())
    order = ids.where(leaves, tree.num_nodes).sort(dim=1).values[:, :width]
    exists = order < tree.num_nodes
    listed = _paths_to(tree, order.where(exists, 0))
    longest = int(tree.depths.max()) + 1
    return listed[:, :, :longest].where(exists[:, :, None], -1)


def _paths_to(tree: DraftTree, nodes: Tensor) -> Tensor:
    """[B, M, max_depth + 1] int64: the ids from the root down to each node, padded with -1.

    nodes: [B, M] int64 valid node ids.
    """
    upwards = nodes[:, :, None]  # entry t: the ancestor t edges up
    for jump in tree.jumps:
        further = jump.gather(1, upwards.flatten(1)).view_as(upwards)
        upwards = torch.cat([upwards, further], dim=2)
    steps = torch.arange(tree.max_depth + 1, device=nodes.device)
    edges = tree.depths.gather(1, nodes)[:, :, None] - steps
    return upwards.gather(2, edges.clamp(min=0)).masked_fill(edges < 0, -1)
