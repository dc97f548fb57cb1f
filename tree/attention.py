"""What a tree's nodes attend to, and where they stand: the 4-D mask and the position ids.

A worked example, a tree of 5 nodes after 2 tokens of context, in a cache of 8 slots:

    root 0 -- 1 -- 3        slot   0 1 | 2 3 4 5 6 | 7        position
         \\                  node       | 0 1 2 3 4 |
          2 -- 4            0      x x | x . . . . | .           2
                            1      x x | x x . . . | .           3
                            2      x x | x . x . . | .           3
                            3      x x | x x . x . | .           4
                            4      x x | x . x . x | .           4
"""

import torch
from torch import Tensor

from eagle_dropmatch.tree.draft_tree import DraftTree, jump_pointers


def ancestor_matrix(parents: Tensor, valid: Tensor, max_depth: int | None = None) -> Tensor:
    """[B, N, N] bool: entry (i, j) tells whether node j is node i or one of its ancestors.

    A padding row holds itself only, and no other row holds padding.

    parents: [B, N] int64. valid: [B, N] bool. max_depth: the greatest depth of a node, N - 1 if not
    given; ceil(log2(max_depth + 1)) rounds are run.
    """
    batch, nodes = parents.shape
    matrix = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(batch, nodes, nodes)
    # After round s each row holds the node and its nearest 2^(s+1) - 1 ancestors.
    for jump in jump_pointers(parents, valid, nodes - 1 if max_depth is None else max_depth):
        matrix = matrix | matrix.gather(1, jump[:, :, None].expand_as(matrix))
    return matrix


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is ``seen`` (bool), as an additive mask of its shape: 0, or the dtype's minimum."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)


def tree_attention(
    tree: DraftTree, prefix_lengths: Tensor, key_length: int, dtype: torch.dtype
) -> Tensor:
    """[B, 1, N, key_length] additive mask: 0 where a node attends, the dtype's minimum elsewhere.

    In row b the context fills key slots 0 .. P_b - 1 and node i takes slot P_b + i. A node attends
    to the context, its ancestors and itself. Padding attends to the context and itself, so that its
    softmax is finite; no other node attends to padding, nor to slots past the tree.

    prefix_lengths: [B] int64, P_b, with P_b + N <= key_length for every row.
    dtype: a floating dtype, the model's.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"the mask is additive: dtype must be a float, got {dtype}")
    nodes = tree.num_nodes
    if key_length < nodes:
        raise ValueError(f"{nodes} nodes do not fit into {key_length} key slots")
    device = tree.tokens.device
    allowed = torch.zeros((), dtype=dtype, device=device)
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)
    in_context = torch.arange(key_length, device=device) < prefix_lengths[:, None]
    mask = torch.where(in_context, allowed, hidden)[:, None, :].repeat(1, nodes, 1)
    # The node itself stands in where its path has no node.
    itself = torch.arange(nodes, device=device)[:, None]
    path = torch.where(tree.ancestry < 0, itself, tree.ancestry)
    mask.scatter_(2, prefix_lengths[:, None, None] + path, 0.0)
    return mask[:, None]


def position_ids(tree: DraftTree, prefix_lengths: Tensor) -> Tensor:
    """[B, N] int64: a node stands as many positions after the context as it is deep.

    prefix_lengths: [B] int64, tokens of context. Padding stands where the root does.
    """
    return prefix_lengths[:, None] + tree.depths
