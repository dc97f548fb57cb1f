"""Tables that studies have written, for texts that show them: by kind, from a study's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ..errors import UserError
from ..studies.overhead import PARTS


def sweep_table(folder: Path) -> list[str]:
    """sweep_depth.py's: a line a level, and what follows from them."""
    return _paragraphs(folder / "sweep.md", 1, 3)


def grid_table(folder: Path) -> list[str]:
    """sweep_heads.py's: a line a K, how to read it, and what follows."""
    return _paragraphs(folder / "heads.md", 2, 5)


def part_table(part: str, folder: Path) -> list[str]:
    """One of bench_overhead.py's."""
    path = folder / "overhead.json"
    try:
        lines: list[str] = json.loads(_read(path))["parts"][part]["lines"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} holds no part {part}") from None
    # What was asked stands before the first blank line.
    return lines[lines.index("") + 1 :]


WRITTEN_TABLES: Mapping[str, Callable[[Path], list[str]]] = {
    "sweep": sweep_table,
    "grid": grid_table,
    **{part: partial(part_table, part) for part in PARTS},
}


def _paragraphs(path: Path, first: int, end: int) -> list[str]:
    """Some of a file's paragraphs, with a blank line between them."""
    found = _read(path).strip().split("\n\n")
    if len(found) < end:
        raise UserError(f"{path} has {len(found)} paragraphs, expected at least {end}")
    return "\n\n".join(found[first:end]).split("\n")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None
