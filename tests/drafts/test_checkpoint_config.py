"""What config.json means in each dialect: layer ids, norms, sizes, and drafts of other kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_drafts import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    load_toy,
    toy_config,
    toy_tensors,
    write_checkpoint,
)

from eagle_dropmatch.drafts.checkpoint import DraftDescription, read_draft_config
from eagle_dropmatch.drafts.draft_config import parse_draft_config
from eagle_dropmatch.drafts.eagle3 import Eagle3Config
from eagle_dropmatch.errors import UserError

SPECULATORS = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"]}
IDS = {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
NESTED = {"eagle_config": IDS}


def parse(changes: dict[str, Any], taps: int = 3, **options: Any) -> Eagle3Config:
    config = toy_config(**changes)
    shapes = {k: tuple(v.shape) for k, v in toy_tensors(toy_config(), taps=taps).items()}
    return parse_draft_config(config, shapes, **options)


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        (NESTED, (2, 5, 7)),
        ({**SPECFORGE, **NESTED}, (2, 5, 7)),
        ({**SPECFORGE, **IDS}, (2, 5, 7)),
        (IDS, (1, 4, 6)),
        ({**SPECULATORS, **IDS}, (1, 4, 6)),
        ({**SPECULATORS, **NESTED}, (1, 4, 6)),
        ({"architectures": ["Eagle3DraftModel"], **IDS}, (1, 4, 6)),
        ({}, None),
        (SPECFORGE, None),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, None),
        ({"eagle_aux_hidden_state_layer_ids": [6, 1, 4]}, (1, 4, 6)),
    ],
)
def test_layer_ids_follow_the_dialect_and_an_override_wins(
    changes: dict[str, Any], taps: tuple[int, ...] | None
) -> None:
    assert parse(changes).tap_layers == taps
    if taps is not None:
        assert parse(changes, layer_id_convention="input").tap_layers == (1, 4, 6)
        assert parse(changes, layer_id_convention="output").tap_layers == (2, 5, 7)
    given: dict[str, Any] = {"layer_ids": [0, 3, 8]}
    assert parse(changes, **given).tap_layers == (0, 3, 8)
    assert parse(changes, **given, layer_id_convention="output").tap_layers == (1, 4, 9)


@pytest.mark.parametrize("ids", [[1, 1, 2], [-1, 2, 3], [1, 2], [1, 2, 3, 4], [], ["a", 2, 3]])
def test_layer_ids_that_cannot_be_taps_are_refused(ids: list[Any]) -> None:
    with pytest.raises(UserError, match="layer ids"):
        parse({}, layer_ids=ids)


@pytest.mark.parametrize(
    "changes",
    [
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 6]},
        {"num_aux_hidden_states": 4, "eagle_aux_hidden_state_layer_ids": [1, 2, 4, 6]},
    ],
)
def test_the_number_of_taps_is_what_the_config_says(changes: dict[str, Any]) -> None:
    config = parse(changes, taps=4)
    assert (config.num_taps, config.feature_size) == (4, 4 * HIDDEN)


def test_a_number_of_taps_without_a_default_needs_layer_ids() -> None:
    with pytest.raises(UserError, match=r"fuses 4 hidden states .* names no layers"):
        parse({}, taps=4)
    assert parse({}, taps=4, layer_ids=[1, 2, 3, 4]).num_taps == 4
    with pytest.raises(UserError, match="expected as many ids"):
        parse({"num_aux_hidden_states": 4, **IDS}, taps=4)


def test_a_draft_without_fc_has_one_tap_of_the_targets_width() -> None:
    off = {"use_aux_hidden_state": False}
    assert parse({"eagle_config": off}).num_taps == 1
    config = parse({"eagle_config": {**IDS, **off}})
    assert (config.fuse_features, config.num_taps, config.tap_layers) == (False, 1, None)
    assert parse({"eagle_config": off}, layer_ids=[5]).tap_layers == (5,)
    with pytest.raises(UserError, match="without fc: expected one"):
        parse({"eagle_config": off}, layer_ids=[5, 6])
    with pytest.raises(UserError, match="without fc the two must be equal"):
        parse({"eagle_config": off, "target_hidden_size": 48})


def test_the_normed_residual_is_speculators_default_only() -> None:
    assert not parse({}).norm_before_residual
    assert not parse(SPECFORGE).norm_before_residual
    assert parse(SPECULATORS).norm_before_residual
    assert not parse({**SPECULATORS, "norm_before_residual": False}).norm_before_residual
    assert parse({"norm_before_residual": True}).norm_before_residual


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm", "norm_output"])
@pytest.mark.parametrize("nested", [False, True])
def test_norm_flags_are_found_at_both_levels(flag: str, nested: bool) -> None:
    given = {"eagle_config": {flag: True}} if nested else {flag: True}
    assert getattr(parse(given), flag)
    assert not getattr(parse({}), flag)


def test_sizes_come_from_the_config_with_the_formats_defaults() -> None:
    config = parse({"num_key_value_heads": None, "draft_vocab_size": None, "rms_norm_eps": None})
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert config.draft_vocab_size == VOCAB
    assert config.rms_norm_eps == 1e-6
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert parse({"head_dim": 16}).head_dim == 16
    assert parse({"target_hidden_size": 24}, layer_ids=[1, 2, 3, 4]).target_hidden_size == 24
    llama4 = {"model_type": "llama4_text", "intermediate_size_mlp": 96}
    assert parse(llama4).intermediate_size == 96
    assert parse({}, rope_theta=5e5).rope_parameters["rope_theta"] == 5e5


def test_null_means_absent(tmp_path: Path) -> None:
    config = toy_config()
    tensors = toy_tensors(config)
    nulls = dict.fromkeys(("target_hidden_size", "head_dim", "rope_scaling", "eagle_config"))
    write_checkpoint(tmp_path, {**config, **nulls}, tensors)
    assert load_toy(tmp_path).config == parse({})


def test_a_nested_layer_config_speaks_for_the_layer_alone() -> None:
    layer = toy_config(draft_vocab_size=None, architectures=None, rope_theta=1e6, head_dim=16)
    layer |= {"tie_word_embeddings": True, "num_hidden_layers": 40}
    raw = {**SPECULATORS, "draft_vocab_size": DRAFT_VOCAB, "transformer_layer_config": layer}
    shapes = {k: tuple(v.shape) for k, v in toy_tensors(toy_config()).items()}
    config = parse_draft_config(raw, shapes)
    assert (config.hidden_size, config.head_dim) == (HIDDEN, 16)
    assert config.draft_vocab_size == DRAFT_VOCAB
    assert config.rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size None"),
        ({"intermediate_size": "48"}, "intermediate_size '48'"),
        ({"vocab_size": -1}, "vocab_size -1"),
        ({"num_attention_heads": 5}, "5 heads and no head_dim"),
        ({"hidden_act": "swish-ish"}, "hidden_act 'swish-ish'"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope type is 'su'"),
    ],
)
def test_a_config_that_describes_no_network_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write_checkpoint(tmp_path, toy_config(**changes), toy_tensors(toy_config()))
    with pytest.raises(UserError, match=words):
        read_draft_config(tmp_path)


def described(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> DraftDescription:
    return read_draft_config(write_checkpoint(folder, config, tensors))


def test_the_layer_count_is_decided_by_the_tensors(tmp_path: Path) -> None:
    config = toy_config(num_hidden_layers=40)
    tensors = toy_tensors(config)
    assert described(tmp_path, config, tensors).config.hidden_size == HIDDEN
    tensors["layers.1.input_layernorm.weight"] = torch.ones(HIDDEN)
    with pytest.raises(UserError, match=r"several layers \(layers.1 beside layer 0\)"):
        described(tmp_path, toy_config(), tensors)


def test_drafts_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    config = toy_config()
    tensors = toy_tensors(config)
    first = {
        "embed_tokens.weight": torch.ones(VOCAB, HIDDEN),
        "fc.weight": torch.ones(HIDDEN, 2 * HIDDEN),
        "layers.0.self_attn.q_proj.weight": torch.ones(HIDDEN, HIDDEN),
    }
    latent = {**tensors, "midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(4, 4)}
    language_model = {
        f"model.layers.{i}.self_attn.q_proj.weight": torch.ones(HIDDEN, HIDDEN) for i in range(3)
    }
    packed = {**tensors, "fc.weight_scale": torch.ones(1)}
    for kind, changes, stored in (
        ("EAGLE-1 or EAGLE-2", {}, first),
        ("MLA", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, tensors),
        ("MLA", {}, latent),
        ("P-EAGLE", {}, {**tensors, "mask_hidden": torch.ones(1, HIDDEN)}),
        ("type 'dflash'", {"speculators_model_type": "dflash"}, tensors),
        ("no draft", {}, language_model),
        ("quantised", {}, packed),
    ):
        with pytest.raises(UserError, match=kind) as caught:
            described(tmp_path, toy_config(**changes), stored)
        assert "\n" not in str(caught.value)
