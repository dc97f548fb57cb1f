"""Shipping a distilled model without what it shares with its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_toys import LAYERS, save_toy_target, toy_examples
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle_dropmatch import assets, cli
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.loading import load_pair
from eagle_dropmatch.training.distil import Distiller, cut_model, spread_layers
from eagle_dropmatch.training.options import TrainOptions
from eagle_dropmatch.training.packed_lm import _packed, pack, unpack


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a distilled model of three of its layers."""
    folder = tmp_path_factory.mktemp("packed")
    save_toy_target(folder / "target")
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.bfloat16)
    model.save_pretrained(folder / "target")  # in the dtype that it was distilled in
    kept = spread_layers(LAYERS, 3)
    (folder / "run").mkdir()
    options = TrainOptions(steps=4, positions=512, held_out=4, eval_every=4, eval_steps=3)
    Distiller(
        cut_model(model, kept),
        kept,
        model,
        AutoTokenizer.from_pretrained(folder / "target"),
        toy_examples(30),
        folder / "run",
        options,
        stop_ids=(),
    ).run()
    return folder


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 99), st.sampled_from([0.0, 1e-3, 1.0]))
def test_a_packed_number_is_off_by_half_a_step_at_most(
    rows: int, columns: int, seed: int, size: float
) -> None:
    weight = size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    packed = _packed("w", weight)
    again = packed["w"] * packed["w.scale"][:, None]
    bound = weight.abs().amax(1, keepdim=True) / 127 / 2
    assert packed["w"].dtype == torch.int8
    assert ((again - weight).abs() <= bound * 1.001).all()


def test_a_packed_model_says_what_it_said(place: Path, tmp_path: Path) -> None:
    size = pack(place / "run/best", tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(place / "run/best")
    own = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n)
    head = model.get_output_embeddings().weight.numel()
    assert size < 1.5 * (own - head)  # of two bytes a number, and without the head
    unpack(tmp_path / "packed", place / "target", tmp_path / "whole")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        wanted, found = model(ids).logits.float(), again(ids).logits.float()
    assert (wanted - found).square().mean() < 0.01 * wanted.var()
    assert AutoTokenizer.from_pretrained(tmp_path / "whole").get_vocab()
    assert again.config.training["kept_layers"] == list(spread_layers(LAYERS, 3))
    assert (tmp_path / "whole/README.md").is_file()


def test_what_was_not_distilled_is_refused(place: Path, tmp_path: Path, load_script: Any) -> None:
    with pytest.raises(UserError, match="is no distilled model"):
        pack(place / "target", tmp_path / "packed")
    script = load_script("pack_draft_lm")
    assert cli.run_command(script.main, [str(place / "run/best"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/layers.safetensors").is_file()
    assert cli.run_command(script.main, ["none/", str(tmp_path / "out")]) == 2


def test_the_small_model_of_the_reference_target_is_put_together_once(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_DROPMATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(assets, "_SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(assets, "reference_target", lambda: place / "target")
    with pytest.raises(UserError, match="reinstall eagle-dropmatch"):
        assets.draft_lm_source("reference")
    pack(place / "run/best", tmp_path / "shipped/reference_draft_lm")
    folder = assets.draft_lm_source("reference")
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 3
    stamp = (Path(folder) / "config.json").stat().st_mtime_ns
    assert assets.draft_lm_source("reference") == folder
    assert (Path(folder) / "config.json").stat().st_mtime_ns == stamp
    assert assets.draft_lm_source("owner/other") == "owner/other"


def test_another_target_has_no_shipped_small_model() -> None:
    with pytest.raises(UserError, match="small model of the reference target"):
        load_pair(
            "some/target", None, draft_lm="reference", draft_ngram=None, shape={}, dtype=None,
            device_map=None, attn_implementation=None, layer_ids=None, layer_id_convention="auto",
            rope_theta=None, fuse=None, compile=False, tree_budget=None,
        )  # fmt: skip
