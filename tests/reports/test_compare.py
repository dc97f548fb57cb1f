"""Pictures of finished runs: what they draw, in numbers, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_runs import write_run, write_sweep

from eagle_dropmatch.evals.records import QuestionResult
from eagle_dropmatch.evals.statistics import Estimate, Interval
from eagle_dropmatch.figures import EXACT_STYLE, SMALLEST, STYLES
from eagle_dropmatch.reports import bar_figure, cost_figure, histogram_figure, sweep_figure
from eagle_dropmatch.reports.compare import compare
from eagle_dropmatch.reports.rule_numbers import RuleNumbers, acceptance, numbers_of
from eagle_dropmatch.reports.stored_run import read_run
from eagle_dropmatch.reports.stored_sweep import read_sweep
from eagle_dropmatch.stats import RowStats, conditional_acceptance


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def by_rule(folder: Path) -> dict[str, Any]:
    (run,) = json.loads((folder / "compare.json").read_text())["runs"]
    return {rule["rule"]: rule for rule in run["rules"]}


def test_numbers_drawn_are_those_of_the_records(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("plain", "exact", "naive", "margin(kappa=0.5)"))
    compare([run], tmp_path / "out")
    wanted = {f"{name}.{end}" for name in ("bars", "histogram", "cost") for end in ("png", "pdf")}
    assert names(tmp_path / "out") == wanted | {"compare.md", "compare.json"}
    rules = by_rule(tmp_path / "out")
    assert list(rules) == ["exact", "naive", "margin(kappa=0.5)"]
    # 24, 26, 28, 30 tokens in steps of 3: 8 + 9 + 10 + 10 of them.
    assert rules["naive"]["tau"]["value"] == pytest.approx(108 / 37)
    assert rules["naive"]["cost"]["value"] == pytest.approx(0.1)
    assert rules["naive"]["baseline"] == "plain"
    # Every step takes a tenth of a second, and the prefill gives one token more a question.
    assert rules["naive"]["speed"]["value"] == pytest.approx(108 / 37)
    shares = [each["value"] for each in rules["naive"]["shares"]]
    assert shares == pytest.approx([1 / 37, 1 / 37, 35 / 37])
    conditional = [each["value"] for each in rules["naive"]["conditional"]]
    assert conditional == pytest.approx([36 / 37, 35 / 36])


def test_without_plain_speed_is_over_exact_and_without_both_none_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare([write_run(tmp_path / "a", ("exact", "naive"))], tmp_path / "out")
    rules = by_rule(tmp_path / "out")
    assert {rule["baseline"] for rule in rules.values()} == {"exact"}
    assert rules["exact"]["speed"] == {"value": 1.0, "interval": [1.0, 1.0]}
    assert rules["naive"]["speed"]["value"] > 1.3
    run = write_run(tmp_path / "b", ("exact",))
    header = json.loads((run / "run.json").read_text())
    header["arguments"]["trees"] = ["auto"]
    (run / "run.json").write_text(json.dumps(header))
    (run / "answers-exact.jsonl").rename(run / "answers-exact-auto.jsonl")
    compare([run], tmp_path / "out")
    assert by_rule(tmp_path / "out")["exact-auto"]["speed"] is None
    told = capsys.readouterr().out
    assert "b: no plain arm and no exact arm, so no speed is drawn" in told
    assert "no cost figure: no run has a lossy rule" in told


def rule(name: str, tau: float, cost: float | None) -> RuleNumbers:
    """A rule's numbers with intervals of a tenth to both sides."""

    def around(value: float) -> Estimate:
        return Estimate(value, Interval(value - 0.1, value + 0.1))

    return RuleNumbers(
        rule=name,
        name=name,
        lossy=name != "exact",
        tau=around(tau),
        strict_tau=tau,
        relaxed_share=0.1,
        speed=around(tau / 2),
        baseline="plain",
        cost=None if cost is None else around(cost),
        shares=(around(0.5), around(0.5)),
        conditional=(around(0.5),),
        on_front=False,
    )


