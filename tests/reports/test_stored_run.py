"""A run read back from its folder: the numbers of its table, or one line why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stored_runs import write_run

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals.table import markdown
from eagle_dropmatch.reports.marked_text import costs_table
from eagle_dropmatch.reports.rule_numbers import numbers_of
from eagle_dropmatch.reports.stored_run import read_run


@pytest.mark.parametrize(
    "name", ["mtbench-default", "mtbench-naive", "rules-front", "controls", "drafters-komtbench"]
)
def test_a_measured_run_gives_its_own_table_again(repository: Path, name: str) -> None:
    """Runs of both formats, with mask seeds, expressions and controls."""
    folder = repository / "results" / name
    lines = [line for line in markdown(read_run(folder).summary, []).splitlines() if line]
    told = (folder / "table.md").read_text().splitlines()
    assert len(lines) > 5
    assert [line for line in lines if line not in told] == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("drafters-mtbench", ["EAGLE-3 exact", "EAGLE-3 + naive", "SD, exact", "SD + dropmatch"]),
        ("mtbench-default", ["exact", "naive"]),
    ],
)
def test_two_kinds_of_drafts_are_told_apart_by_the_names(
    repository: Path, name: str, told: list[str]
) -> None:
    run = read_run(repository / "results" / name)
    assert [run.name_of(row) for row in run.summary.rows if row.drafting] == told
    assert [each.name for each in numbers_of(run)] == told
    assert [line.split(" | ")[0] for line in costs_table(run)[2:]] == [f"| {each}" for each in told]


def test_reading_changes_no_file_even_where_a_line_is_half_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finished=False)
    file = run / "answers-naive.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    before = {path: path.read_bytes() for path in run.iterdir()}
    found = read_run(run, partial=True)
    assert found.summary.question_ids == (0, 1, 2)
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_an_unfinished_run_says_what_it_lacks(tmp_path: Path) -> None:
    answered = {"plain": 3, "exact": 2, "naive": 0}
    run = write_run(tmp_path / "run", finished=False, answered=answered)
    with pytest.raises(UserError, match=r"is not finished.*--partial"):
        read_run(run)
    found = read_run(run, partial=True)
    assert found.title == ("mt_bench, run: 2 questions (unfinished: 2 of 4 questions, 2 of 3 arms)")
    assert [row.group for row in found.summary.rows] == ["plain", "exact"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no run\.json, so it is not a run"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"format": 1}')
    with pytest.raises(UserError, match="not of format 2 or 3"):
        read_run(tmp_path)


def test_arms_with_different_questions_are_not_paired(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", answered={"naive": 3})
    with pytest.raises(UserError, match=r"arm naive has answers to 3 of the run's 4 questions"):
        read_run(run)
    empty = write_run(tmp_path / "empty", finished=False, answered={"exact": 2, "naive": 0})
    (empty / "answers-plain.jsonl").write_text("")
    file = empty / "answers-exact.jsonl"
    file.write_text("")
    with pytest.raises(UserError, match="no question has been answered by every arm"):
        read_run(empty, partial=True)


def test_a_lossy_rule_without_its_quality_is_refused(tmp_path: Path) -> None:
    alone = write_run(tmp_path / "alone", arms=("plain", "naive"))
    with pytest.raises(UserError, match="naive is lossy, and without exact"):
        read_run(alone)
    run = write_run(tmp_path / "run")
    file = run / "answers-naive.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    del records[1]["choices"][0]["log_probability"]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(UserError, match=r"no log_probability for question 1.*measure again"):
        read_run(run)


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    file = run / "answers-exact.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    del records[2]["choices"][0]["wall_time"]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(UserError, match=r"record of question 2 cannot be read.*wall_time"):
        read_run(run)
