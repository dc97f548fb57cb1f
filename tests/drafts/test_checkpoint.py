"""Reading drafts: namings, file kinds, and what is missing, left over or of another shape."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_drafts import (
    DRAFT_VOCAB,
    HIDDEN,
    LAYERS,
    TARGET,
    VOCAB,
    chain_logits,
    context,
    load_toy,
    target_modules,
    toy_config,
    toy_tensors,
    write_checkpoint,
)
from transformers import LlamaConfig

from eagle_dropmatch.drafts import draft_files
from eagle_dropmatch.drafts.checkpoint import TargetShape, load_draft, read_draft_config
from eagle_dropmatch.errors import UserError

Tensors = dict[str, Tensor]


def logits_of(folder: Path, **options: Any) -> Tensor:
    draft = load_toy(folder, **options)
    taps, tokens = context(draft.config.feature_size)
    return chain_logits(draft, taps, tokens, (3, 41))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    out = {}
    for name, value in tensors.items():
        for old, new in pairs:
            if name.startswith(old):
                name = new + name[len(old) :]
        out[name] = value
    return out


def speculators_config(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    own = ("draft_vocab_size", "architectures", "norm_before_residual", "fc_norm", "norm_output")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": None,
        "norm_before_residual": config.get("norm_before_residual", False),
        "transformer_layer_config": {k: v for k, v in config.items() if k not in own},
        **changes,
    }


NAMINGS: dict[str, Callable[[Tensors], Tensors]] = {
    "midlayer": lambda t: t,
    "layers.0": lambda t: renamed(t, ("midlayer.", "layers.0.")),
    "model prefix": lambda t: renamed(t, *((k, f"model.{k}") for k in ("midlayer", "norm", "fc"))),
    "model.layers.0": lambda t: renamed(t, ("midlayer.", "model.layers.0."), ("d2t", "model.d2t")),
    "with tables": lambda t: {
        **t,
        "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "verifier_lm_head.weight": torch.ones(DRAFT_VOCAB, HIDDEN),
        "verifier_norm.weight": torch.ones(HIDDEN),
    },
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("naming", NAMINGS)
def test_one_draft_gives_the_same_logits_under_every_name_and_file_kind(
    tmp_path: Path, naming: str, suffix: str, shards: int
) -> None:
    config = toy_config()
    tensors = toy_tensors(config)
    expected = logits_of(write_checkpoint(tmp_path / "official", config, tensors))
    for dialect in (config, speculators_config(config)):
        folder = tmp_path / dialect["architectures"][0]
        stored = NAMINGS[naming](tensors)
        write_checkpoint(folder, dialect, stored, suffix=suffix, shards=shards)
        assert len(list(folder.glob(f"*.{suffix}"))) == shards
        assert torch.equal(logits_of(folder), expected)


def test_a_bin_file_from_before_zip_archives_is_read(tmp_path: Path) -> None:
    config = toy_config()
    tensors = toy_tensors(config)
    expected = logits_of(write_checkpoint(tmp_path, config, tensors))
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "pytorch_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    assert torch.equal(logits_of(tmp_path), expected)


def test_weights_from_a_bin_file_survive_its_overwriting(tmp_path: Path) -> None:
    config = toy_config()
    tensors = toy_tensors(config)
    draft = load_toy(write_checkpoint(tmp_path, config, tensors, suffix="bin"))
    file = tmp_path / "pytorch_model.bin"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert torch.equal(draft.norm.weight, tensors["norm.weight"])


def test_legacy_names_of_the_feature_norms_are_read(tmp_path: Path) -> None:
    config = toy_config(fc_norm=True)
    tensors = toy_tensors(config)
    expected = logits_of(write_checkpoint(tmp_path / "new", config, tensors))
    legacy = renamed(
        tensors,
        *((f"fc_norm.{i}.", f"aux_norm_{n}.") for i, n in enumerate(("low", "mid", "high"))),
    )
    assert "aux_norm_mid.weight" in legacy
    old = write_checkpoint(tmp_path / "old", toy_config(use_aux_norm=True), legacy)
    assert torch.equal(logits_of(old), expected)


REQUIRED = [name for name in toy_tensors(toy_config()) if name != "t2d"]


@pytest.mark.parametrize("name", REQUIRED)
def test_each_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    config = toy_config()
    tensors = toy_tensors(config)
    shape = list(tensors.pop(name).shape)
    write_checkpoint(tmp_path, config, tensors)
    assert f"missing {name} {shape}" in refusal(lambda: load_toy(tmp_path))


def test_all_differences_stand_in_one_line(tmp_path: Path) -> None:
    config = toy_config()
    tensors = toy_tensors(config)
    del tensors["norm.weight"], tensors["midlayer.mlp.up_proj.weight"]
    tensors["midlayer.self_attn.q_norm.weight"] = torch.ones(8)
    tensors["lm_head.weight"] = torch.ones(DRAFT_VOCAB + 1, HIDDEN)
    write_checkpoint(tmp_path, config, tensors)
    message = refusal(lambda: load_toy(tmp_path))
    for part in (
        "missing midlayer.mlp.up_proj.weight [48, 32], norm.weight [32]",
        "unexpected midlayer.self_attn.q_norm.weight [8]",
        "of another shape lm_head.weight (expected [20, 32], found [21, 32])",
    ):
        assert part in message


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm"])
def test_a_norm_without_its_flag_and_a_flag_without_its_norm_are_refused(
    tmp_path: Path, flag: str
) -> None:
    with_norm, without = toy_config(**{flag: True}), toy_config()
    extra = write_checkpoint(tmp_path / "extra", without, toy_tensors(with_norm))
    assert "unexpected" in refusal(lambda: load_toy(extra))
    lacking = write_checkpoint(tmp_path / "lacking", with_norm, toy_tensors(without))
    assert "missing" in refusal(lambda: load_toy(lacking))


def test_nothing_is_left_without_a_value(tmp_path: Path) -> None:
    config = toy_config()
    tensors = toy_tensors(config)
    draft = load_toy(write_checkpoint(tmp_path, config, tensors))
    state = draft.state_dict()
    assert set(state) == set(tensors)
    assert all(torch.equal(state[name], value) for name, value in tensors.items())
    assert draft.rotary.inv_freq.device.type == "cpu"
    assert not draft.training


def test_a_missing_embedding_is_borrowed_and_an_own_one_is_kept(tmp_path: Path) -> None:
    config = toy_config()
    tensors = toy_tensors(config)
    embedding, _ = target_modules()
    borrowed = load_draft(
        write_checkpoint(tmp_path, config, tensors),
        target_config=TARGET,
        target_embedding=embedding,
    )
    assert borrowed.embed_tokens is embedding
    assert not borrowed.config.own_embedding
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    own = load_toy(write_checkpoint(tmp_path, config, tensors))
    assert torch.equal(own.embed(torch.arange(VOCAB)), tensors["embed_tokens.weight"])


def test_an_embedding_of_another_width_cannot_be_borrowed(tmp_path: Path) -> None:
    config = toy_config(target_hidden_size=48)
    write_checkpoint(tmp_path, config, toy_tensors(config))
    wide = TargetShape(48, VOCAB, LAYERS)
    assert "missing embed_tokens.weight [50, 32]" in refusal(lambda: load_toy(tmp_path, wide))


def test_a_missing_head_is_borrowed_only_over_the_whole_vocabulary(tmp_path: Path) -> None:
    config = toy_config(draft_vocab_size=None)
    tensors = toy_tensors(config)
    del tensors["lm_head.weight"]
    write_checkpoint(tmp_path, config, tensors)
    embedding, head = target_modules()
    options: dict[str, Any] = {"target_config": TARGET, "target_embedding": embedding}
    draft = load_draft(tmp_path, target_head=head, **options)
    assert draft.lm_head is head
    assert not draft.config.own_head
    assert draft.t2d.all()
    assert "target's head" in refusal(lambda: load_draft(tmp_path, **options))
    reduced = toy_config()
    tensors = toy_tensors(reduced)
    del tensors["lm_head.weight"]
    write_checkpoint(tmp_path, reduced, tensors)
    assert "missing lm_head.weight [20, 32]" in refusal(lambda: load_toy(tmp_path))


@pytest.mark.parametrize("own", [True, False], ids=["own embedding", "target's embedding"])
def test_a_tied_head_is_the_embedding(tmp_path: Path, own: bool) -> None:
    config = toy_config(draft_vocab_size=None, tie_word_embeddings=True)
    tensors = toy_tensors(config)
    del tensors["lm_head.weight"]
    if own:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    draft = load_toy(write_checkpoint(tmp_path, config, tensors))
    x = torch.randn(2, HIDDEN)
    table = tensors["embed_tokens.weight"] if own else target_modules()[0].weight
    torch.testing.assert_close(draft.logits(x), x @ table.T)


def test_a_tying_key_beside_a_stored_head_leaves_the_head_in_force(tmp_path: Path) -> None:
    config = toy_config(tie_word_embeddings=True)
    tensors = toy_tensors(config)
    draft = load_toy(write_checkpoint(tmp_path, config, tensors))
    x = torch.randn(2, HIDDEN)
    torch.testing.assert_close(draft.logits(x), x @ tensors["lm_head.weight"].T)


def test_the_head_decides_the_dtype_where_it_is_borrowed(tmp_path: Path) -> None:
    config = toy_config(draft_vocab_size=None)
    tensors = toy_tensors(config)
    del tensors["lm_head.weight"]
    write_checkpoint(tmp_path, config, tensors)
    embedding, head = target_modules()
    options: dict[str, Any] = {
        "target_config": TARGET,
        "target_embedding": embedding.to(torch.bfloat16),
        "target_head": head.to(torch.bfloat16),
    }
    draft = load_draft(tmp_path, **options)
    assert draft.dtype == torch.bfloat16
    assert "must be the same" in refusal(
        lambda: load_draft(tmp_path, dtype=torch.float32, **options)
    )


def test_a_map_may_be_missing_only_over_the_whole_vocabulary(tmp_path: Path) -> None:
    config = toy_config(draft_vocab_size=VOCAB)
    draft = load_toy(write_checkpoint(tmp_path, config, toy_tensors(config)))
    assert torch.equal(draft.to_target_ids(torch.arange(VOCAB)), torch.arange(VOCAB))
    assert draft.t2d.all()
    assert not draft.d2t.any()


def test_a_missing_t2d_follows_from_d2t(tmp_path: Path) -> None:
    config = toy_config()
    tensors = toy_tensors(config)
    members = tensors.pop("t2d")
    tensors["d2t"] = tensors["d2t"].to(torch.int32)
    draft = load_toy(write_checkpoint(tmp_path, config, tensors))
    assert torch.equal(draft.t2d, members)
    assert (draft.t2d.dtype, draft.d2t.dtype) == (torch.bool, torch.int64)


def absolute(tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(DRAFT_VOCAB)


def doubled(tensors: Tensors) -> None:
    tensors["d2t"][5] = tensors["d2t"][4] - 1


def beyond(tensors: Tensors) -> None:
    tensors["d2t"][-1] = VOCAB - DRAFT_VOCAB + 1


def fractional(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"].float()


def contradicted(tensors: Tensors) -> None:
    tensors["t2d"] = ~tensors["t2d"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (absolute, "the vocabulary has 50: expected offsets"),
        (doubled, "not ascending or maps two draft ids to one"),
        (beyond, "maps to target ids"),
        (fractional, "torch.float32: expected whole numbers"),
        (contradicted, "t2d and d2t .* disagree"),
    ],
)
def test_a_wrong_vocabulary_map_is_refused(
    tmp_path: Path, spoil: Callable[[Tensors], None], words: str
) -> None:
    config = toy_config()
    tensors = toy_tensors(config)
    spoil(tensors)
    write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(UserError, match=words):
        load_toy(tmp_path)


def test_a_draft_of_another_target_is_refused_with_both_numbers(tmp_path: Path) -> None:
    config = toy_config()
    write_checkpoint(tmp_path, config, toy_tensors(config))
    message = refusal(lambda: load_toy(tmp_path, TargetShape(64, VOCAB, LAYERS)))
    assert "hidden size 32" in message
    assert "this target has 64" in message
    message = refusal(lambda: load_toy(tmp_path, TargetShape(HIDDEN, 60, LAYERS)))
    assert "a vocabulary of 50" in message
    assert "this target has 60" in message
    ids = [1, 3, 9]
    message = refusal(lambda: load_toy(tmp_path, layer_ids=ids, layer_id_convention="output"))
    assert "[2, 4, 10]" in message
    assert "last is 9" in message


def test_a_transformers_config_describes_the_target(tmp_path: Path) -> None:
    config = toy_config()
    write_checkpoint(tmp_path, config, toy_tensors(config))
    target = LlamaConfig(hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=LAYERS)
    assert read_draft_config(tmp_path, target_config=target).config.hidden_size == HIDDEN
    target.hidden_size = 64
    with pytest.raises(UserError, match="hidden size 32"):
        read_draft_config(tmp_path, target_config=target)


def test_stored_dtypes_are_kept_unless_another_is_asked_for(tmp_path: Path) -> None:
    config = toy_config()
    halves = {
        k: v.to(torch.bfloat16) if v.is_floating_point() else v
        for k, v in toy_tensors(config).items()
    }
    halves["norm.weight"] = halves["norm.weight"].float()
    write_checkpoint(tmp_path, config, halves)
    kept = load_toy(tmp_path)
    assert {p.dtype for p in kept.parameters()} == {torch.bfloat16}
    asked = load_toy(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in asked.parameters()} == {torch.float32}
    assert asked.d2t.dtype == torch.int64
    halves["norm.weight"] = halves["norm.weight"].to(torch.float8_e4m3fn)
    write_checkpoint(tmp_path, config, halves)
    assert "float8_e4m3fn: expected float32" in refusal(lambda: load_toy(tmp_path))


def test_paths_that_are_no_checkpoint_are_one_line(tmp_path: Path) -> None:
    assert "no such folder" in refusal(lambda: read_draft_config(tmp_path / "nowhere"))
    assert "no config.json" in refusal(lambda: read_draft_config(tmp_path))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(toy_config()))
    assert "is a file" in refusal(lambda: read_draft_config(config))
    assert "no model.safetensors and no pytorch_model.bin" in refusal(
        lambda: read_draft_config(tmp_path)
    )
    config.write_text("{not json")
    assert "cannot be read as JSON" in refusal(lambda: read_draft_config(tmp_path))
    config.write_text("[]")
    assert "expected a JSON object" in refusal(lambda: read_draft_config(tmp_path))


class Payload:
    """Something that only a pickle with code in it can carry."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("was-run",))


