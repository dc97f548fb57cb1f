"""``few_heads`` as machine code: the tensors of a step, handed to few_heads.cpp."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle_dropmatch import native
from eagle_dropmatch.acceptors.heads import drop

if TYPE_CHECKING:
    from eagle_dropmatch.acceptors.step_heads import Heads

_NAMES = {torch.float32: "few_heads_float32", torch.bfloat16: "few_heads_bfloat16"}
_SIZES = ("rows", "nodes", "parents", "heads", "size", "vocab", "mask_nodes")
_TENSORS = (
    "weight",
    "columns",
    "least",
    "greatest",
    "bias",
    "logits",
    "hidden",
    "uniforms",
    "rates",
    "parent_row",
    "parent_node",
    "slot",
    "above",
    "tokens",
    "choice",
    "also",
    "eligible",
    "accepted",
)


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in _TENSORS),
    )


@cache
def kernel(dtype: torch.dtype) -> Any:
    """What runs a step for models of a dtype, built first if it must be; None for other dtypes.

    UserError without a C++ compiler.
    """
    name = _NAMES.get(dtype)
    if name is None:
        return None
    return getattr(native.library(Path(__file__).with_name("few_heads.cpp")), name)


def few_heads(heads: Heads, also: Tensor | None, eligible: Tensor | None) -> Tensor | None:
    """``few_heads.few_heads``; None where that has to decide."""
    context, parents = heads.context, heads.parents
    head, tree = context.head, context.tree
    run = kernel(context.output.hidden.dtype)
    if run is None or heads.noise is not drop:
        return None
    accepted = torch.zeros_like(tree.valid)
    masks, rates = heads.drawn, heads.rates
    bias = None if head.bias is None else head.bias.float()
    given = (
        head.weight.detach(),
        head.columns,
        *head.block_ranges,
        bias,
        context.logits,
        context.output.hidden,
        masks,
        rates,
        parents.row,
        parents.node,
        parents.slot,
        tree.parents,
        tree.tokens,
        context.choice,
        also,
        eligible,
        accepted,
    )
    held = [each if each is None else each.contiguous() for each in given]
    rows, nodes = tree.tokens.shape
    step = _Step(
        rows,
        nodes,
        parents.count,
        rates.shape[1],
        masks.shape[-1],
        head.weight.shape[0],
        masks.shape[1],
        *(each if each is None else each.data_ptr() for each in held),
    )
    return accepted if run(ctypes.byref(step)) else None
