"""Files that are whole or not there, and the lock of a folder or file with one writer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from eagle_dropmatch.errors import UserError


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file beside ``path`` for writing; at the end it takes its place, in one step.

    It is on the disk by then. Where the body fails, ``path`` stays as it was.
    """
    part = path.with_name(f".{path.name}.part")
    encoding = None if "b" in mode else "utf-8"
    try:
        with part.open(mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    with replacing(path) as file:
        file.write(text)


def lock(file: IO[Any]) -> bool:
    """Take the lock of an open file for as long as it is open; False where another has it.

    On Windows there is no such lock, and the user is trusted.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def check_writable(folder: Path) -> None:
    """Make the folder if needed and see that it takes files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"the output folder {folder} cannot be written ({error.strerror or error}): "
            "give another"
        ) from None
