"""docs/structure.md names files and functions: those must be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = Path(__file__).parent.parent / "docs" / "structure.md"
FILE = re.compile(r"`((?:[\w]+/)*[\w]+\.(?:py|cpp|md))`")
STOP = re.compile(r"\*\*`([\w/]+\.py)`, `(\w+)`\*\*")


def found(repository: Path, name: str) -> Path | None:
    """A file as the page names it: from the repository, or from a room in the package."""
    package = repository / "eagle_dropmatch"
    places = [repository / name, package / name, package / "acceptors" / name]
    return next((path for path in places if path.is_file()), None)


def test_every_file_that_the_walk_names_is_there(repository: Path) -> None:
    names = set(FILE.findall(TEXT.read_text(encoding="utf-8")))
    assert len(names) > 20
    assert [name for name in sorted(names) if found(repository, name) is None] == []


@pytest.mark.parametrize(("file", "function"), STOP.findall(TEXT.read_text(encoding="utf-8")))
def test_every_stop_of_the_walk_is_a_function_of_its_file(
    repository: Path, file: str, function: str
) -> None:
    path = found(repository, file)
    assert path is not None
    assert f"def {function}(" in path.read_text(encoding="utf-8")
