"""The sweep over all rules: every expression is a rule, and the figures hold what was measured."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from eval_fakes import EOS, make_row, spec

from eagle_dropmatch import figures
from eagle_dropmatch.acceptors import ACCEPTORS, make_acceptor, parts
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals.records import QuestionResult
from eagle_dropmatch.evals.summary import Summary, summarise
from eagle_dropmatch.figures import require_matplotlib
from eagle_dropmatch.studies import rule_sweep
from eagle_dropmatch.studies.equal_cost import as_markdown, equal_cost
from eagle_dropmatch.studies.rule_sweep import SWEEP, draw, report

CURVES = {"margin": ["margin(kappa=0.5)", "margin(kappa=0.2)"], "never run": ["top_k"]}


def summary(questions: int = 4) -> Summary:
    specs = [spec("exact"), *(spec(rule, lossy=True) for rule in CURVES["margin"])]
    results = {}
    for number, each in enumerate(specs):
        results[each.name] = {}
        for qid in range(questions):
            ids = [*range(50, 70 + qid), EOS]
            results[each.name][qid] = QuestionResult(
                question_id=qid,
                output_ids=(tuple(ids),),
                rows=(make_row(ids, 5, 2 + number, relaxed=number),),
                wall_seconds=1.0,
                prefill_seconds=0.1,
                decode_seconds=0.9,
                repeats_wall_seconds=(1.0,),
                log_probability=-(0.5 + 0.1 * number + 0.02 * qid) * len(ids),
                strays=((0.2, 1),) * number,
            )
    return summarise(specs, results)


def test_the_sweep_holds_every_lossy_rule_and_nothing_that_cannot_be_built() -> None:
    expressions = list(chain.from_iterable(SWEEP.values()))
    assert len(set(expressions)) == len(expressions)
    built = [make_acceptor(expression) for expression in expressions]
    assert not any(rule.lossless for rule in built)
    swept = {part.name for rule in built for part in parts(rule)}
    assert swept >= {name for name, rule in ACCEPTORS.items() if not rule.lossless}


def test_figures_are_drawn_with_a_panel_for_each_measured_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    kept = rule_sweep._curve
    monkeypatch.setattr(
        rule_sweep, "_curve", lambda *args: (drawn.append(args[1:]), kept(*args))[1]
    )
    draw(summary(), tmp_path, CURVES)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"rules-{kind}.{ending}" for kind in ("cost", "relaxed") for ending in ("pdf", "png")
    ]
    assert [key for _, key in drawn] == ["relaxed", "cost"]
    points, _ = drawn[1]
    assert [point["tau"] for point in points] == sorted(point["tau"] for point in points)
    assert [point["cost"] for point in points] == pytest.approx([0.1, 0.2])
    low, high = points[0]["cost_interval"]
    assert low <= 0.1 + 1e-9
    assert high >= 0.1 - 1e-9


def test_one_question_has_points_without_bars(tmp_path: Path) -> None:
    draw(summary(questions=1), tmp_path, CURVES)
    assert (tmp_path / "rules-cost.png").stat().st_size > 0


def test_without_matplotlib_it_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install eagle-dropmatch\[plot\]"):
        require_matplotlib()


def test_rules_are_compared_where_they_cost_the_same() -> None:
    found = equal_cost(summary(), {**CURVES, "loose": ["margin(kappa=0.2)"]}, (0.05, 0.3), "margin")
    # Costs are 0, 0.1 and 0.2 nats a token with taus t0 < t1 < t2: halfway to the first setting,
    # and a quarter of the way to the second where the first was not measured.
    taus = {row.group: row.tau.value for row in summary().rows}
    t0, t1, t2 = taus["exact"], taus["margin(kappa=0.5)"], taus["margin(kappa=0.2)"]
    by_curve = {row.curve: row for row in found}
    assert set(by_curve) == {"margin", "loose"}  # no curve reaches 0.3
    assert by_curve["margin"].tau.value == pytest.approx((t0 + t1) / 2)
    assert by_curve["loose"].tau.value == pytest.approx(t0 + (t2 - t0) / 4)
    assert by_curve["margin"].against == (pytest.approx(1), None)
    for row in found:
        interval = row.tau.interval
        assert interval is not None
        assert interval.low <= row.tau.value <= interval.high
    assert [row.tau.value for row in found] == sorted(row.tau.value for row in found)[::-1]


def test_a_curve_beyond_the_references_end_is_compared_with_nothing() -> None:
    curves = {"short": ["margin(kappa=0.5)"], "long": CURVES["margin"]}
    text = as_markdown(equal_cost(summary(), curves, (0.15,), "short"), "short")
    assert "| long | " in text
    assert " | - |" in text
    assert "short |" not in text.splitlines()[-2]


def test_the_report_prints_what_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(summary(), tmp_path, CURVES)
    written = (tmp_path / "equal-cost.md").read_text(encoding="utf-8")
    assert written in capsys.readouterr().out
    assert "**At 0.1 nats a token below exact**" in written
    assert "| margin | " in written
