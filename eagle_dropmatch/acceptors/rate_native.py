"""``heads.solve_p_drop`` as machine code: one prompt's tensors, handed to rate.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from eagle_dropmatch import native
from eagle_dropmatch.target import LMHead

_SOURCE = Path(__file__).with_name("rate.cpp")
# In the order of rate.cpp's Prompt.
_SIZES = ("positions", "heads", "size", "vocab", "trials", "threads")
_TENSORS = ("logits", "hidden", "weight", "bias", "uniforms")


class _Prompt(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in _TENSORS),
        ("agreement", ctypes.c_float),
        ("ceiling", ctypes.c_float),
    )


def solve(
    logits: Tensor,
    hidden: Tensor,
    head: LMHead,
    uniforms: Tensor,
    *,
    agreement: float,
    ceiling: float,
    trials: int,
) -> Tensor | None:
    """The rate, a float32 scalar; None where ``solve_p_drop`` has to find it itself.

    Args:
        logits: [P, V], clean, at the positions that are looked at.
        hidden: [P, D], the LM head's input there.
        uniforms: [P, K, D] float32.
        agreement, ceiling: as for ``solve_p_drop``.
        trials: of the bisection.
    """
    dtypes = {each.dtype for each in (head.weight, hidden, logits)}
    run = native.kernel(_SOURCE, hidden.dtype) if len(dtypes) == 1 else None
    if run is None:
        return None
    run.restype = ctypes.c_float
    tensors = {
        "logits": logits,
        "hidden": hidden,
        "weight": head.weight.detach(),
        "bias": None if head.bias is None else head.bias.float(),
        "uniforms": uniforms,
    }
    positions, heads, size = uniforms.shape
    prompt = native.record(
        _Prompt,
        tensors,
        positions=positions,
        heads=heads,
        size=size,
        vocab=logits.shape[-1],
        trials=trials,
        threads=torch.get_num_threads(),
        agreement=agreement,
        ceiling=ceiling,
    )
    return torch.tensor(run(ctypes.byref(prompt)))
