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
    """
    generator = torch.Generator().manual_seed(seed)
    last: Any = decoder_layers(model)[-1]
    mid = draft.midlayer
    size = draft.config.hidden_size
    draft.fc.weight.copy_(torch.randn(draft.fc.weight.shape, generator=generator) * 1e-3)
    draft.fc.weight[:, -size:] += torch.eye(size)
    for name in ("q_proj", "k_proj", "v_proj"):
        mine: nn.Linear = getattr(mid.self_attn, name)
        mine.weight[:, :size] = torch.randn(mine.weight[:, :size].shape, generator=generator) * 1e-3
        mine.weight[:, size:] = getattr(last.self_attn, name).weight.float()
    mid.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(mid.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
    mid.hidden_norm.weight.copy_(last.input_layernorm.weight)
    mid.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    mid.input_layernorm.weight.fill_(1.0)
    final_norm: Any = backbone(model).norm
    draft.norm.weight.copy_(final_norm.weight)
    ids = d2t + torch.arange(d2t.shape[0])
    assert isinstance(draft.lm_head, nn.Linear)
    draft.lm_head.weight.copy_(model.get_output_embeddings().weight[ids])
    draft.d2t.copy_(d2t)
    draft.t2d.zero_()
    draft.t2d[ids] = True
    draft.borrow_embedding(model.get_input_embeddings())
