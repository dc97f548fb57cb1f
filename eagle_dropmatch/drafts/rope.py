"""Rotary positions of a draft, with its own base and scaling, never the target's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle_dropmatch.errors import UserError

#: Each supported type with the keys it cannot do without.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
#: The base of a draft whose config names none, whatever its target uses: published EAGLE-3 drafts
#: for targets with a base of 500,000 were trained that way.
DEFAULT_ROPE_THETA = 10000.0


def read_rope_parameters(
    settings: Mapping[str, Any], rope_theta: float | None = None
) -> dict[str, Any]:
    """A config's rope keys as ``{"rope_type": ..., "rope_theta": ..., <the type's own keys>}``.

    Args:
        settings: a parsed config.json. Read are ``rope_theta`` with ``rope_scaling`` (its type
            under ``rope_type`` or ``type``), and transformers 5's ``rope_parameters``.
        rope_theta: replaces whatever base the config names.
    """
    scaling, parameters = (settings.get(k) or {} for k in ("rope_scaling", "rope_parameters"))
    given = {k: v for k, v in (scaling or parameters).items() if v is not None}
    if any(isinstance(v, Mapping) for v in given.values()):
        raise UserError(
            f"the draft's rope parameters are nested ({', '.join(given)}): a draft has one layer, "
            "expected one flat set of rope parameters in its config.json"
        )
    partial = given.pop("partial_rotary_factor", settings.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise UserError(
            f"the draft rotates only a part of each head (partial_rotary_factor {partial}): "
            "expected a draft with full rotary heads"
        )
    legacy = given.pop("type", "default")
    rope_type = given.pop("rope_type", legacy)
    if rope_type == "mrope":
        # Text tokens have the same position on all of mrope's axes, which makes it plain rope.
        rope_type = "default"
    given.pop("mrope_section", None)
    bases = (
        rope_theta,
        given.pop("rope_theta", None),
        settings.get("rope_theta"),
        parameters.get("rope_theta"),
        DEFAULT_ROPE_THETA,
    )
    theta = float(next(base for base in bases if base is not None))
    return {"rope_type": rope_type, "rope_theta": theta, **given}


class RotaryTable:
    """Inverse frequencies in float32, kept out of the module's buffers.

    A module's ``.to(bfloat16)`` casts its buffers, and frequencies rounded to bfloat16 are off by
    whole turns at position 2,000; so they live here as a plain tensor and only cos and sin are
    cast. The ``dynamic`` type uses its frequencies at ``max_position_embeddings`` and is never
    rebuilt for longer contexts: keys in the cache keep the rotation they were written with.
    """

    def __init__(
        self, rope_parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int
    ) -> None:
        rope_type = rope_parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise UserError(
                f"the draft's rope type is {rope_type!r}, expected one of "
                f"{', '.join(ROPE_TYPES)}: convert the draft or correct its config.json"
            )
        absent = [key for key in ROPE_TYPES[rope_type] if key not in rope_parameters]
        if absent:
            raise UserError(
                f"the draft's rope type {rope_type!r} needs {', '.join(absent)}, which its "
                "config.json does not give"
            )
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rope_parameters=dict(rope_parameters),
        )
        # Real numbers even where the network itself is being laid out on the meta device.
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(config)
        self.inv_freq: Tensor = rotary.inv_freq.detach().clone().float()
        self.scaling: float = float(rotary.attention_scaling)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin at ``positions`` [..., S] as [..., S, head_dim] in ``dtype``."""
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` [B, heads, S, head_dim] by ``cos``/``sin`` broadcastable to it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
