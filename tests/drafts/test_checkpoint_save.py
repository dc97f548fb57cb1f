"""Writing drafts: what a saved draft reads back as, and that a failed save spoils nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from toy_drafts import (
    HIDDEN,
    VOCAB,
    chain_logits,
    context,
    load_toy,
    toy_config,
    toy_tensors,
    write_checkpoint,
)

from eagle_dropmatch.drafts import draft_writer
from eagle_dropmatch.drafts.checkpoint import TargetShape, read_draft_config, save_draft
from eagle_dropmatch.errors import UserError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
VARIANTS: dict[str, dict[str, Any]] = {
    "official": {},
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "fc norm": {"fc_norm": True},
    "speculators": {
        "speculators_model_type": "eagle3",
        "eagle_aux_hidden_state_layer_ids": [0, 4, 9],
    },
    "specforge": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}},
    "rope": {"rope_parameters": {**YARN, "rope_theta": 1e6}},
    "head": {"head_dim": 12, "logit_scale": 0.5, "hidden_act": "gelu"},
    "full vocabulary": {"draft_vocab_size": VOCAB},
    "wider target": {"target_hidden_size": 48},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_saved_draft_reads_back_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = toy_config(**changes)
    tensors = toy_tensors(config)
    target = TargetShape(config.get("target_hidden_size", HIDDEN), VOCAB, 9)
    if target.hidden_size != HIDDEN:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    draft = load_toy(write_checkpoint(tmp_path / "first", config, tensors), target)
    save_draft(draft, tmp_path / "a" / "second")
    again = load_toy(tmp_path / "a" / "second", target)
    assert again.config == draft.config
    taps, tokens = context(draft.config.feature_size)
    logits = [chain_logits(d, taps, tokens, (3, 41)) for d in (draft, again)]
    assert torch.equal(*logits)
    assert set(load_file(tmp_path / "a" / "second" / "model.safetensors")) == set(tensors)


def test_more_taps_than_three_read_back(tmp_path: Path) -> None:
    config = toy_config(eagle_aux_hidden_state_layer_ids=[1, 2, 4, 6])
    draft = load_toy(write_checkpoint(tmp_path / "a", config, toy_tensors(config, taps=4)))
    save_draft(draft, tmp_path / "b")
    assert read_draft_config(tmp_path / "b").config == draft.config


def test_a_draft_without_fc_reads_back(tmp_path: Path) -> None:
    config = toy_config(eagle_config={"use_aux_hidden_state": False})
    tensors = toy_tensors(config)
    del tensors["fc.weight"]
    draft = load_toy(write_checkpoint(tmp_path / "a", config, tensors), layer_ids=[7])
    save_draft(draft, tmp_path / "b")
    again = read_draft_config(tmp_path / "b").config
    assert again == draft.config
    assert again.tap_layers == (7,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_file_keeps_dtypes_and_official_names(tmp_path: Path, dtype: torch.dtype) -> None:
    config = toy_config()
    tensors = toy_tensors(config)
    draft = load_toy(write_checkpoint(tmp_path / "a", config, tensors), dtype=dtype)
    save_draft(draft, tmp_path / "b")
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert set(stored) == set(tensors)
    for name, value in stored.items():
        expected = {"d2t": torch.int64, "t2d": torch.bool}.get(name, dtype)
        assert (name, value.dtype) == (name, expected)
    with safe_open(tmp_path / "b" / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == str(dtype)[6:]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["target's embedding", "own embedding"])
def test_only_the_drafts_own_embedding_and_head_are_written(
    tmp_path: Path, own: bool, tied: bool
) -> None:
    config = toy_config(draft_vocab_size=None, tie_word_embeddings=tied)
    tensors = toy_tensors(config)
    del tensors["lm_head.weight"]
    if own:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    draft = load_toy(write_checkpoint(tmp_path / "a", config, tensors))
    save_draft(draft, tmp_path / "b")
    assert set(load_file(tmp_path / "b" / "model.safetensors")) == set(tensors)
    description = read_draft_config(tmp_path / "b")
    assert (description.config, description.tied_head) == (draft.config, tied)


def test_extra_keys_are_kept_and_cannot_change_the_shape(tmp_path: Path) -> None:
    config = toy_config()
    draft = load_toy(write_checkpoint(tmp_path / "a", config, toy_tensors(config)))
    save_draft(draft, tmp_path / "b", extra_config={"trained_for": "toy", "hidden_size": 1})
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert written["trained_for"] == "toy"
    assert written["hidden_size"] == HIDDEN
    assert written["norm_before_residual"] is False
    assert "target_hidden_size" not in written


def test_a_failed_save_leaves_the_old_checkpoint_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config()
    draft = load_toy(write_checkpoint(tmp_path / "a", config, toy_tensors(config)))
    save_draft(draft, tmp_path / "b")
    before = {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()}

    def half_written(tensors: Any, file: Path, **options: Any) -> None:
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(draft_writer, "save_file", half_written)
    draft.norm.weight.data.zero_()
    with pytest.raises(UserError, match=r"cannot be written .* disk full"):
        save_draft(draft, tmp_path / "b")
    assert {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()} == before


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    config = toy_config()
    draft = load_toy(write_checkpoint(tmp_path / "a", config, toy_tensors(config)))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save_draft(draft, tmp_path / "file" / "b")


def test_saved_files_are_as_readable_as_any_other_new_file(tmp_path: Path) -> None:
    config = toy_config()
    draft = load_toy(write_checkpoint(tmp_path / "a", config, toy_tensors(config)))
    save_draft(draft, tmp_path / "draft")
    plain = tmp_path / "plain"
    plain.touch()
    modes = {file.stat().st_mode for file in (tmp_path / "draft").iterdir()}
    assert modes == {plain.stat().st_mode}
