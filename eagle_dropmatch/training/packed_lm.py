"""A distilled language model without what it shares with its target: small enough to ship.

Embedding and LM head are the target's own, and of what is left a number takes a byte: each row of a
matrix is kept as int8 with one scale, the vectors as they are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.training.card import CARD_NAME
from eagle_dropmatch.training.distil import cut_model, trained_parameters

WEIGHTS, CONFIG = "layers.safetensors", "layers.json"
_SCALE = ".scale"


def pack(source: Path, folder: Path) -> int:
    """Write the trained part of a distilled model into ``folder``; returns its bytes.

    Args:
        source: ``best/`` or ``last/`` of a run of ``scripts/distil_draft_lm.py``.
    """
    from transformers import AutoModelForCausalLM

    training = json.loads((source / "config.json").read_text(encoding="utf-8")).get("training", {})
    if "kept_layers" not in training:
        raise UserError(
            f"{source} is no distilled model: its config.json names no kept layers; give best/ or "
            "last/ of a run of scripts/distil_draft_lm.py"
        )
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    trained = {id(parameter) for parameter in trained_parameters(model)}
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in trained:
            tensors.update(_packed(name, parameter.detach()))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(source / CARD_NAME, folder / CARD_NAME)
    return (folder / WEIGHTS).stat().st_size


def unpack(packed: Path, target: str | Path, folder: Path) -> None:
    """Write the whole model, as transformers reads it, into ``folder``.

    Args:
        target: the model that it was distilled from, for embedding, LM head and tokenizer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    training = json.loads((packed / CONFIG).read_text(encoding="utf-8"))
    small = cut_model(
        AutoModelForCausalLM.from_pretrained(target, dtype="auto"), training["kept_layers"]
    )
    small.config.training = training
    given = load_file(packed / WEIGHTS)
    own = dict(small.named_parameters())
    with torch.no_grad():
        for name, value in given.items():
            if not name.endswith(_SCALE):
                scale = given.get(name + _SCALE)
                own[name].copy_(value if scale is None else value * scale[:, None])
    small.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    shutil.copyfile(packed / CARD_NAME, folder / CARD_NAME)


def _packed(name: str, weight: Tensor) -> dict[str, Tensor]:
    if weight.dim() < 2:
        return {name: weight.contiguous()}
    wide = weight.float()
    scale = (wide.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return {name: (wide / scale[:, None]).round().to(torch.int8), name + _SCALE: scale}