def figure_of(module: Any, draw: Any, blocks: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The figure that would be saved, laid out."""
    kept: list[Any] = []
    monkeypatch.setattr(module, "save_figure", lambda figure, *_: kept.append(figure))
    draw(blocks, Path())
    (figure,) = kept
    figure.canvas.draw()
    return figure


def texts(figure: Any) -> list[Any]:
    """All letters of the panels; of an axis' ticks those within its ends."""
    from matplotlib.text import Text

    found = [each for each in figure.findobj(Text) if each.axes is not None]
    for panel in figure.axes:
        for axis, (low, high) in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, panel.get_ylim())):
            low, high = sorted((low, high))
            ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
            found += [label for place, label in ticks if low <= place <= high]
    return [each for each in found if each.get_visible() and each.get_text().strip()]


LONG = ("any_of(naive(K=3, p_drop=0.1), all_of(margin(kappa=0.5), floor(floor=1e-3)))", "naive")


@pytest.mark.parametrize("count", [2, 12])
def test_no_label_of_the_bars_lies_on_another_or_is_too_small(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    rules = [rule("exact", 2.5, 0.0), *(rule(name, 2.9, 0.1) for name in LONG)]
    rules += [rule(f"top_k(k={k})", 2 + 0.2 * k, 0.1 * k) for k in range(2, count - 1)]
    blocks = {"one run": rules[:count], "another": rules[:2]}
    figure = figure_of(bar_figure, bar_figure.draw_bars, blocks, monkeypatch)
    shown = texts(figure)
    assert min(each.get_fontsize() for each in shown) >= SMALLEST
    boxes = [(each.get_text(), each.get_window_extent()) for each in shown]
    assert len(boxes) > 4 * count
    over = [
        (a, b)
        for i, (a, one) in enumerate(boxes)
        for b, other in boxes[i + 1 :]
        if one.width and other.width and one.overlaps(other)
    ]
    assert over == []
    width, height = figure.get_size_inches() * figure.dpi
    assert all(
        box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1
        for _, box in boxes
    )


def test_panels_of_histograms_keep_their_letters_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [rule("exact", 2.5, 0.0), *(rule(f"top_k(k={k})", 3, 0.1) for k in range(2, 8))]
    blocks = {"mt_bench, a folder's name: 40 questions": rules, "short": rules[:2]}
    draw = histogram_figure.draw_histograms
    figure = figure_of(histogram_figure, draw, blocks, monkeypatch)
    shown = texts(figure)
    assert min(each.get_fontsize() for each in shown) >= SMALLEST
    panels = [panel for panel in figure.axes if panel.get_visible()]
    assert len(panels) == 2 * 7
    titles = [panel.title.get_window_extent() for panel in panels if panel.get_title()]
    assert len(titles) == 7
    assert not any(a.overlaps(b) for i, a in enumerate(titles) for b in titles[i + 1 :])
    assert not any(a.overlaps(panel.bbox) for a in titles for panel in panels)


def test_families_beyond_what_eyes_can_tell_apart_have_panels_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = [rule("exact", 2.5, 0.0), rule("top_k(k=2)", 3.0, 0.1), rule("top_k(k=3)", 3.3, 0.2)]
    many = [few[0], *(rule(f"rule_{n}(t=1)", 3.0, 0.1 * n) for n in range(len(STYLES) + 1))]
    figure = figure_of(cost_figure, cost_figure.draw_costs, {"few": few, "many": many}, monkeypatch)
    titles = [panel.get_title() for panel in figure.axes if panel.get_visible()]
    assert titles == ["few", *(f"many\nrule_{n}" for n in range(len(STYLES) + 1))]


def test_styles_differ_in_colour_marker_dashes_and_hatch() -> None:
    for part in zip(*STYLES, EXACT_STYLE, strict=True):
        assert len(set(map(str, part))) == len(STYLES) + 1


points = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(points)
def test_the_front_is_what_brute_force_finds(found: list[tuple[int, int]]) -> None:
    from eagle_dropmatch.reports.rule_numbers import _on_front

    rules = [rule(f"r{i}", tau, cost) for i, (cost, tau) in enumerate(found)]
    for each, (cost, tau) in zip(rules, found, strict=True):
        beaten = any((c < cost and t >= tau) or (c <= cost and t > tau) for c, t in found)
        assert _on_front(each, rules) is not beaten


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=9), min_size=2, max_size=5))
def test_acceptance_is_that_of_all_steps_pooled(lengths: list[list[int]]) -> None:
    pool = []
    for qid, each in enumerate(lengths):
        zeros = [0] * len(each)
        row = RowStats(each, each, zeros, zeros, 3, 1 + sum(each), "stop")
        pool.append([QuestionResult(qid, ((1,),), (row,), 1.0, None, None, (1.0,), -1.0, ())])
    shares, conditional = acceptance(pool)
    counts = np.bincount([n - 1 for each in lengths for n in each]).tolist()
    assert [each.value for each in shares] == pytest.approx([n / sum(counts) for n in counts])
    assert [each.value for each in conditional] == pytest.approx(conditional_acceptance(counts))
    for each in (*shares, *conditional):
        assert each.interval is None or 0 <= each.interval.low <= each.interval.high <= 1


