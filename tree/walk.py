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
    best = tree.preference.masked_fill(~reached, -1).argmax(dim=1, keepdim=True)
    nodes = tree.ancestry.gather(1, best[:, :, None].expand(-1, 1, tree.max_depth + 1))[:, 0]
    return AcceptedPath(nodes, tree.depths.gather(1, best)[:, 0])


def reachable(tree: DraftTree, accept: Tensor) -> Tensor:
    """[B, N] bool: is the node accepted and every ancestor of it too? The root always is.

    accept: [B, N] bool, may node i follow its parent? Padding holds nothing of use.
    """
    # The root stands in where a path has no node, and it is accepted.
    path = tree.ancestry.clamp(min=0)
    allowed = accept.clone()
    allowed[:, 0] = True
    return allowed.gather(1, path.flatten(1)).view_as(path).all(dim=2) & tree.valid


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
    order = order.where(exists, 0)[:, :, None].expand(-1, -1, tree.max_depth + 1)
    listed = tree.ancestry.gather(1, order)
    longest = int(tree.depths.max()) + 1
    return listed[:, :, :longest].where(exists[:, :, None], -1)
