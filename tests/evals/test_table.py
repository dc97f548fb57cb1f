"""The summary's numbers and what the table says about them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from eval_fakes import EOS, make_row, spec

from eagle_dropmatch.evals.records import QuestionResult
from eagle_dropmatch.evals.summary import first_difference, summarise
from eagle_dropmatch.evals.table import (
    WIDTH,
    as_json,
    header_cells,
    markdown,
    notes,
    plain_table,
    terminal_text,
    wrap,
)

SPECS = [
    spec("plain"),
    spec("hf"),
    spec("exact"),
    spec("naive-seed0", group="naive", lossy=True, seed=0),
    spec("naive-seed1", group="naive", lossy=True, seed=1),
]
HEADER = ["mt_bench: 3 questions", "target x; " + "a very long line " * 12]


def result(qid, ids, *, step, seconds, decode=True, relaxed=0) -> QuestionResult:
    return QuestionResult(
        question_id=qid,
        output_ids=(tuple(ids),),
        rows=(make_row(ids, 5, step, relaxed=relaxed),),
        wall_seconds=seconds,
        prefill_seconds=0.1 if decode else None,
        decode_seconds=seconds - 0.1 if decode else None,
        repeats_wall_seconds=(seconds,),
        log_probability=-0.5 * len(ids) - relaxed,
        strays=((0.25, 2),) * relaxed,
    )


def results_of(questions=3):
    """Plain: 10 tokens a second. exact: steps of 3 at 20. naive: one token longer, steps of 4."""
    table = {s.name: {} for s in SPECS}
    for qid in range(questions):
        ids = [*range(50, 50 + 12 + qid), EOS]
        changed = [*ids[:4], 99, *ids[4:]]
        n = len(ids)
        table["plain"][qid] = result(qid, ids, step=1, seconds=n / 10)
        table["hf"][qid] = result(qid, ids, step=1, seconds=n / 8, decode=False)
        table["exact"][qid] = result(qid, ids, step=3, seconds=n / 20)
        table["naive-seed0"][qid] = result(qid, changed, step=4, seconds=(n + 1) / 30, relaxed=1)
        table["naive-seed1"][qid] = result(qid, ids, step=4, seconds=n / 30, relaxed=1)
    return table


def rows_of(summary):
    return {row.group: row for row in summary.rows}


def test_rows_are_the_arms_with_mask_seeds_pooled():
    summary = summarise(SPECS, results_of())
    assert [row.group for row in summary.rows] == ["plain", "hf", "exact", "naive"]
    assert summary.turns == 3


def test_numbers_of_a_row():
    rows = rows_of(summarise(SPECS, results_of()))
    exact = rows["exact"]
    # 12, 13, 14 tokens after the prefill's, in steps of 3: 4, 5, 5 steps.
    assert exact.tau.value == pytest.approx(39 / 14)
    assert exact.tokens_per_second == pytest.approx(20.0)
    assert exact.seconds_per_question == pytest.approx(42 / 20 / 3)
    assert exact.decode_tokens_per_second == pytest.approx(39 / (42 / 20 - 0.3))
    assert exact.speedup["plain"].value == pytest.approx(2.0)
    assert exact.speedup["hf"].value == pytest.approx(2.5)
    assert exact.strict_tau == pytest.approx(exact.tau.value)
    assert exact.relaxed_share == 0.0
    assert exact.mean_question_speed == pytest.approx(20.0)
    assert rows["plain"].tau.value == 1.0
    assert "plain" not in rows["plain"].speedup
    assert rows["hf"].decode_tokens_per_second is None


def test_the_wall_ratio_charges_a_lossy_rule_for_longer_answers():
    naive = rows_of(summarise(SPECS, results_of()))["naive"]
    assert naive.speedup["plain"].value == pytest.approx(3.0)
    # Per question and seed: plain takes 14 tokens / 10 on average, naive 14.5 / 30.
    assert naive.wall_ratio["plain"].value == pytest.approx((14 / 10) / (14.5 / 30))


def test_a_lossy_row_is_compared_with_exact_on_the_same_questions():
    (comparison,) = summarise(SPECS, results_of()).comparisons
    assert comparison.group == "naive"
    assert set(comparison.tau_ratio_by_seed) == {0, 1}
    told = comparison.difference
    assert (told.questions, told.differing) == (6, 3)
    assert told.first_difference == 4
    assert told.length_ratio == pytest.approx(43.5 / 42)
    assert comparison.tau_ratio.value > 1.0


def test_only_questions_that_every_arm_answered_count():
    results = results_of()
    del results["hf"][1]
    summary = summarise(SPECS, results)
    assert summary.question_ids == (0, 2)
    assert rows_of(summary)["exact"].tau.value == pytest.approx(26 / 9)


@pytest.mark.parametrize(
    ("mine", "other", "place"),
    [
        ([[1, 2, 3]], [[1, 2, 3]], None),
        ([[1, 2, 3]], [[1, 9, 3]], 1),
        ([[1, 2]], [[1, 2, 3]], 2),
        ([[1], [5, 6]], [[1], [5, 7]], 1),
    ],
)
def test_the_first_difference(mine, other, place):
    assert first_difference(mine, other) == place


def test_the_table_fits_the_terminal_and_says_what_matters():
    text = terminal_text(summarise(SPECS, results_of()), HEADER)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    flat = " ".join(text.split())
    assert "label naive" in flat
    assert "2 mask seeds" in flat
    assert "naive is lossy" in flat
    assert "3 of 6 differ from exact's, first at token 4.0 on average" in flat
    assert "exact gives the same answers as transformers' generate on 3 of 3 questions." in flat
    assert "2.5% of the tokens are not its argmax" not in flat
    assert "to these it gives probability 0.250 in the median" in flat
    assert "rank 2 behind the argmax" in flat
    assert "BCa bootstrap over questions" in flat


def test_the_widest_real_table_fits_100_columns():
    labels = ["plain (our loop)", "transformers'\ngenerate", "EAGLE-3 exact", "EAGLE-3 + naive"]
    specs = [s._replace(label=label) for s, label in zip(SPECS[:4], labels, strict=True)]
    results = results_of()
    for arm in results.values():
        for qid, answer in arm.items():
            seconds = answer.wall_seconds * 130
            arm[qid] = QuestionResult(
                **{**vars(answer), "wall_seconds": seconds, "repeats_wall_seconds": (seconds,)}
            )
    text = terminal_text(summarise(specs, results), [])
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= WIDTH


def test_without_rich_the_same_cells_are_printed(monkeypatch):
    summary = summarise(SPECS, results_of())
    with_rich = terminal_text(summary, HEADER)
    for name in [n for n in sys.modules if n.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    without = terminal_text(summary, HEADER)
    assert max(len(line) for line in without.splitlines()) <= WIDTH
    strip = str.maketrans("", "", "─-")
    assert without.translate(strip).split() == with_rich.translate(strip).split()


def test_plain_columns_are_aligned():
    lines = plain_table(["", "tau\n(95%)"], [["a", "1.00"], ["longer", "12.00\n1-2"]]).split("\n")
    assert lines == [
        "          tau",
        "        (95%)",
        "-------------",
        "a        1.00",
        "longer  12.00",
        "          1-2",
    ]


def test_the_interval_stands_in_the_cell_of_its_number():
    text = markdown(summarise(SPECS, results_of()), HEADER)
    row = next(line for line in text.splitlines() if line.startswith("| label exact"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1].startswith("2.79 2.")
    assert cells[4] == "-0.50"
    assert cells[5] == "20.0"
    assert cells[7] == "2.00 2.00-2.00"
    assert len(cells) == len(header_cells(["plain", "hf"]))


def test_one_question_has_numbers_and_no_intervals():
    summary = summarise(SPECS, results_of(questions=1))
    text = terminal_text(summary, [])
    assert "No intervals: they need at least two questions." in text
    assert "too few questions for an interval" in text


def test_a_ratio_whose_interval_holds_one_is_no_difference():
    results = results_of()
    results["naive-seed0"] = results["naive-seed1"] = results["exact"]
    told = " ".join(terminal_text(summarise(SPECS, results), []).split())
    assert "tau ratio 1.000 [1.000, 1.000]: no difference shown" in told
    assert "0 of 6 differ from exact's, length ratio 1.00." in told


def test_json_holds_every_number_and_null_for_none():
    results = results_of(questions=1)
    for s in SPECS:
        results[s.name][0] = result(0, [EOS], step=1, seconds=1.0)
    content = json.loads(as_json(summarise(SPECS, results), HEADER))
    assert content["header"] == HEADER
    by_group = {row["group"]: row for row in content["rows"]}
    assert by_group["exact"]["tau"] == {"value": None, "interval": None}
    assert by_group["exact"]["tokens_per_second"] == 1.0
    assert content["comparisons"][0]["group"] == "naive"


def test_arms_can_be_left_out():
    specs = [spec("exact")]
    summary = summarise(specs, {"exact": results_of()["exact"]})
    assert summary.comparisons == ()
    assert "x over" not in terminal_text(summary, [])


def test_long_lines_are_wrapped_and_indented():
    assert wrap("word " * 30)[1].startswith("  word")
    assert wrap("") == [""]


@pytest.mark.parametrize(("seed", "told"), [(None, False), (7, False)])
def test_one_seed_or_none_is_not_counted(seed, told):
    specs = [spec("exact"), spec("margin", lossy=True, seed=seed)]
    results = {name: results_of()["exact"] for name in ("exact", "margin")}
    assert ("mask seeds" in terminal_text(summarise(specs, results), HEADER)) is told


@pytest.mark.parametrize(("share", "explained"), [(0.5, True), (1.0, False)])
def test_a_draft_that_cannot_say_the_answers_is_named_as_a_reason(share, explained):
    results = results_of()
    for mine in results.values():
        for qid, each in mine.items():
            mine[qid] = replace(each, covered=int(share * each.output_tokens))
    summary = summarise(SPECS, results)
    assert rows_of(summary)["exact"].coverage == pytest.approx(share, abs=0.05)
    (told,) = [note for note in notes(summary) if "vocabulary holds" in note]
    assert "of the tokens of exact's answers" in told
    assert ("tau is low for that" in told) is explained


def test_runs_that_did_not_record_coverage_say_nothing_of_it():
    summary = summarise(SPECS, results_of())
    assert rows_of(summary)["exact"].coverage is None
    assert not [note for note in notes(summary) if "vocabulary holds" in note]
