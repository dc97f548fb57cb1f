"""Texts that take their numbers from runs: what is filled in, what is refused, and our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_runs import write_run

from eagle_dropmatch import cli
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.reports.compare import as_json
from eagle_dropmatch.reports.marked_text import refreshed
from eagle_dropmatch.reports.quantities import QUANTITIES, quantity
from eagle_dropmatch.reports.rule_numbers import numbers_of
from eagle_dropmatch.reports.stored_run import StoredRun, read_run

TEXT = """# A title

<!-- run: table -->
| old |
<!-- end -->

naive reaches <!-- =run naive tau alone -->9.99<!-- --> and a ratio of
about <!-- =run naive tau_ratio -->?<!-- -->, for <!-- =run naive cost alone -->0.100<!-- --> nats.

<!-- run: costs -->
<!-- end -->
"""


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return read_run(write_run(tmp_path / "results" / "run"))


def test_marked_places_say_what_the_run_says_and_all_else_stays(run: StoredRun) -> None:
    text, changes = refreshed(TEXT, lambda _: run)
    assert [(change.line, change.marker) for change in changes] == [
        (3, "run: table"),
        (7, "run naive tau alone"),
        (8, "run naive tau_ratio"),
        (10, "run: costs"),
    ]
    assert "naive reaches <!-- =run naive tau alone -->2.92<!-- --> and" in text
    assert f"-->{quantity(run, 'naive', 'tau_ratio')}<!-- -->, for" in text
    assert "| old |" not in text
    assert "| label plain" not in text  # the row is named as the run's own table names it
    assert "| plain (our loop) | 1.00 |" in text
    assert "| naive | **2.92 [" in text
    assert "| exact | 2.00 [2.00, 2.00] | 0 | 0% |" in text
    kept = [line for line in TEXT.splitlines() if "<!-- =" not in line and "| old" not in line]
    assert [line for line in kept if line not in text.splitlines()] == []
    assert refreshed(text, lambda _: run) == (text, [])


SPLIT = {"parts": {"split": {"lines": ["Asked.", "", "| part |", "|---|"]}}}
WRITTEN = {
    "sweep.md": "`command`\n\n| levels |\n|--:|\n| 1 |\n\n- exact: saturates.\n",
    "heads.md": "`command`\n\nAsked.\n\n| K |\n|--:|\n\nCells.\n\n- Best.\n\nEqual cost.\n",
    "overhead.json": json.dumps(SPLIT),
}


def test_tables_that_a_study_wrote_are_taken_over_without_its_command(tmp_path: Path) -> None:
    for name, text in WRITTEN.items():
        (tmp_path / "runs" / "study").mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / "study" / name).write_text(text)
    marked = "".join(
        f"<!-- study: {kind} -->\nold\n<!-- end -->\n\n" for kind in ("sweep", "grid", "split")
    )
    text, changes = refreshed(marked, pytest.fail, tmp_path / "runs")
    assert len(changes) == 3
    assert text.split("<!-- end -->\n\n") == [
        "<!-- study: sweep -->\n| levels |\n|--:|\n| 1 |\n\n- exact: saturates.\n",
        "<!-- study: grid -->\n| K |\n|--:|\n\nCells.\n\n- Best.\n",
        "<!-- study: split -->\n| part |\n|---|\n",
        "",
    ]
    assert refreshed(text, pytest.fail, tmp_path / "runs") == (text, [])


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("sweep", "study/sweep.md cannot be read"),
        ("grid", "study/heads.md has 1 paragraphs, expected at least 5"),
        ("votes", "study/overhead.json holds no part votes"),
    ],
)
def test_tables_that_are_not_there_are_refused(tmp_path: Path, kind: str, told: str) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "heads.md").write_text("another text")
    (tmp_path / "study" / "overhead.json").write_text(WRITTEN["overhead.json"])
    with pytest.raises(UserError) as refused:
        refreshed(f"<!-- study: {kind} -->\n<!-- end -->\n", pytest.fail, tmp_path)
    assert told in str(refused.value)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["word", "1.5 [1, 2]", "`code`", "\n", "| cell |"]), max_size=6))
def test_text_without_markers_is_left_alone(parts: list[str]) -> None:
    text = " ".join(parts)
    assert refreshed(text, pytest.fail) == (text, [])


@pytest.mark.parametrize("name", QUANTITIES)
def test_every_quantity_is_told_by_some_measured_run(repository: Path, name: str) -> None:
    folder = "komtbench" if name != "over_generate" else "mtbench-default"
    told = quantity(read_run(repository / "results" / folder), "naive", name)
    assert told[0].isdecimal()
    assert told != "-"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a <!-- =run naive speed -->1<!-- -->", "line 1, marker 'run naive speed': no quantity"),
        ("a <!-- =run js tau -->1<!-- -->", "has no row 'js'; it has plain, exact, naive"),
        ("a <!-- =run exact cost -->1<!-- -->", "has no cost of exact"),
        ("a <!-- =run naive over_generate -->1<!-- -->", "has no over_generate of naive"),
        ("\nb <!-- =run naive tau -->1", "line 2: '<!-- =' is no whole marker"),
        ("b 1<!-- --> c", "line 1: '<!-- -->' is no whole marker"),
        ("<!-- run: table -->\n| a |\n", "line 1: '<!-- run: table -->' is no whole marker"),
        ("a\n<!-- end -->", "line 2: '<!-- end -->' is no whole marker"),
        (
            "<!-- run: table -->\n<!-- run: costs -->\n<!-- end -->",
            "line 1: '<!-- run: table -->' is no whole marker",
        ),
        (
            "<!-- run: table -->\n| <!-- =run naive tau -->1<!-- --> |\n<!-- end -->",
            "is no whole marker",
        ),
        ("<!-- run: pie -->\n<!-- end -->", "no table 'pie'; there are table, costs"),
        ("a\n<!-- =run naive tau -->1<!-- -->", "line 2: a marker that begins a line"),
        ("- <!-- =run naive tau -->1<!-- -->", "line 1: a marker that begins a line"),
    ],
)
def test_markers_that_say_nothing_are_refused_with_their_line(
    run: StoredRun, text: str, told: str
) -> None:
    with pytest.raises(UserError) as refused:
        refreshed(text, lambda _: run)
    assert told in str(refused.value)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: StoredRun) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.md").write_text(TEXT)
    (tmp_path / "b.md").write_text("tau <!-- =run exact tau -->2.00 [2.00, 2.00]<!-- -->")
    return tmp_path


def test_a_check_tells_what_differs_and_changes_nothing(
    place: Path, load_script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    main = load_script("update_readme").main
    assert cli.run_command(main, ["a.md", "b.md", "--check"]) == 1
    out, err = capsys.readouterr()
    assert "a.md, line 7, run naive tau alone: '9.99' is now '2.92'" in out
    assert "b.md" not in out
    assert "update_readme.py" in err
    assert (place / "a.md").read_text() == TEXT
    assert cli.run_command(main, ["a.md", "b.md"]) == 0
    assert cli.run_command(main, ["a.md", "b.md", "--check"]) == 0
    assert "-->2.92<!-- -->" in (place / "a.md").read_text()


def test_one_bad_text_leaves_all_as_they_are(
    place: Path, load_script: Any, refused_in_one_line: Any
) -> None:
    main = load_script("update_readme").main
    (place / "b.md").write_text("tau <!-- =nowhere exact tau -->2<!-- -->")
    told = "b.md, line 1, marker 'nowhere exact tau': results/nowhere: no such folder"
    refused_in_one_line(main, ["a.md", "b.md"], told)
    assert (place / "a.md").read_text() == TEXT
    refused_in_one_line(main, ["c.md"], "c.md cannot be read")


def test_the_repositorys_own_texts_say_what_its_runs_say(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    load_script: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(repository)
    code = cli.run_command(load_script("update_readme").main, ["--check"])
    assert (code, capsys.readouterr().out) == (0, "")


def test_the_readmes_figure_draws_what_its_runs_say(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)

    def numbers(text: str) -> Any:
        return json.loads(text, parse_float=lambda number: round(float(number), 6))

    drawn = numbers(Path("results/overview/compare.json").read_text(encoding="utf-8"))
    runs = [read_run(Path(each["folder"])) for each in drawn["runs"]]
    assert numbers(as_json([(run, numbers_of(run)) for run in runs], [])) == drawn
    assert "results/overview/bars.png" in Path("README.md").read_text(encoding="utf-8")
