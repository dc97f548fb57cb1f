"""tau over draft levels: where it saturates, and a sweep that is stopped and goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eval_fakes import EOS, FakeDecoder, fake_judge, lay_out, spec

from eagle_dropmatch import cli
from eagle_dropmatch.evals import job
from eagle_dropmatch.evals.records import QuestionResult
from eagle_dropmatch.evals.summary import summarise
from eagle_dropmatch.stats import RowStats
from eagle_dropmatch.studies import depth_sweep
from eagle_dropmatch.studies.depth_sweep import Point, conclusions, saturation, write

QUESTIONS = 12


def point(levels: int, taus: dict[str, float], *, noise: float = 0.0) -> Point:
    """Rules whose steps commit so many tokens on average."""
    rng = np.random.default_rng(levels)
    specs = [spec("plain"), *(spec(name, lossy=name != "exact") for name in taus)]
    results: dict[str, dict[int | str, QuestionResult]] = {}
    for each in specs:
        results[each.name] = {}
        for qid in range(QUESTIONS):
            wanted = taus.get(each.name, 1.0) + noise * rng.normal()
            steps = [int(wanted) + (i / 40 < wanted % 1) for i in range(40)]
            count = 1 + sum(steps)
            row = RowStats(steps, steps, [0] * 40, [9] * 40, 5, count, "stop")
            results[each.name][qid] = QuestionResult(
                qid, ((*range(50, 49 + count), EOS),), (row,), 2.0, 0.1, 1.9, (2.0,), -count, ()
            )
    return Point(levels, 1 + 8 * levels, summarise(specs, results))


def test_a_rule_saturates_where_the_gain_ends() -> None:
    exact = [1.5, 2.0, 2.3, 2.3, 2.3, 2.3]
    naive = [1.6, 2.2, 2.7, 3.0, 3.2, 3.3]
    points = [
        point(level, {"exact": e, "naive": n})
        for level, (e, n) in enumerate(zip(exact, naive, strict=True), 1)
    ]
    found = saturation(points, "exact")
    assert (found.level, found.plateau, found.reached) == (3, 3, 3)
    assert found.gain is not None
    assert found.gain.value == pytest.approx(0)
    grows = saturation(points, "naive")
    assert (grows.level, grows.plateau, grows.reached) == (None, None, 6)
    assert grows.reached_interval == (6, 6)
    told = conclusions(points)
    assert "exact: saturates at 3 levels" in told[0]
    assert "naive: every measured level still gains" in told[1]


def test_noise_ends_a_gain_that_it_hides() -> None:
    points = [point(n, {"exact": 2 + 0.01 * n}, noise=0.4) for n in (1, 2, 3)]
    assert saturation(points, "exact").level in (1, 2)


def test_a_dip_at_one_level_does_not_end_what_all_deeper_ones_gain() -> None:
    taus = [2.0, 2.5, 2.4, 3.0, 3.1, 3.1, 3.1]
    points = [point(level, {"exact": tau}) for level, tau in enumerate(taus, 1)]
    found = saturation(points, "exact")
    assert (found.level, found.plateau) == (2, 5)
    assert found.gain is not None
    assert found.beyond is not None
    assert found.gain.value == pytest.approx(-0.1)
    assert found.beyond.value == pytest.approx(0)
    assert (
        "at 5 all deeper levels together gain no more (0.000 [0.000, 0.000])"
        in (conclusions(points)[0])
    )


def test_without_plain_decoding_no_panel_is_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(depth_sweep, "save_figure", lambda figure, *_: drawn.append(figure))
    points = [point(level, {"exact": 2.0, "naive": 2.5}) for level in (1, 2)]
    for each in points:
        for row in each.summary.rows:
            assert row.speedup or not row.drafting
    depth_sweep.draw(points, tmp_path)
    alone = [
        replace(
            each,
            summary=replace(
                each.summary, rows=tuple(replace(row, speedup={}) for row in each.summary.rows)
            ),
        )
        for each in points
    ]
    depth_sweep.draw(alone, tmp_path)
    assert [len(figure.axes) for figure in drawn] == [3, 2]
    for figure in drawn:
        assert all(panel.lines for panel in figure.axes)


def test_ratios_stand_beside_the_papers(tmp_path: Path) -> None:
    points = [point(level, {"exact": 2.0, "naive": 2.5}) for level in (4, 6, 8)]
    (told,) = [line for line in conclusions(points) if line.startswith("tau of naive")]
    assert "depth 5: 1.250" in told
    assert "(paper 1.091)" in told
    assert "depth 7: 1.250" in told
    assert "depth 9" not in told
    write(points, tmp_path, "the command")
    assert "`the command`" in (tmp_path / "sweep.md").read_text()
    assert (tmp_path / "depth.png").stat().st_size > 1000
    rows = json.loads((tmp_path / "sweep.json").read_text())
    assert [(row["levels"], row["rule"]) for row in rows] == [
        (level, rule) for level in (4, 6, 8) for rule in ("exact", "naive")
    ]
    assert rows[1]["tau"]["value"] == pytest.approx(2.5)
    # P(a >= 1), P(a >= 2): every step accepts one, half of them two.
    assert rows[1]["acceptance"] == pytest.approx([1.0, 0.5])
    assert len(rows[0]["questions"]) == QUESTIONS


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path)
    monkeypatch.setattr(job, "judge_turn", lambda target, *ids, drafted: fake_judge(*ids))
    return tmp_path


GIVEN = "--target target --draft draft --questions q.jsonl --acceptor naive --levels 3 1 2"


@pytest.mark.parametrize("killed_at", [0, 5, 29])
def test_a_stopped_sweep_goes_on_and_no_point_is_lost_or_doubled(
    place: Path,
    load_script: Any,
    capsys: pytest.CaptureFixture[str],
    killed_at: int,
) -> None:
    script = load_script("sweep_depth")
    given = [*GIVEN.split(), "--output-dir", "out"]
    decoder = FakeDecoder()
    decoder.interrupt_at = killed_at
    trees = []

    def load(options: Any) -> FakeDecoder:
        trees.append((options.total_token, options.depth, options.top_k, options.tree_budget))
        return decoder

    assert cli.run_command(lambda argv: script.main(argv, load), given) == 130
    decoder.interrupt_at = None
    assert cli.run_command(lambda argv: script.main(argv, load), given) == 0
    printed = capsys.readouterr().out
    lines = (place / "out" / "sweep.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith(("| 1 (0)", "| 2 (1)", "| 3 (2)"))]
    assert len(rows) == 3
    assert all(row in printed for row in rows)
    assert trees[-1][2:] == (10, "fixed")
    for level in (1, 2, 3):
        for arm in ("plain", "exact", "naive"):
            path = place / "out" / f"levels-{level:02}" / f"answers-{arm}.jsonl"
            ids = [json.loads(line)["question_id"] for line in path.read_text().splitlines()]
            assert sorted(ids) == [0, 1, 2]
    # A finished sweep is told again without its models.
    assert cli.run_command(lambda argv: script.main(argv, pytest.fail), given) == 0


@pytest.mark.parametrize(
    ("flags", "nodes"),
    [
        ("", [11, 60, 60]),  # one level of ten children has no more
        ("--nodes-per-level 4 --top-k 3", [4, 9, 13]),
        ("--chain", [2, 3, 4]),
        ("--total-token 30", [11, 30, 30]),
    ],
)
def test_trees_have_the_nodes_of_their_level(
    place: Path, load_script: Any, flags: str, nodes: list[int]
) -> None:
    script = load_script("sweep_depth")
    given = [*GIVEN.split(), "--output-dir", "out", *flags.split()]
    assert cli.run_command(lambda argv: script.main(argv, lambda _: FakeDecoder()), given) == 0
    rows = json.loads((place / "out" / "sweep.json").read_text())
    found = [row["nodes"] for row in rows if row["rule"] == "exact"]
    assert found == nodes


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--depth 3", "--levels says how deep trees are"),
        ("--tree-budget auto", "trees have the size of their level"),
        ("--trees 8/2/3", "trees are those of --levels"),
        ("--levels 0", "'0' is not an integer of at least 1"),
        ("--total-token 9 --nodes-per-level 3", "both size the trees"),
        ("--acceptor magic", "unknown acceptor"),
    ],
)
def test_bad_input_is_one_line(
    load_script: Any, refused_in_one_line: Any, flags: str, told: str
) -> None:
    refused_in_one_line(load_script("sweep_depth").main, flags.split(), told)
