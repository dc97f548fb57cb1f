"""Draft trees as plain tensors: growing them, attending within them, walking them.

This room knows no model. A scorer callback grows a tree (`growth`), a mask and positions let any
causal model score all of its nodes in one forward pass (`attention`), and a verdict per node turns
into the path to commit (`walk`).
"""

from eagle_dropmatch.tree.attention import additive, ancestor_matrix, position_ids, tree_attention
from eagle_dropmatch.tree.draft_tree import DraftTree, choice_parents
from eagle_dropmatch.tree.growth import (
    BeamLevel,
    Expansion,
    GrowthPolicy,
    candidate_count,
    grow,
)
from eagle_dropmatch.tree.walk import (
    AcceptedPath,
    children,
    longest_accepted_path,
    path_sums,
    paths,
    reachable,
)

__all__ = [
    "AcceptedPath",
    "BeamLevel",
    "DraftTree",
    "Expansion",
    "GrowthPolicy",
    "additive",
    "ancestor_matrix",
    "candidate_count",
    "children",
    "choice_parents",
    "grow",
    "longest_accepted_path",
    "path_sums",
    "paths",
    "position_ids",
    "reachable",
    "tree_attention",
]
