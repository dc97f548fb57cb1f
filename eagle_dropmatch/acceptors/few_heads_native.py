"""``few_heads`` as machine code: the tensors of a step, handed to few_heads.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_dropmatch import native
from eagle_dropmatch.acceptors.heads import drop

if TYPE_CHECKING:
    from eagle_dropmatch.acceptors.step_heads import Heads

_SOURCE = Path(__file__).with_name("few_heads.cpp")
# In the order of few_heads.cpp's Step.
_SIZES = ("rows", "nodes", "parents", "heads", "size", "vocab", "mask_nodes")
_WEIGHTS = ("weight", "least", "greatest", "bias")
_STATES = ("logits", "hidden", "uniforms", "rates")
_TREE = ("parent_row", "parent_node", "slot", "above", "tokens", "choice")
_FLAGS = ("also", "eligible", "accepted")


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in (*_WEIGHTS, *_STATES, *_TREE, *_FLAGS)),
    )


def few_heads(heads: Heads, also: Tensor | None, eligible: Tensor | None) -> Tensor | None:
    """``few_heads.few_heads``; None where that has to decide."""
    context, parents = heads.context, heads.parents
    head, tree = context.head, context.tree
    dtypes = {each.dtype for each in (head.weight, context.logits, context.output.hidden)}
    run = native.kernel(_SOURCE, head.weight.dtype) if len(dtypes) == 1 else None
    if run is None or heads.noise is not drop:
        return None
    accepted, masks = torch.zeros_like(tree.valid), heads.drawn
    least, greatest = head.block_ranges
    tensors = {
        "weight": head.weight.detach(),
        "least": least,
        "greatest": greatest,
        "bias": None if head.bias is None else head.bias.float(),
        "logits": context.logits,
        "hidden": context.output.hidden,
        "uniforms": masks,
        "rates": heads.rates,
        "parent_row": parents.row,
        "parent_node": parents.node,
        "slot": parents.slot,
        "above": tree.parents,
        "tokens": tree.tokens,
        "choice": context.choice,
        "also": also,
        "eligible": eligible,
        "accepted": accepted,
    }
    rows, nodes = tree.tokens.shape
    step = native.record(
        _Step,
        tensors,
        rows=rows,
        nodes=nodes,
        parents=parents.count,
        heads=heads.rates.shape[1],
        size=masks.shape[-1],
        vocab=head.weight.shape[0],
        mask_nodes=masks.shape[1],
    )
    return accepted if run(ctypes.byref(step)) else None