def test_exact_on_other_trees_is_lossless_and_has_no_cost(repository: Path) -> None:
    found = numbers_of(read_run(repository / "results" / "tree-budget"))
    assert {each.family for each in found} == {"exact"}
    assert {each.cost for each in found} == {None}
    assert not any(each.on_front for each in found)


def test_a_stopped_comparison_leaves_the_old_pictures_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run")
    compare([run], tmp_path / "out", ["bars"])
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    from matplotlib.figure import Figure

    def stop(self: Any, file: Any, **_: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", stop)
    with pytest.raises(KeyboardInterrupt):
        compare([run], tmp_path / "out", ["bars"])
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("lossy", [True, False])
def test_the_papers_lossy_curve_stands_only_beside_its_quality(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lossy: bool
) -> None:
    sweep = write_sweep(tmp_path / "sweep", {1: 2, 2: 3})
    rows = json.loads((sweep / "sweep.json").read_text())
    kept = [row for row in rows if lossy or row["rule"] == "exact"]
    (sweep / "sweep.json").write_text(json.dumps(kept))
    figure = figure_of(sweep_figure, sweep_figure.draw_sweeps, [read_sweep(sweep)], monkeypatch)
    drawn = [[line.get_label() for line in panel.get_lines()] for panel in figure.axes]
    assert len(drawn) == (4 if lossy else 2)
    for papers in drawn[1::2]:
        assert papers == (["EAGLE-3", "+ DropMatch"] if lossy else ["EAGLE-3"])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("nowhere", "nowhere: no such folder"),
        ("run run", "the same folder twice"),
        ("run --figures depth", "--figures depth: no folder of sweep_depth.py is given"),
        ("lossless --figures cost", "--figures cost: no run has a lossy rule"),
        ("run --figures pie", "invalid choice: 'pie'"),
        ("plain", "no arm that drafts"),
        ("", "required: RUN"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load_script: Any,
    refused_in_one_line: Any,
    flags: str,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    write_run(tmp_path / "lossless", ("plain", "exact"))
    write_run(tmp_path / "plain", ("plain",))
    refused_in_one_line(load_script("compare").main, flags.split(), told)
    assert not (tmp_path / "runs").exists()


def test_runs_of_one_name_are_told_apart_by_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_script: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for parent in ("a", "b"):
        write_run(tmp_path / parent / "run")
    titles: list[str] = []
    monkeypatch.setattr(
        "eagle_dropmatch.reports.compare.draw_bars", lambda blocks, _: titles.extend(blocks)
    )
    load_script("compare").main(["a/run", "b/run", "--figures", "bars"])
    assert titles == ["mt_bench, a/run: 4 questions", "mt_bench, b/run: 4 questions"]
