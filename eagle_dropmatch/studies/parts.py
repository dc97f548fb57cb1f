"""The report of a script that measures in parts, each kept as soon as it is there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import UserError
from ..evals.table import as_numbers
from ..files import check_writable, lock, write_text


class Found(NamedTuple):
    """What a part came to."""

    data: Any
    """Numbers, tuples and mappings of them."""
    lines: list[str]
    """Markdown."""


class PartsReport:
    """``name``.md and ``name``.json of a folder, whole after every part.

    Use as a context manager: it holds the folder's lock.

    Args:
        order: names of all parts that there may be, as they stand in the report.
    """

    def __init__(self, folder: Path, name: str, order: Iterable[str]) -> None:
        self.folder, self.name, self.order = folder, name, tuple(order)
        self._lock: IO[str] | None = None
        self._parts: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> PartsReport:
        check_writable(self.folder)
        self._lock = (self.folder / ".lock").open("w", encoding="utf-8")
        if not lock(self._lock):
            self._lock.close()
            raise UserError(
                f"another run is writing to {self.folder}; wait for it, or give another "
                "--output-dir"
            )
        path = self.folder / f"{self.name}.json"
        if path.exists():
            try:
                self._parts = json.loads(path.read_text(encoding="utf-8"))["parts"]
            except (OSError, ValueError, KeyError, TypeError):
                raise UserError(
                    f"{path} is no record of this script; give another --output-dir"
                ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def done(self, part: str, settings: Mapping[str, Any]) -> bool:
        """Whether the part is there; UserError if it was measured under other settings."""
        if part not in self._parts:
            return False
        earlier, now = self._parts[part]["settings"], _plain(settings)
        other = [name for name in now if earlier.get(name) != now[name]]
        if other:
            raise UserError(
                f"{self.folder} holds part {part} with another {', '.join(other)}; give another "
                "--output-dir, or --overwrite"
            )
        return True

    def keep(self, part: str, found: Found, settings: Mapping[str, Any], command: str) -> None:
        """Write both files with the part in its place."""
        self._parts[part] = {
            "command": command,
            "settings": _plain(settings),
            "data": as_numbers(found.data),
            "lines": found.lines,
        }
        known = [self._parts[name] for name in self.order if name in self._parts]
        told = [["", f"`{each['command']}`", "", *each["lines"]] for each in known]
        text = "\n".join(line for lines in told for line in lines).lstrip("\n")
        whole = json.dumps({"parts": self._parts}, ensure_ascii=False, indent=1)
        write_text(self.folder / f"{self.name}.md", text + "\n")
        # Last: what stands here is not measured again.
        write_text(self.folder / f"{self.name}.json", whole + "\n")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON reads it back."""
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain
