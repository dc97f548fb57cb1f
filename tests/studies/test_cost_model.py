"""What a pair needs, from its configs: against the models themselves, and against the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rig
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_toys import save_toy_target, toy_draft, toy_target

from eagle_dropmatch import cli
from eagle_dropmatch.drafts.base import TreeShape
from eagle_dropmatch.drafts.checkpoint import save_draft
from eagle_dropmatch.studies.cost_model import (
    PairShape,
    memory,
    plain_floor,
    prompt_floor,
    shape_of,
    step_floor,
)
from eagle_dropmatch.studies.step_profile import Machine
from eagle_dropmatch.target import TargetModel

PAIR = PairShape(
    body=1000, head=400, embedding=400, width=4, cache=16, draft_layer=90, draft_fusing=48,
    draft_head=40, draft_cache=8,
)  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_of_a_pair_is_counted(tied: bool) -> None:
    model = toy_target(tie_word_embeddings=tied)
    draft = toy_draft(model)
    pair = shape_of(model.config, draft.config)
    assert pair.target == sum(p.numel() for p in model.parameters())
    own = [m for m in draft.modules() if isinstance(m, torch.nn.Linear)]
    assert pair.draft == sum(m.weight.numel() for m in own)


def test_a_token_adds_to_the_caches_what_is_counted() -> None:
    model = TargetModel(rig.tiny_model())
    cache = model.new_cache(2, 100)
    with torch.inference_mode():
        model.prefill(cache, torch.tensor(rig.prompts(90, 90)), [90, 90])
    numbers = sum(each.numel() for each in cache.all_stores())
    room = cache.all_stores()[0].shape[-2]
    config: Any = model.model.config
    pair = shape_of(config, toy_draft(toy_target()).config)
    assert numbers == 2 * room * pair.cache


@given(
    batch=st.integers(1, 64),
    context=st.integers(1, 9000),
    nodes=st.integers(2, 200),
    depth=st.integers(0, 14),
)
def test_nothing_gets_cheaper_with_more_work(
    batch: int, context: int, nodes: int, depth: int
) -> None:
    machine = Machine(1e9, 1e12)
    tree, larger = TreeShape(nodes, depth, 4), TreeShape(nodes + 1, depth + 1, 5)
    load = {"batch": batch, "context": context}
    more = {"batch": batch + 1, "context": context + 1}
    step = step_floor(PAIR, machine, tree, **load)
    assert step >= plain_floor(PAIR, machine, **load) > 0
    assert step_floor(PAIR, machine, larger, **more) > step
    first, second = memory(PAIR, tree, **load), memory(PAIR, larger, **more)
    assert all(second[part] >= first[part] for part in first)
    assert sum(second.values()) > sum(first.values())


def test_a_floor_is_the_slower_of_reading_and_multiplying() -> None:
    reads, multiplies = Machine(1.0, 1e30), Machine(1e30, 1.0)
    assert plain_floor(PAIR, reads, batch=3, context=10) == 2 * 1400 + 3 * 10 * 16 * 2
    assert plain_floor(PAIR, multiplies, batch=3, context=10) == pytest.approx(2 * 1400 * 3)
    tree = TreeShape(8, 2, 4)  # three levels
    assert step_floor(PAIR, multiplies, tree, batch=1, context=10) == pytest.approx(
        2 * (3 * 4 * (90 + 40) + 48 + 8 * 1400)
    )
    assert prompt_floor(PAIR, multiplies, tokens=5) == pytest.approx(2 * 5 * (1000 + 90 + 48))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_toy_target(tmp_path / "target")
    save_draft(toy_draft(toy_target()), tmp_path / "draft")
    return tmp_path


def run(load_script: Any, arguments: str) -> int:
    code: int = cli.run_command(load_script("estimate").main, arguments.split())
    return code


def test_the_script_tells_memory_and_hours(
    load_script: Any, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = "--target target --draft draft --bandwidth 100 --operations 2"
    assert run(load_script, f"{pair} --tau 4 --questions 10 --turns 1") == 0
    out = capsys.readouterr().out
    assert "| caches |" in out
    assert "10 answers of 64 tokens, tau 4" in out
    assert "| plain |" in out
    assert "| drafting |" in out
    assert run(load_script, f"{pair} --tau 4 --questions 10 --turns 2") == 0
    hours = [float(text.splitlines()[-1].split("|")[3]) for text in (out, capsys.readouterr().out)]
    assert hours[1] == pytest.approx(2 * hours[0], rel=0.1, abs=2e-3)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--target target", "give --target and --draft"),
        ("--bandwidth 4", "give --bandwidth and --operations"),
        ("--target none/ --draft draft", "--target none/: no such folder"),
        ("--bandwidth 0 --operations 1", "'0' is not a number above 0"),
        ("--context 5 --max-new-tokens 5", "--max-new-tokens 5 leaves no prompt in --context 5"),
    ],
)
def test_what_does_not_fit_is_one_line(
    load_script: Any, place: Path, capsys: pytest.CaptureFixture[str], arguments: str, told: str
) -> None:
    assert run(load_script, arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
