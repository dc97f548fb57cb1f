"""The final table: on the terminal, as Markdown and as JSON."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .plan import HF, PLAIN
from .statistics import CONFIDENCE, Estimate, Interval
from .summary import Difference, LossyComparison, Row, Summary

WIDTH = 100
"""Columns of a terminal that everything here fits into."""

BASELINE_NAMES = {PLAIN: "plain", HF: "generate"}

Cells = list[list[str]]
"""Rows of cells; a cell may hold two lines."""


def header_cells(baselines: Sequence[str]) -> list[str]:
    return [
        "",
        "tau\n(95%)",
        "strict\ntau",
        "relaxed\nshare",
        "log p\n/token",
        "tok/s",
        "decode\ntok/s",
        *(f"x over\n{BASELINE_NAMES[base]}" for base in baselines),
        "seconds/\nquestion",
    ]


def body_cells(summary: Summary, baselines: Sequence[str]) -> Cells:
    seeds = {c.group: len(c.tau_ratio_by_seed) for c in summary.comparisons}
    return [_row_cells(row, baselines, seeds.get(row.group, 1)) for row in summary.rows]


def baselines_of(summary: Summary) -> list[str]:
    return [row.group for row in summary.rows if row.group in BASELINE_NAMES]


def terminal_text(summary: Summary, header: Sequence[str]) -> str:
    """Header lines, the table and the notes, through rich if it is installed."""
    baselines = baselines_of(summary)
    columns, body = header_cells(baselines), body_cells(summary, baselines)
    try:
        table = _rich_table(columns, body)
    except ImportError:
        table = plain_table(columns, body)
    wrapped = [line for text in (*header, "") for line in wrap(text)]
    told = [line for text in notes(summary) for line in wrap(text)]
    return "\n".join([*wrapped, table, "", *told]) + "\n"


def markdown(summary: Summary, header: Sequence[str]) -> str:
    baselines = baselines_of(summary)
    columns, body = header_cells(baselines), body_cells(summary, baselines)
    lines = [f"- {text}" for text in header]
    lines.extend(["", *table_lines(columns, body), ""])
    lines.extend(f"- {text}" for text in notes(summary))
    return "\n".join(lines) + "\n"


def table_lines(columns: Sequence[str], body: Cells) -> list[str]:
    """A table in Markdown, the first column to the left and all others to the right."""
    head, *rows = (
        "| " + " | ".join(cell.replace("\n", " ") for cell in row) + " |"
        for row in [list(columns), *body]
    )
    return [head, "|" + "---|" + "--:|" * (len(columns) - 1), *rows]


def as_json(summary: Summary, header: Sequence[str]) -> str:
    """Every number of the summary; null where there is none."""
    content: dict[str, Any] = {"header": list(header), "confidence": CONFIDENCE, **asdict(summary)}
    return json.dumps(as_numbers(content), ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def notes(summary: Summary) -> list[str]:
    """What the numbers mean, and what a lossy rule did to the answers."""
    lines = []
    for group, told in summary.agreements:
        lines.append(_agreement_note(group, told))
    for comparison in summary.comparisons:
        lines.extend(_lossy_notes(comparison))
    lines.extend(_coverage_note(summary))
    lines.extend(
        f"steps by accepted draft tokens, {row.group}: {_histogram(row.histogram)}"
        for row in summary.rows
        if row.drafting
    )
    speeds = ", ".join(f"{row.group} {_number(row.mean_question_speed, 1)}" for row in summary.rows)
    lines.append(
        "tok/s is all output tokens / all seconds, prefill included; decode tok/s leaves the "
        f"prefill out. Mean of the questions' own tokens/s: {speeds}."
    )
    waits = ", ".join(
        f"{row.group} {_number(row.latency[0])} ({_number(row.latency[1])})"
        for row in summary.rows
        if row.latency is not None
    )
    if waits:
        lines.append(
            "Answers were written in a batch, and an answer's seconds are its shares of the "
            "batch's. Seconds from the reading of a prompt to its answer's end, in the median (and "
            f"at most for 90%): {waits}."
        )
    if any(row.repeat_speeds[0] != row.repeat_speeds[1] for row in summary.rows):
        spread = ", ".join(
            f"{row.group} {_number(row.repeat_speeds[0], 1)}-{_number(row.repeat_speeds[1], 1)}"
            for row in summary.rows
        )
        lines.append(f"Times are medians of repeats; tokens/s of single repeats: {spread}.")
    if len(summary.question_ids) > 1:
        lines.append("Intervals: 95%, BCa bootstrap over questions, both arms resampled together.")
    else:
        lines.append("No intervals: they need at least two questions.")
    return lines


def wrap(text: str, width: int = WIDTH) -> list[str]:
    """Lines of at most ``width``, the later ones indented."""
    import textwrap

    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False) or [""]


def plain_table(columns: Sequence[str], body: Cells) -> str:
    """Columns two spaces apart, the first to the left and all others to the right."""
    split = [[cell.split("\n") for cell in row] for row in [list(columns), *body]]
    widths = [max(len(line) for row in split for line in row[i]) for i in range(len(columns))]
    lines: list[str] = []
    for index, row in enumerate(split):
        height = max(len(cell) for cell in row)
        # The heading hangs down to the rule, the body up to the row's first line.
        fill = [[""] * (height - len(cell)) for cell in row]
        padded = [f + c if index == 0 else c + f for f, c in zip(fill, row, strict=True)]
        lines.extend(
            "  ".join(
                part.rjust(width) if i else part.ljust(width)
                for i, (part, width) in enumerate(zip(parts, widths, strict=True))
            ).rstrip()
            for parts in zip(*padded, strict=True)
        )
        if index == 0:
            lines.append("-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines)


def _rich_table(columns: Sequence[str], body: Cells) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(
            Text(column), justify="right" if index else "left", no_wrap=True, vertical="top"
        )
    for row in body:
        table.add_row(*(Text(cell) for cell in row))
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None, force_terminal=False).print(table)
    return out.getvalue().rstrip("\n")


def _row_cells(row: Row, baselines: Sequence[str], seeds: int) -> list[str]:
    decode = row.decode_tokens_per_second
    return [
        row.label if seeds <= 1 else f"{row.label}\n{seeds} mask seeds",
        *(
            [_with_interval(row.tau), _number(row.strict_tau), f"{100 * row.relaxed_share:.1f}%"]
            if row.drafting
            else [_number(row.tau.value), "-", "-"]
        ),
        _number(row.log_probability.value),
        _number(row.tokens_per_second, 1),
        "-" if decode is None else _number(decode, 1),
        *(_with_interval(row.speedup[base]) if base in row.speedup else "-" for base in baselines),
        _number(row.seconds_per_question),
    ]


SPARSE = 0.9
"""Coverage below which it is named as a reason for a low tau."""


def _coverage_note(summary: Summary) -> list[str]:
    """How much of the target's own answers the draft could have said, where one drafts."""
    drafting = [row for row in summary.rows if row.drafting and row.coverage is not None]
    if not drafting:
        return []
    row = drafting[0]
    assert row.coverage is not None
    told = (
        f"the draft's vocabulary holds {100 * row.coverage:.1f}% of the tokens of {row.group}'s "
        "answers"
    )
    if row.coverage < SPARSE:
        told += (
            "; every other token can come from the target alone and ends what a step accepts: tau "
            "is low for that, whatever the draft knows"
        )
    return [told + "."]


