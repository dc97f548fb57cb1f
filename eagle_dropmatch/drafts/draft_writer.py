"""Writing a draft in the official format: config.json and model.safetensors under flat names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eagle_dropmatch.drafts.draft_files import CONFIG_NAME, WEIGHTS_NAME
from eagle_dropmatch.drafts.eagle3 import Eagle3Config, Eagle3Draft
from eagle_dropmatch.errors import UserError


def save_draft(
    draft: Eagle3Draft, folder: str | Path, *, extra_config: Mapping[str, Any] | None = None
) -> None:
    """Write config.json and model.safetensors in the official format.

    Tensors keep their dtype (``d2t`` int64, ``t2d`` bool). What is shared with the target is left
    out, and so is the map of a draft over the whole vocabulary. Each file is replaced in one step,
    so an interrupted save leaves a readable checkpoint.

    Args:
        draft: the draft to write.
        folder: created if needed; other files in it are left alone.
        extra_config: more keys for config.json (a note on the target, ``pad_token_id``); keys of
            the network's shape cannot be changed by it.
    """
    config = draft.config
    tied = not config.own_head and _weight(draft.lm_head) is _weight(draft.embed_tokens)
    left_out = tuple(
        prefix
        for prefix, leave in (
            ("embed_tokens.", not config.own_embedding),
            ("lm_head.", not config.own_head),
            ("d2t", config.draft_vocab_size == config.vocab_size),
            ("t2d", config.draft_vocab_size == config.vocab_size),
        )
        if leave
    )
    state = {
        name: value.detach().cpu().contiguous()
        for name, value in draft.state_dict().items()
        if not name.startswith(left_out)
    }
    settings = {**(extra_config or {}), **_official_config(config, draft.dtype, tied=tied)}
    text = json.dumps(settings, indent=2) + "\n"
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / WEIGHTS_NAME, lambda f: save_file(state, f, metadata={"format": "pt"}))
        _replace(folder / CONFIG_NAME, lambda f: f.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the draft cannot be written to {folder}: {error}") from error


def _official_config(config: Eagle3Config, dtype: torch.dtype, *, tied: bool) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "vocab_size": config.vocab_size,
        # Null is the format's word for the target's own head and vocabulary.
        "draft_vocab_size": config.draft_vocab_size if config.own_head or tied else None,
        "tie_word_embeddings": tied,
        "bias": config.fc_bias,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        # Always written: readers of a missing key disagree about its default.
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if config.target_hidden_size != config.hidden_size:
        # Readers take this key as "the embedding is in the checkpoint", so only where it must be.
        settings["target_hidden_size"] = config.target_hidden_size
    if config.num_taps != 3 and config.fuse_features:
        settings["num_aux_hidden_states"] = config.num_taps
    if config.logit_scale != 1.0:
        settings["logit_scale"] = config.logit_scale
    eagle: dict[str, Any] = {}
    if config.tap_layers is not None:
        # Under eagle_config an id is a layer's output, one less than the index of its state.
        eagle["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in config.tap_layers]
    if not config.fuse_features:
        eagle["use_aux_hidden_state"] = False
    return {**settings, "eagle_config": eagle} if eagle else settings


def _weight(module: nn.Module | None) -> Tensor | None:
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Write beside ``file``, flush to the disk, then take its place in one step."""
    draft_file = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        draft_file.touch()
        mode = draft_file.stat().st_mode
        write(draft_file)
        draft_file.chmod(mode)  # safetensors makes its files readable by their owner alone
        with draft_file.open("rb+") as written:
            os.fsync(written.fileno())
        draft_file.replace(file)
    finally:
        draft_file.unlink(missing_ok=True)
