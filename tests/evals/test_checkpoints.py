"""What is refused about a target and a draft before either is loaded."""

from __future__ import annotations

import json

import pytest

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals import checkpoints
from eagle_dropmatch.evals.checkpoints import check_models, describe_source


def checkpoint(path, config, weights="model.safetensors"):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if weights:
        (path / weights).write_bytes(b"weights of " + path.name.encode())
    return str(path)


def test_a_draft_for_another_target_is_told_by_the_configs(tmp_path):
    target = checkpoint(tmp_path / "target", {"hidden_size": 576})
    draft = checkpoint(tmp_path / "draft", {"hidden_size": 4096})
    with pytest.raises(UserError, match=r"hidden_size 4096, but --target .* has 576"):
        check_models(target, draft)


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ({"hidden_size": 576}, {"hidden_size": 576}),
        ({"hidden_size": 8192}, {"hidden_size": 6144, "target_hidden_size": 8192}),
        ({"text_config": {"hidden_size": 576}}, {"hidden_size": 576}),
        ({"hidden_size": 576}, {"transformer_layer_config": {"hidden_size": 576}}),
        ({"model_type": "old"}, {"hidden_size": 576}),
    ],
)
def test_fitting_and_unknown_sizes_pass(tmp_path, target, draft):
    check_models(checkpoint(tmp_path / "t", target), checkpoint(tmp_path / "d", draft))


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B-Instruct"])
def test_hub_ids_are_left_to_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_models(name, name)
    assert describe_source(name) == {"name": name}


@pytest.mark.parametrize("path", ["./none", "../none", "/none", "~/none", "a/b/c", "none/"])
def test_a_path_that_does_not_exist_is_no_hub_id(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"--draft .*no such folder"):
        check_models(None, path)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"it has no config\.json"):
        check_models(str(tmp_path / "empty"), None)
    bare = checkpoint(tmp_path / "bare", {"hidden_size": 8}, weights="")
    with pytest.raises(UserError, match="it has no weights"):
        check_models(bare, None)
    with pytest.raises(UserError, match="is a file"):
        check_models(None, str(tmp_path / "bare" / "config.json"))


@pytest.mark.parametrize("text", ["{half", "[]"])
def test_a_broken_config_is_refused(tmp_path, text):
    path = checkpoint(tmp_path / "t", {})
    (tmp_path / "t" / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        check_models(path, None)


def test_other_weights_under_the_same_name_are_another_checkpoint(tmp_path, monkeypatch):
    path = checkpoint(tmp_path / "d", {"hidden_size": 8})
    before = describe_source(path)
    (tmp_path / "d" / "model.safetensors").write_bytes(b"trained further")
    assert describe_source(path)["weights"] != before["weights"]
    monkeypatch.setattr(checkpoints, "HASHED_BYTES", 3)
    assert describe_source(path)["weights"] == {"model.safetensors": "15 bytes"}
