"""A corpus while it is written: whole lines, what made them, and going on after a kill."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.files import lock, write_text
from eagle_dropmatch.training.corpus import Example, append_lines, read_examples


class CorpusFile:
    """A corpus with a sidecar, ``FILE.meta.json``, that says what made it.

    Use as a context manager: it holds a lock, since two writers would double their answers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta_path = path.with_name(path.name + ".meta.json")
        self.done: dict[str, Example] = {}
        self._lock: IO[str] | None = None

    def __enter__(self) -> CorpusFile:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"the corpus {self.path} cannot be written ({error.strerror or error}); "
                "give another --output"
            ) from None
        self._take_lock()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def open(self, meta: Mapping[str, Any]) -> None:
        """Start, or go on if the file was made with the same ``meta``; UserError otherwise."""
        wanted = json.loads(json.dumps(meta))
        if self.path.stat().st_size == 0:
            self._write_meta(wanted)
            return
        try:
            found = json.loads(self.meta_path.read_text(encoding="utf-8"))
            differ = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
        except (OSError, ValueError, TypeError):
            raise UserError(
                f"{self.path} holds a corpus without a readable {self.meta_path.name}, so nobody "
                "can tell what made it; give another --output"
            ) from None
        if differ:
            told = ", ".join(f"{k} {found.get(k)!r}, not {wanted.get(k)!r}" for k in sorted(differ))
            raise UserError(f"{self.path} was made with another {told}; give another --output")
        self._cut_half_line()
        self.done = {example.id: example for example in read_examples(self.path)}

    def append(self, examples: Sequence[Example]) -> None:
        """Add examples, on disk before it returns."""
        append_lines(self.path, examples)
        self.done.update((example.id, example) for example in examples)

    def _cut_half_line(self) -> None:
        """A killed run may have left a line without its end."""
        with self.path.open("rb+") as file:
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)

    def _write_meta(self, meta: Mapping[str, Any]) -> None:
        write_text(self.meta_path, json.dumps(meta, indent=1) + "\n")

    def _take_lock(self) -> None:
        assert self._lock is not None
        if not lock(self._lock):
            self._lock.close()
            raise UserError(
                f"another run is writing to {self.path}; wait for it, or give another --output"
            )
