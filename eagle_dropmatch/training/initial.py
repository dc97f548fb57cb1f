"""A new draft for a target: its shape, and weights that start from the target's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eagle_dropmatch.drafts.eagle3 import Eagle3Config, Eagle3Draft
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.taps import backbone, decoder_layers, default_tap_layers


def new_draft_config(target_config: Any, draft_vocab_size: int) -> Eagle3Config:
    """The shape of the target's own last layer, with its head width and rope base."""
    heads = target_config.num_attention_heads
    vocab = target_config.vocab_size
    if not 1 <= draft_vocab_size <= vocab:
        raise UserError(f"draft vocabulary of {draft_vocab_size}: expected 1 to {vocab}")
    default_tap_layers(target_config.num_hidden_layers)
    return Eagle3Config(
        hidden_size=target_config.hidden_size,
        target_hidden_size=target_config.hidden_size,
        intermediate_size=target_config.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target_config, "num_key_value_heads", None) or heads,
        head_dim=getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab_size,
        hidden_act=target_config.hidden_act,
        rms_norm_eps=target_config.rms_norm_eps,
        max_position_embeddings=target_config.max_position_embeddings,
        rope_parameters=dict(target_config.rope_parameters),
    )


@torch.no_grad()
def start_from_target(draft: Eagle3Draft, model: Any, d2t: Tensor, seed: int = 0) -> None:
    """Give a new draft the target's last layer, final norm and head rows.

    The fused feature starts as the highest tap, and the embedding's half of the attention input
    starts near zero: the untrained draft is then the target's last layer on a feature it knows.
    What the target's layer has in another shape (experts, fused projections) starts at random.
    """
    generator = torch.Generator().manual_seed(seed)
    last = decoder_layers(model)[-1]
    mid = draft.midlayer
    size = draft.config.hidden_size

    def noise(like: Tensor, scale: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * scale

    draft.fc.weight.copy_(noise(draft.fc.weight, 1e-3))
    draft.fc.weight[:, -size:] += torch.eye(size)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight: Tensor = getattr(mid.self_attn, name).weight
        weight[:, :size] = noise(weight[:, :size], 1e-3)
        _copy(weight[:, size:], last, f"self_attn.{name}.weight", generator)
    _copy(mid.self_attn.o_proj.weight, last, "self_attn.o_proj.weight", generator)
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy(getattr(mid.mlp, name).weight, last, f"mlp.{name}.weight", generator)
    _copy(mid.hidden_norm.weight, last, "input_layernorm.weight", generator)
    _copy(mid.post_attention_layernorm.weight, last, "post_attention_layernorm.weight", generator)
    _copy(draft.norm.weight, backbone(model), "norm.weight", generator)
    ids = d2t + torch.arange(d2t.shape[0])
    assert isinstance(draft.lm_head, nn.Linear)
    head = model.get_output_embeddings().weight
    draft.lm_head.weight.copy_(head[ids.to(head.device)])
    draft.d2t.copy_(d2t)
    draft.t2d.zero_()
    draft.t2d[ids] = True
    draft.borrow_embedding(model.get_input_embeddings())


def _copy(into: Tensor, module: nn.Module, name: str, generator: torch.Generator) -> None:
    """Copy a parameter of ``module`` if it has one of that name and shape.

    Elsewhere a matrix is drawn from the generator, since all workers must start alike, and a
    norm's weight stays one.
    """
    found = dict(module.named_parameters()).get(name)
    if found is not None and found.shape == into.shape:
        into.copy_(found)
    elif into.dim() == 2:
        into.copy_(torch.randn(into.shape, generator=generator) * into.shape[1] ** -0.5)