def test_damaged_and_dangerous_weight_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(toy_config()))
    weights = tmp_path / "pytorch_model.bin"
    torch.save({"fc.weight": Payload()}, weights)
    assert "holds more than tensors" in refusal(lambda: read_draft_config(tmp_path))
    assert not (tmp_path / "was-run").exists()
    weights.write_bytes(b"garbage")
    assert "cannot be read" in refusal(lambda: read_draft_config(tmp_path))
    torch.save([torch.ones(2)], weights)
    assert "expected a state dict" in refusal(lambda: read_draft_config(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    assert "cannot be read" in refusal(lambda: read_draft_config(tmp_path))


def test_an_index_that_does_not_match_its_shards_is_refused(tmp_path: Path) -> None:
    config = toy_config()
    write_checkpoint(tmp_path, config, toy_tensors(config), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"]["norm.weight"]
    content["weight_map"]["norm.bias"] = shard
    index.write_text(json.dumps(content))
    assert "lacks norm.bias" in refusal(lambda: read_draft_config(tmp_path))
    (tmp_path / shard).unlink()
    assert f"not there: {shard}" in refusal(lambda: read_draft_config(tmp_path))
    index.write_text("{}")
    assert "expected a weight_map" in refusal(lambda: read_draft_config(tmp_path))


def test_a_tensor_stored_under_two_names_is_refused(tmp_path: Path) -> None:
    config = toy_config()
    tensors = toy_tensors(config)
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    write_checkpoint(tmp_path, config, tensors)
    assert "stores one tensor twice" in refusal(lambda: read_draft_config(tmp_path))


def test_a_hub_id_is_downloaded_without_its_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config()
    write_checkpoint(tmp_path, config, toy_tensors(config))
    asked: list[tuple[str, list[str]]] = []

    def snapshot(repo: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(draft_files, "snapshot_download", snapshot)
    assert read_draft_config("someone/EAGLE3-Toy").folder == tmp_path
    patterns = ["config.json", "*.safetensors", "*.bin", "*.index.json"]
    assert asked == [("someone/EAGLE3-Toy", patterns)]


def test_a_hub_id_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repo: str, *, allow_patterns: list[str]) -> str:
        raise ConnectionError("offline mode\nand a long explanation")

    monkeypatch.setattr(draft_files, "snapshot_download", snapshot)
    message = refusal(lambda: read_draft_config("someone/EAGLE3-Toy"))
    assert "someone/EAGLE3-Toy" in message
    assert "(offline mode)" in message


@pytest.mark.parametrize("name", ["seed0_vd200", "seed0_vd320", "seed1_vd200", "seed1_vd320"])
def test_the_recorded_references_drafts_are_read(data_dir: Path, name: str) -> None:
    folder = data_dir / "parity" / name
    target = LlamaConfig.from_pretrained(folder / "target")
    draft = load_draft(folder / "draft", target_config=target, target_embedding=nn.Embedding(1, 1))
    assert draft.config.own_embedding
    assert draft.config.draft_vocab_size == int(name[-3:])
    assert draft.config.rope_parameters["rope_theta"] == 10000.0


def test_the_stopgap_draft_is_read(data_dir: Path) -> None:
    embedding = nn.Embedding(49152, 576, dtype=torch.bfloat16)
    draft = load_draft(
        data_dir / "stopgap_draft",
        target_config=TargetShape(576, 49152, 30),
        target_embedding=embedding,
    )
    assert draft.embed_tokens is embedding
    assert draft.dtype == torch.bfloat16
    assert draft.config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert int(draft.t2d.sum()) == draft.config.draft_vocab_size == 8192