def _agreement_note(group: str, told: Difference) -> str:
    same = told.questions - told.differing
    note = (
        f"{_display(group)} gives the same answers as {_display(told.against)} on {same} of "
        f"{told.questions} questions"
    )
    if told.differing:
        note += (
            f" (first difference at token {_number(told.first_difference, 1)} on average; only "
            "near ties in 16-bit arithmetic explain one)"
        )
    return note + "."


def _lossy_notes(comparison: LossyComparison) -> list[str]:
    told = comparison.difference
    name = comparison.group
    if not comparison.drafting:
        return [
            f"{name}, plain sampling among the tokens that the rule would accept: "
            f"{_quality(comparison)}"
        ]
    place = (
        f"first at token {_number(told.first_difference, 1)} on average, "
        if told.first_difference is not None
        else ""
    )
    exact = comparison.against
    lines = [
        f"{name} is lossy: it accepts tokens that the target would not have chosen, so its answers "
        f"may differ from the target's. {told.differing} of {told.questions} differ from "
        f"{exact}'s, {place}length ratio {_number(told.length_ratio)}.",
        f"{name} / {exact}: tau ratio {_claim(comparison.tau_ratio)}; "
        f"tokens/s ratio {_claim(comparison.speed_ratio)}; {exact}'s seconds / {name}'s for the "
        f"same questions {_claim(comparison.wall_ratio)}.",
        f"{name}: {_quality(comparison)}",
    ]
    if len(comparison.tau_ratio_by_seed) > 1:
        by_seed = ", ".join(
            f"{seed}: {inline(estimate)}" for seed, estimate in comparison.tau_ratio_by_seed.items()
        )
        lines.append(f"tau ratio by mask seed: {by_seed}.")
    return lines


def _quality(comparison: LossyComparison) -> str:
    cost = _claim(comparison.log_probability_cost, 0.0, f" nats below {comparison.against}'s")
    return (
        f"the target's log-probability of an answer's token is {cost}; "
        f"{100 * comparison.stray_share:.1f}% of the tokens are not its argmax"
        f"{_strays(comparison)}."
    )


def _strays(comparison: LossyComparison) -> str:
    if comparison.stray_probabilities is None:
        return ""
    low, middle, high = comparison.stray_probabilities
    return (
        f", and to these it gives probability {_number(middle, 3)} in the median (quartiles "
        f"{_number(low, 3)}-{_number(high, 3)}), rank {_number(comparison.stray_rank, 0)} behind "
        "the argmax"
    )


def _display(group: str) -> str:
    return {PLAIN: "plain decoding", HF: "transformers' generate"}.get(group, group)


def _claim(estimate: Estimate, neutral: float = 1.0, unit: str = "") -> str:
    """The number, and whether a difference may be claimed at all."""
    if estimate.interval is None:
        return f"{_number(estimate.value, 3)}{unit} (too few questions for an interval)"
    verdict = "" if estimate.interval.excludes(neutral) else ": no difference shown"
    return f"{inline(estimate)}{unit}{verdict}"


def inline(estimate: Estimate, digits: int = 3) -> str:
    """A number with its interval in brackets behind it."""
    text = _number(estimate.value, digits)
    if estimate.interval is None:
        return text
    low, high = estimate.interval
    return f"{text} [{_number(low, digits)}, {_number(high, digits)}]"


def _with_interval(estimate: Estimate) -> str:
    text = _number(estimate.value)
    if estimate.interval is None:
        return text
    low, high = estimate.interval
    return f"{text}\n{_number(low)}-{_number(high)}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _histogram(counts: Sequence[int]) -> str:
    return ", ".join(f"{a}: {count}" for a, count in enumerate(counts))


def as_numbers(value: Any) -> Any:
    """NaN as None, tuples as lists, keys as text, all the way down."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Interval):
        return [value.low, value.high]
    if isinstance(value, Estimate):
        return {"value": as_numbers(value.value), "interval": as_numbers(value.interval)}
    if isinstance(value, Mapping):
        return {str(key): as_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_numbers(item) for item in value]
    return value
