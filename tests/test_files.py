"""Files that are whole or not there, and locks."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_dropmatch.files import lock, replacing, write_text


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "first")
    with replacing(path) as file:
        file.write("sec")
        assert path.read_text() == "first"
        file.write("ond, 둘째")
    assert path.read_text(encoding="utf-8") == "second, 둘째"
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_a_failure_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def fail() -> None:
        with replacing(path, "wb") as file:
            file.write(b"new")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.bin"]


def test_a_lock_has_one_holder_until_its_file_is_closed(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert lock(first)
        assert not lock(second)
        first.close()
        assert lock(second)
