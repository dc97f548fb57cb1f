"""The agreement curve: what its extremes must be, and that it falls as dropout grows."""

from __future__ import annotations

import pytest
import rig

from eagle_dropmatch.studies.agreement import COLUMNS, Setting, markdown, measure


@pytest.fixture(scope="module")
def rows():
    settings = [Setting(p_drop=p) for p in (0.0, 0.05, 0.3, 0.7)] + [
        Setting(head_agreement=share) for share in (1.0, 0.8)
    ]
    return measure(
        rig.tiny_target(), rig.prompts(20, 31), settings, heads=5, max_new_tokens=12, stop_ids=()
    )


def test_without_dropout_every_head_is_the_clean_one(rows):
    row = rows[0]
    shares = (row.prompt_agreement, row.answer_agreement, row.unanimous, row.clean_in_set)
    assert shares == (1.0, 1.0, 1.0, 1.0)
    assert row.mean_set_size == 1.0
    assert row.mean_p_drop == 0.0
    assert all(q != q for q in row.other_probability)  # no other pick: nothing to take quartiles of


def test_agreement_falls_and_the_set_grows_with_the_rate(rows):
    fixed = rows[:4]
    agreement = [row.answer_agreement for row in fixed]
    assert agreement == sorted(agreement, reverse=True)
    assert agreement[0] > agreement[-1]
    sizes = [row.mean_set_size for row in fixed]
    assert sizes == sorted(sizes)
    for row in fixed:
        assert row.unanimous <= row.answer_agreement <= row.clean_in_set


def test_a_solved_rate_reaches_its_agreement_on_the_prompts(rows):
    strict, loose = rows[4:]
    assert strict.mean_p_drop < loose.mean_p_drop <= 0.3
    assert loose.prompt_agreement == pytest.approx(0.8, abs=0.15)


def test_the_table_has_a_line_for_every_setting(rows):
    lines = markdown(rows, ["header"]).splitlines()
    assert len(lines) == 4 + len(rows)
    assert all(line.count("|") == len(COLUMNS) + 1 for line in lines[2:])
    assert "auto, head_agreement 0.8" in lines[-1]
