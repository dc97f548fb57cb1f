"""The grid of K and rates: its rules, its marks, and a sweep that is stopped and goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from eval_fakes import EOS, FakeDecoder, fake_judge, lay_out, spec

from eagle_dropmatch import cli
from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.evals import job
from eagle_dropmatch.evals.records import QuestionResult
from eagle_dropmatch.evals.summary import Summary, summarise
from eagle_dropmatch.stats import RowStats
from eagle_dropmatch.studies import heads_sweep
from eagle_dropmatch.studies.heads_sweep import Grid, at_equal_cost, cells_of, conclusions, describe

QUESTIONS = 12
GRID = Grid("mt_bench", "naive", [3, 5], {"p_drop": [0.1, 0.3], "head_agreement": [0.9]})


def measured(grid: Grid, heads: int, taus: list[float], costs: list[float]) -> Summary:
    """exact with tau 2, and the cells of one K with these taus and losses a token."""
    rng = np.random.default_rng(heads)
    rules = ["exact", *grid.rules(heads)]
    specs = [spec(rule, lossy=rule != "exact") for rule in rules]
    results: dict[str, dict[int | str, QuestionResult]] = {each: {} for each in rules}
    for rule, tau, cost in zip(rules, [2.0, *taus], [0.0, *costs], strict=True):
        for qid in range(QUESTIONS):
            wanted = tau + 0.02 * rng.normal()
            steps = [int(wanted) + (i / 40 < wanted % 1) for i in range(40)]
            count = 1 + sum(steps)
            row = RowStats(steps, steps, [0] * 40, [9] * 40, 5, count, "stop")
            log_p = -count * (1 + cost * (1 + 0.1 * rng.normal()))
            results[rule][qid] = QuestionResult(
                qid, ((*range(50, 49 + count), EOS),), (row,), 2.0, 0.1, 1.9, (2.0,), log_p, ()
            )
    return summarise(specs, results)


def test_cells_are_rules_that_can_be_made() -> None:
    grid = Grid("mt_bench", "majority", [3], {"p_drop": [0.1]}, {"mask": "step"})
    (text,) = grid.rules(3)
    made = vars(make_acceptor(text))
    assert (made["K"], made["p_drop"], made["mask"]) == (3, 0.1, "step")
    assert GRID.rules(5)[-1] == "naive(K=5, head_agreement=0.9)"


def test_a_cell_is_marked_unless_its_interval_lies_above_exact() -> None:
    summary = measured(GRID, 3, [2.4, 2.0, 1.7], [0.1, 0.1, 0.1])
    assert [cell.above for cell in cells_of(GRID, 3, summary)] == [True, False, False]
    line = describe(GRID, 3, summary)
    assert line.startswith("| 3 | 2.0")
    cells = [cell.strip() for cell in line.split("|")[3:6]]
    assert cells[0].startswith("2.")
    assert all(cell.startswith("(") and cell.endswith(")") for cell in cells[1:])


def test_one_question_shows_nothing() -> None:
    whole = measured(GRID, 3, [2.9, 2.9, 2.9], [0.1, 0.1, 0.1])
    alone = whole.comparisons[0].tau_ratio._replace(interval=None)
    cell = cells_of(GRID, 3, whole)[0]
    assert cell.above
    assert not replace(cell, lossy=replace(cell.lossy, tau_ratio=alone)).above


def test_the_grid_is_read_at_equal_cost_over_all_k() -> None:
    found = {
        3: measured(GRID, 3, [2.2, 2.4, 2.3], [0.05, 0.25, 0.11]),
        5: measured(GRID, 5, [2.4, 2.9, 2.8], [0.05, 0.25, 0.11]),
    }
    text = at_equal_cost(GRID, found)
    part = text[text.index("**At 0.1 nats") :]
    rows = [line for line in part.splitlines() if line.startswith("| K")]
    assert rows[0].startswith("| K = 5, head_agreement")
    assert "against K = 5, p_drop" in part
    assert "| K = 3, p_drop |" in part
    told = conclusions(GRID, found)
    assert "6 of 6 cells" in told[0]
    assert "naive(K=5, p_drop=0.3), tau 2.9" in told[1]


def test_text_on_a_heat_map_contrasts_with_its_cell() -> None:
    from matplotlib import colormaps

    def luminance(color: Any) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
        return float(np.dot((0.2126, 0.7152, 0.0722), linear))

    shades = [colormaps["cividis"](step) for step in np.linspace(0, 1, 50)]
    lights = [luminance(shade) for shade in shades]
    assert lights == sorted(lights)  # so in grey, too
    said = [heads_sweep._readable_on(shade) for shade in shades]
    assert said[0] == "white"
    assert said[-1] == "black"
    for light, text in zip(lights, said, strict=True):
        contrast = 1.05 / (light + 0.05) if text == "white" else (light + 0.05) / 0.05
        assert contrast > 4.5  # WCAG's AA


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path)
    monkeypatch.setattr(job, "judge_turn", lambda target, *ids, drafted: fake_judge(*ids))
    monkeypatch.setattr("eagle_dropmatch.evals.statistics.RESAMPLES", 99)
    return tmp_path


@pytest.fixture(scope="module")
def script(load_script: Any) -> ModuleType:
    return load_script("sweep_heads")


GIVEN = "--target target --draft draft --questions q.jsonl --heads 3 1 --output-dir out"


@pytest.mark.parametrize("killed_at", [0, 7, 29])
def test_a_stopped_sweep_goes_on_and_no_cell_is_lost_or_doubled(
    place: Path, script: ModuleType, capsys: pytest.CaptureFixture[str], killed_at: int
) -> None:
    given = [*GIVEN.split(), "--p-drop", "0.3", "0.1", "--head-agreement", "0.9"]
    decoder = FakeDecoder()
    decoder.interrupt_at = killed_at
    loads = []

    def load(options: Any) -> FakeDecoder:
        loads.append(options.tree_budget)
        return decoder

    assert cli.run_command(lambda argv: script.main(argv, load), given) == 130
    decoder.interrupt_at = None
    assert cli.run_command(lambda argv: script.main(argv, load), given) == 0
    assert loads == ["fixed", "fixed"]  # the second K uses the first one's models
    printed = capsys.readouterr().out
    written = (place / "out" / "heads.md").read_text(encoding="utf-8")
    for K in (1, 3):
        (line,) = [each for each in written.splitlines() if each.startswith(f"| {K} | ")]
        assert line in printed
        names = [f"naive-K-{K}-p_drop-0.1", f"naive-K-{K}-p_drop-0.3"]
        for arm in ("exact", *names, f"naive-K-{K}-head_agreement-0.9"):
            path = place / "out" / f"heads-{K:02}" / f"answers-{arm}.jsonl"
            ids = [json.loads(row)["question_id"] for row in path.read_text().splitlines()]
            assert sorted(ids) == [0, 1, 2]
        assert not (path.parent / "answers-plain.jsonl").exists()
    rows = json.loads((place / "out" / "heads.json").read_text())
    cells = [(row["K"], row["axis"], row["value"]) for row in rows]
    across = [("p_drop", 0.1), ("p_drop", 0.3), ("head_agreement", 0.9)]
    assert cells == [(K, *cell) for K in (1, 3) for cell in across]
    assert all(len(row["questions"]) == 3 for row in rows)
    for figure in ("heads-p-drop", "heads-head-agreement"):
        assert (place / "out" / f"{figure}.png").stat().st_size > 1000
        assert (place / "out" / f"{figure}.pdf").exists()
    # A finished sweep is told again without its models.
    assert cli.run_command(lambda argv: script.main(argv, pytest.fail), given) == 0


def test_one_axis_batches_plain_and_the_options_of_all_cells(
    place: Path, script: ModuleType
) -> None:
    flags = (
        f"{GIVEN} --rule majority --p-drop 0.2 --mask step --arms plain --batch-size 2 --seeds 1 2"
    )
    decoder = FakeDecoder()
    assert cli.run_command(lambda argv: script.main(argv, lambda _: decoder), flags.split()) == 0
    rows = json.loads((place / "out" / "heads.json").read_text())
    assert [row["rule"] for row in rows] == [
        "majority(K=1, p_drop=0.2, mask=step)",
        "majority(K=3, p_drop=0.2, mask=step)",
    ]
    names = sorted(path.stem for path in (place / "out" / "heads-03").glob("answers-*"))
    stem = "answers-majority-K-3-p_drop-0.2-mask-step-seed"
    assert names == ["answers-exact", f"{stem}1", f"{stem}2", "answers-plain"]
    assert not (place / "out" / "heads-head-agreement.png").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--p-drop auto", "name the shares to solve for with --head-agreement"),
        ("--p-drop 1", "'1' is neither a number in [0, 1) nor auto"),
        ("--head-agreement 0", "'0' is not a number in (0, 1]"),
        ("--heads 0", "'0' is not an integer of at least 1"),
        ("--rule margin", "invalid choice: 'margin'"),
        ("--acceptor naive", "--rule names the rule of the grid"),
        ("--trees 8/2/3", "all cells draw the same trees"),
        ("--tree-budget auto", "all cells draw trees of one size"),
        ("--controls", "heat maps have no place for them"),
        ("--benchmark mmlu", "invalid choice: 'mmlu'"),
        ("--arms lookup --batch-size 2", "answer one prompt at a time"),
    ],
)
def test_bad_input_is_one_line(
    script: ModuleType, refused_in_one_line: Any, flags: str, told: str
) -> None:
    refused_in_one_line(script.main, flags.split(), told)
