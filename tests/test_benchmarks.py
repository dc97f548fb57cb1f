"""The benchmarks run, and print a table an axis."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import rig
import torch
from safetensors.torch import save_file

from eagle_dropmatch import cli
from eagle_dropmatch.decoder import SpeculativeDecoder


@pytest.fixture(scope="module")
def kernels(load_script: Callable[..., ModuleType]) -> ModuleType:
    return load_script("kernels", "benchmarks")


def test_every_kernel_is_timed_over_every_size(
    kernels: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--nodes 2 9 --batch 1 3 --vocabulary 40 90 --times 1"
    assert cli.run_command(kernels.main, given.split()) == 0
    printed = capsys.readouterr().out
    for axis, sizes in (("nodes", "2 | 9"), ("batch", "1 | 3"), ("vocabulary", "40 | 90")):
        assert f"| microseconds over {axis} | {sizes} | exponent |" in printed
    for name in kernels.KERNELS:
        assert printed.count(f"\n| {name} | ") == (3 if name == "heads" else 2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--kernels forward", "invalid choice: 'forward'"),
        ("--nodes 1", "'1' is not an integer of at least 2"),
        ("--batch none", "'none' is not an integer"),
    ],
)
def test_bad_input_is_one_line(
    kernels: ModuleType, arguments: str, told: str, refused_in_one_line: Callable[..., None]
) -> None:
    refused_in_one_line(kernels.main, arguments.split(), told)


@pytest.fixture
def tiny_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that needs no files."""
    target = rig.tiny_target()
    decoder = rig.decoder(target, rig.eagle3(rig.tiny_draft(target)))
    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", lambda *_, **__: decoder)


@pytest.mark.usefixtures("tiny_pair")
def test_steps_are_timed_over_each_size_and_drawn(
    load_script: Callable[..., ModuleType], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = load_script("steps", "benchmarks")
    given = f"--context 8 40 --nodes 1 3 9 --batch 1 2 --times 1 --output-dir {tmp_path}"
    assert cli.run_command(script.main, given.split()) == 0
    printed = capsys.readouterr().out
    for heading in ("ms over tokens of context | 8 | 40", "ms over nodes a tree | 1 | 3 | 9"):
        assert f"| {heading} | exponent |" in printed
    assert "\n| 8 tokens of context, 1 row | " in printed
    assert "\n| 1 node a tree, 1 row | " in printed
    assert (tmp_path / "step-time.md").read_text() in printed
    assert (tmp_path / "step-time.png").stat().st_size > 1000


@pytest.mark.usefixtures("tiny_pair")
def test_memory_is_told_beside_what_must_be_held(
    load_script: Callable[..., ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("memory", "benchmarks")
    given = "--batch 2 --context 20 --steps 2 --acceptor naive"
    assert cli.run_command(script.main, given.split()) == 0
    printed = capsys.readouterr().out
    assert "batch 2, 20 tokens of context, trees of 60 nodes under naive" in printed
    for what in ("peak after loading", "of it the caches", "peak over 2 steps, beyond that"):
        assert f"\n| {what} | " in printed


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("steps", "--context 0", "'0' is not an integer of at least 1"),
        ("steps", "--output-dir /proc/nowhere", "cannot be written"),
        ("memory", "--batch none", "'none' is not an integer"),
        ("memory", "--acceptor magic", "unknown acceptor 'magic'"),
    ],
)
def test_bad_input_of_the_others_is_one_line(
    load_script: Callable[..., ModuleType],
    refused_in_one_line: Callable[..., None],
    name: str,
    arguments: str,
    told: str,
) -> None:
    refused_in_one_line(load_script(name, "benchmarks").main, arguments.split(), told)


PEER = """
import json, sys
settings = json.loads(sys.argv[1])
assert settings["tree"] == [24, 3, 4], settings
known = {known}
print(json.dumps({{"torch": "9.9", "transformers": "8.8"}}), flush=True)
for line in sys.stdin:
    task = json.loads(line)
    ids = known[str(task["ids"])]
    accepted = [1] * (len(ids) // 2) if task["draft"] else [0] * len(ids)
    print(json.dumps({{"ids": ids, "accepted": accepted, "seconds": 100.0}}), flush=True)
"""


@pytest.fixture
def public_eagle(
    load_script: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ModuleType:
    """The script over two prompts and a tiny pair, whose plain answers the other side gives."""
    script = load_script("public_eagle", "benchmarks")
    target = rig.tiny_target()
    decoder = rig.decoder(target, rig.eagle3(rig.tiny_draft(target)), tree=(24, 3, 4))
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    known = {
        str(prompt): decoder.generate(torch.tensor([prompt]), max_new_tokens=9, draft=False)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    }
    server = tmp_path / "server.py"
    server.write_text(PEER.format(known=known))
    monkeypatch.setattr(script, "SERVER", server)
    monkeypatch.setattr(script.first_turns, "load", lambda *_, **__: (decoder, prompts))
    monkeypatch.setattr("eagle_dropmatch.assets.reference_target", lambda: "target")
    return script


def test_the_published_eagle_answers_beside_ours(
    public_eagle: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = f"--python {sys.executable} --max-new-tokens 9 --output-dir {tmp_path}"
    assert cli.run_command(public_eagle.main, given.split()) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "public-eagle.md").read_text() in printed
    assert "torch 9.9, transformers 8.8" in printed
    rows = {
        cells[0]: cells[1:]
        for line in printed.splitlines()
        if line.startswith("| ") and len(cells := line.strip("| ").split(" | ")) == 6
    }
    # Greedy answers are those of plain decoding, whatever is drafted.
    for name in ("ours, plain", "ours, trees 24/3/4", "ours, trees of a chosen size"):
        assert rows[name][3] == "2 of 2"
    assert rows["ours, plain"][4] == "2 of 2"
    assert "\n| published, trees 24/3/4 | 2.00" in printed
    assert "\n| published, plain | 1.00" in printed


@pytest.mark.parametrize(
    ("python", "told"),
    [
        ("/nowhere/python", "--python /nowhere/python cannot be run"),
        ("false", "the published EAGLE-3 ended; the last that it said: nothing"),
    ],
)
def test_a_python_without_it_is_one_line(
    public_eagle: ModuleType, python: str, told: str, refused_in_one_line: Callable[..., None]
) -> None:
    refused_in_one_line(public_eagle.main, ["--python", python], told)


def test_a_targets_folder_is_made_readable_for_earlier_versions_and_left_as_it_is(
    load_script: Callable[..., ModuleType], tmp_path: Path
) -> None:
    folder, into = tmp_path / "target", tmp_path / "made"
    folder.mkdir()
    into.mkdir()
    save_file({"lm_head.weight": torch.zeros(2, 3)}, folder / "model.safetensors")
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    server = load_script("public_eagle_server", "benchmarks")
    assert server.readable_target(folder, into) == into
    made = {path.name: path for path in into.iterdir()}
    assert json.loads(made["config.json"].read_text())["rope_theta"] == 5e5
    assert "TokenizersBackend" not in made["tokenizer_config.json"].read_text()
    index = json.loads(made["model.safetensors.index.json"].read_text())
    assert index == {"weight_map": {"lm_head.weight": "model.safetensors"}}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
