"""What of a training run can be refused before torch is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals.checkpoints import read_config
from eagle_dropmatch.files import check_writable
from eagle_dropmatch.training.corpus import read_examples
from eagle_dropmatch.training.options import RunSpec

FLASH = "flash_attention_2"
_FEWEST_LAYERS = 7  # three distinct taps


def check(spec: RunSpec) -> None:
    """UserError for data, checkpoints or an output folder that cannot be used."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("training draws its curves: run `pip install eagle-dropmatch[train]`")
    if spec.attn_implementation == FLASH and importlib.util.find_spec("flash_attn") is None:
        raise UserError(
            f"--attn-implementation {FLASH}: flash-attn is not installed; run "
            "`pip install eagle-dropmatch[flash]` (it needs CUDA), or leave the flag out"
        )
    for path in map(Path, spec.data):
        if next(read_examples(path), None) is None:
            raise UserError(f"the corpus {path} is empty: make one with scripts/make_corpus.py")
    target = read_config(spec.target, "--target") if spec.target else None
    if target is not None and spec.layers is not None:
        _check_layers(spec.layers, _text_config(target))
    elif target is not None and spec.init_draft is None:
        _check_new_draft(spec, _text_config(target))
    if spec.init_draft is not None:
        draft = read_config(spec.init_draft, "--init-draft")
        if target is not None and draft is not None:
            _check_same_width(spec, _text_config(target), draft)
    check_writable(Path(spec.out))


def _check_new_draft(spec: RunSpec, target: Mapping[str, Any]) -> None:
    vocab, layers = target.get("vocab_size"), target.get("num_hidden_layers")
    if isinstance(vocab, int) and spec.draft_vocab > vocab:
        raise UserError(f"--draft-vocab {spec.draft_vocab}: the target has only {vocab} tokens")
    if isinstance(layers, int) and layers < _FEWEST_LAYERS:
        raise UserError(
            f"--target {spec.target} has {layers} layers: EAGLE-3's three taps are distinct only "
            f"from {_FEWEST_LAYERS} on"
        )


def _check_layers(layers: int, target: Mapping[str, Any]) -> None:
    has = target.get("num_hidden_layers")
    if isinstance(has, int) and layers >= has:
        raise UserError(f"--layers {layers}: the target has {has}; keep 1 to {has - 1} of them")


def _check_same_width(spec: RunSpec, target: Mapping[str, Any], draft: Mapping[str, Any]) -> None:
    has = target.get("hidden_size")
    wanted = draft.get("target_hidden_size") or draft.get("hidden_size")
    if None not in (has, wanted) and has != wanted:
        raise UserError(
            f"--init-draft {spec.init_draft} was trained for a target with hidden_size {wanted}, "
            f"but --target {spec.target} has {has}: give a draft of this target"
        )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config
