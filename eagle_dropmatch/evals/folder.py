"""The folder of a run: its header, its answer files, and how a killed run goes on.

run.json             the header: everything that must be equal for two records to belong together
answers-<arm>.jsonl  one line a question, appended and synced at once; read as well where it was
                     packed into answers-<arm>.jsonl.gz
table.md table.json  written at the end
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..errors import UserError
from ..files import lock, write_text

FORMAT = 3
READABLE = (2, 3)
"""Formats whose answer records read the same: headers of format 2 say less about the models."""
HEADER = "run.json"
TABLES = ("table.md", "table.json")


class RunFolder:
    """An output folder, opened for one run. Use as a context manager: it holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self._header: dict[str, Any] | None = None

    def open(self, arguments: Mapping[str, Any], *, overwrite: bool = False) -> bool:
        """Make the folder, check that it can be written and that it belongs to these arguments.

        Needs no model. Returns True if there is an earlier run to go on with. UserError otherwise.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w", encoding="utf-8")
            # The header is replaced, not written in place: the folder itself must take new files.
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise UserError(
                f"output folder {self.path} cannot be written ({error.strerror or error}); "
                "give another --output-dir"
            ) from None
        self._take_lock()
        if overwrite:
            self._clear()
        self._header = self.read_header(self.path)
        if self._header is None:
            if answer_files(self.path):
                raise UserError(
                    f"{self.path} holds answers without a {HEADER}, so nobody can tell what they "
                    "are of; give another --output-dir, or --overwrite to delete them"
                )
            return False
        self._require_equal("arguments", arguments)
        return True

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def read_header(path: Path) -> dict[str, Any] | None:
        """The header in ``path``, or None where there is none."""
        try:
            return header_in(path, (FORMAT,))
        except UserError as error:
            raise UserError(f"{error}; give another --output-dir, or --overwrite") from None

    def start(
        self,
        arguments: Mapping[str, Any],
        resolved: Mapping[str, Any],
        description: Mapping[str, Any],
        session: Mapping[str, Any],
    ) -> None:
        """Write the header of a new run, or check that the earlier one was made the same way.

        ``arguments`` is known before the models are loaded, ``resolved`` after; both must be equal
        in every session of a run. ``description`` is for the reader. ``session`` is added to the
        list of sessions: when it began, at which commit.
        """
        if self._header is None:
            self._header = {
                "format": FORMAT,
                "arguments": _plain(arguments),
                "resolved": _plain(resolved),
                **_plain(description),
                "sessions": [],
                "finished": None,
            }
        else:
            self._require_equal("arguments", arguments)
            self._require_equal("resolved", resolved)
        self._header["sessions"].append(_plain(session))
        self._write_header()

    def finish(self) -> None:
        """Mark the run as complete."""
        assert self._header is not None, "start() comes first"
        self._header["finished"] = time.time()
        self._write_header()

    def answers_path(self, arm: str) -> Path:
        return answers_path(self.path, arm)

    def answers(self, arm: str) -> dict[int | str, dict[str, Any]]:
        """Complete records of an arm by question, after cutting off a half-written last line."""
        path = self.answers_path(arm)
        records, whole = read_answers(path)
        if path.exists() and whole < path.stat().st_size:
            with path.open("r+b") as file:
                file.truncate(whole)
                os.fsync(file.fileno())
        return records

    def append(self, arm: str, record: Mapping[str, Any]) -> None:
        """Add one line and wait until it is on the disk."""
        line = json.dumps(record, ensure_ascii=False) + "\n"
        path = self.answers_path(arm)
        if not path.exists() and _packed(path).exists():
            write_text(path, _unpacked(path).decode("utf-8"))
            _packed(path).unlink()
        with path.open("ab") as file:
            file.write(line.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())

    def write_text(self, name: str, text: str) -> None:
        """Replace a file of the folder in one step."""
        write_text(self.path / name, text)

    def _write_header(self) -> None:
        self.write_text(HEADER, json.dumps(self._header, ensure_ascii=False, indent=2) + "\n")

    def _require_equal(self, part: str, new: Mapping[str, Any]) -> None:
        assert self._header is not None
        old = self._header[part]
        new = _plain(new)
        for field in sorted({*old, *new}):
            if old.get(field) != new.get(field):
                raise UserError(
                    f"{self.path} holds a run with another {field} ({_short(old.get(field))}, "
                    f"now {_short(new.get(field))}); give another --output-dir, or --overwrite"
                )

    def _clear(self) -> None:
        answers = answer_files(self.path)
        others = [self.path / name for name in (HEADER, *TABLES)]
        for path in (*answers, *map(_packed, answers), *others):
            path.unlink(missing_ok=True)

    def _take_lock(self) -> None:
        """Two runs in one folder would double its questions."""
        assert self._lock is not None
        if not lock(self._lock):
            self.close()
            raise UserError(
                f"another run is writing to {self.path}; wait for it, or give another --output-dir"
            )


def header_in(path: Path, formats: Sequence[int] = READABLE) -> dict[str, Any] | None:
    """The header in a folder that may be another's to write, or None where there is none."""
    try:
        header = json.loads((path / HEADER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path / HEADER} cannot be read ({error})") from None
    if not isinstance(header, dict) or header.get("format") not in formats:
        raise UserError(f"{path / HEADER} is not of format {' or '.join(map(str, formats))}")
    return header


def answers_path(folder: Path, arm: str) -> Path:
    return folder / f"answers-{arm}.jsonl"


def answer_files(folder: Path) -> list[Path]:
    """What ``answers_path`` gives for every arm with answers, packed ones too."""
    found = {*folder.glob("answers-*.jsonl")}
    return sorted(found | {path.with_suffix("") for path in folder.glob("answers-*.jsonl.gz")})


def _packed(path: Path) -> Path:
    return path.with_name(f"{path.name}.gz")


def _unpacked(path: Path) -> bytes:
    """What is packed of an answer file; nothing where nothing is."""
    try:
        return gzip.decompress(_packed(path).read_bytes())
    except FileNotFoundError:
        return b""
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{_packed(path)} cannot be unpacked ({error})") from None


def read_answers(path: Path) -> tuple[dict[int | str, dict[str, Any]], int]:
    """The whole records of an answer file by question, and how many bytes they are.

    Changes nothing: a half-written last line is left out. No file is no records.
    """
    data = path.read_bytes() if path.exists() else _unpacked(path)
    whole = data[: data.rfind(b"\n") + 1]
    records: dict[int | str, dict[str, Any]] = {}
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
            question_id = record["question_id"]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path}, line {number}: not an answer record; repair the line, "
                "give another --output-dir, or --overwrite"
            ) from None
        if question_id in records:
            raise UserError(f"{path}, line {number}: question {question_id} is there twice")
        records[question_id] = record
    return records, len(whole)


def default_folder(root: Path, benchmark: str, arguments: Mapping[str, Any]) -> Path:
    """runs/<benchmark>-<hash of the arguments>, with a number added once that run is finished.

    So the same command goes on with a run that was killed, and measures afresh after a whole one.
    """
    text = json.dumps(_plain(arguments), sort_keys=True, ensure_ascii=False)
    base = f"{benchmark}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    path, number = root / base, 1
    while (header := RunFolder.read_header(path)) is not None and header.get("finished"):
        number += 1
        path = root / f"{base}-{number}"
    return path


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON reads it back: tuples become lists, so that old and new compare equal."""
    plain: dict[str, Any] = json.loads(json.dumps(value, ensure_ascii=False, default=str))
    return plain


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
