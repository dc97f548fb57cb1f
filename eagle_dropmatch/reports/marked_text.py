"""Tables and numbers in a Markdown text that come from run folders, and are kept as those say.

A table stands between two lines::

    <!-- mtbench-default: table -->
    | ... |
    <!-- end -->

and a number between two comments, which a reader of the page does not see::

    reaches tau <!-- =mtbench-naive naive tau -->3.68 [3.49, 3.87]<!-- --> where ...

The number is named by its folder, the row of the folder's table, and a name of ``QUANTITIES``;
``alone`` behind that leaves the interval out. Tables are those of ``TABLES``, from a run's records,
and of ``WRITTEN_TABLES``, as a study wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError
from ..evals.plan import EXACT
from ..evals.table import baselines_of, body_cells, header_cells, inline, table_lines
from .quantities import QUANTITIES, quantity
from .stored_run import StoredRun
from .written_tables import WRITTEN_TABLES

BLOCK = re.compile(r"^<!-- (\S+): (\w+) -->\n((?:(?!.*<!--).*\n)*)^<!-- end -->$", re.MULTILINE)
NUMBER = re.compile(r"<!-- =(\S+) ([^\n]+?) (\w+)( alone)? -->([^<]*)<!-- -->")
STRAY = re.compile(r"^<!-- \S+: \w+ -->|^<!-- end -->|<!-- =|<!-- -->", re.MULTILINE)
"""What is left of a marker that is not whole."""
FIRST_ON_LINE = re.compile(r"^[ \t]*(?:[-*] )?<!-- =", re.MULTILINE)
"""A line that begins with a comment is HTML to Markdown, and ends the paragraph before it."""

Source = Callable[[str], StoredRun]
"""The run in a folder, by the folder's name."""


class Change(NamedTuple):
    """A marked place that does not say what its run says."""

    line: int
    """1-based."""
    marker: str
    old: str
    new: str


def refreshed(
    text: str, source: Source, results: Path = Path("results")
) -> tuple[str, list[Change]]:
    """``text`` with every marked place as its run says, and the places that changed.

    results: the folder of all folders.

    UserError, with the line, for a marker that is not whole or names what is not there.
    """
    _require_whole(text)
    changes: list[Change] = []
    # From the last to the first, so that the places before stay where they are.
    for start, end, line, marker, new in sorted(_places(text, source, results), reverse=True):
        old = text[start:end]
        if old != new:
            changes.append(Change(line, marker, old, new))
            text = text[:start] + new + text[end:]
    return text, changes[::-1]


Place = tuple[int, int, int, str, str]
"""Start, end, line, marker, what belongs there."""


def _places(text: str, source: Source, results: Path) -> Iterator[Place]:
    for found in BLOCK.finditer(text):
        folder, kind = found[1], found[2]
        make = partial(_table, source, results, folder, kind)
        yield _place(text, found, 3, f"{folder}: {kind}", make)
    for found in NUMBER.finditer(text):
        folder, group, name, alone = found[1], found[2], found[3], found[4]
        make = partial(_number, source, folder, group, name, alone is not None)
        yield _place(text, found, 5, f"{folder} {group} {name}{alone or ''}", make)


def _place(
    text: str, found: re.Match[str], part: int, marker: str, make: Callable[[], str]
) -> Place:
    line = _line(text, found.start())
    try:
        new = make()
    except UserError as error:
        raise UserError(f"line {line}, marker {marker!r}: {error}") from None
    return *found.span(part), line, marker, new


def _number(source: Source, folder: str, group: str, name: str, alone: bool) -> str:
    if name not in QUANTITIES:
        raise UserError(f"no quantity {name!r}; there are {', '.join(QUANTITIES)}")
    return quantity(source(folder), group, name, alone=alone)


def _table(source: Source, results: Path, folder: str, kind: str) -> str:
    if kind in TABLES:
        lines = TABLES[kind](source(folder))
    elif kind in WRITTEN_TABLES:
        lines = WRITTEN_TABLES[kind](results / folder)
    else:
        known = ", ".join((*TABLES, *WRITTEN_TABLES))
        raise UserError(f"no table {kind!r}; there are {known}")
    return "\n".join(lines) + "\n"


def rows_table(run: StoredRun) -> list[str]:
    """The run's own table, as its table.md has it."""
    baselines = baselines_of(run.summary)
    return table_lines(header_cells(baselines), body_cells(run.summary, baselines))


def costs_table(run: StoredRun) -> list[str]:
    """What every rule gains and costs; the greatest tau is set in bold."""
    costs = {each.group: inline(each.log_probability_cost) for each in run.summary.comparisons}
    rows = [row for row in run.summary.rows if row.drafting]
    best = max(row.tau.value for row in rows)
    body = [
        [
            run.name_of(row),
            f"**{inline(row.tau, 2)}**" if row.tau.value == best else inline(row.tau, 2),
            "0" if row.group == EXACT else costs.get(row.group, "-"),
            f"{100 * row.relaxed_share:.1f}%" if row.lossy else "0%",
        ]
        for row in rows
    ]
    return table_lines(["rule", "tau", "nats a token below exact", "relaxed share"], body)


TABLES: dict[str, Callable[[StoredRun], list[str]]] = {"table": rows_table, "costs": costs_table}


def _require_whole(text: str) -> None:
    bare = NUMBER.sub(_blank, BLOCK.sub(_blank, text))
    if left := STRAY.search(bare):
        raise UserError(
            f"line {_line(text, left.start())}: {left[0]!r} is no whole marker; expected "
            "'<!-- FOLDER: TABLE -->' ... '<!-- end -->' on lines of their own, or "
            "'<!-- =FOLDER ROW QUANTITY -->...<!-- -->'"
        )
    if first := FIRST_ON_LINE.search(text):
        raise UserError(
            f"line {_line(text, first.start())}: a marker that begins a line breaks its paragraph; "
            "move a word before it"
        )


def _blank(found: re.Match[str]) -> str:
    """As long as the marker and of as many lines, so that all else stays where it is."""
    return re.sub(r"[^\n]", " ", found[0])


def _line(text: str, place: int) -> int:
    return 1 + text.count("\n", 0, place)
