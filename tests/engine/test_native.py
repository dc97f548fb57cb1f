"""C++ files: built once, built again where they are damaged, refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import rig

from eagle_dropmatch import native
from eagle_dropmatch.errors import UserError


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A C++ file, and a cache folder of its own."""
    monkeypatch.setenv("EAGLE_DROPMATCH_CACHE", str(tmp_path / "cache"))
    native.library.cache_clear()
    file = tmp_path / "answer.cpp"
    file.write_text('extern "C" int answer() { return 42; }\n')
    yield file
    native.library.cache_clear()


def built(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "compiled").iterdir())


@rig.needs_compiler
class TestWithACompiler:
    def test_a_file_is_built_once_and_again_when_it_changes(
        self, source: Path, tmp_path: Path
    ) -> None:
        assert native.library(source).answer() == 42
        (first,) = built(tmp_path)
        made = first.stat().st_mtime_ns
        native.library.cache_clear()
        assert native.library(source).answer() == 42
        assert first.stat().st_mtime_ns == made
        source.write_text('extern "C" int answer() { return 43; }\n')
        native.library.cache_clear()
        assert native.library(source).answer() == 43
        assert len(built(tmp_path)) == 2

    def test_a_file_is_built_again_when_a_header_changes(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(native, "_PACKAGE", tmp_path)
        source.write_text('#include "said.h"\nextern "C" int answer() { return said; }\n')
        for said in (42, 43):
            (tmp_path / "said.h").write_text(f"constexpr int said = {said};\n")
            native.library.cache_clear()
            assert native.library(source).answer() == said

    def test_a_damaged_library_is_built_again(self, source: Path, tmp_path: Path) -> None:
        builder = native.library(source)
        assert builder.answer() == 42
        (path,) = built(tmp_path)
        path.unlink()  # written over, the one that is loaded would change, too
        path.write_bytes(b"half")
        native.library.cache_clear()
        assert native.library(source).answer() == 42

    def test_what_does_not_compile_is_one_line_and_leaves_nothing(
        self, source: Path, tmp_path: Path
    ) -> None:
        source.write_text("int answer( {\n")
        with pytest.raises(UserError, match="the C\\+\\+ compiler failed") as caught:
            native.library(source)
        assert "\n" not in str(caught.value)
        assert not built(tmp_path)


def test_without_a_compiler_it_says_what_to_install(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "can_compile", lambda: False)
    with pytest.raises(UserError, match=r"install g\+\+") as caught:
        native.library(source)
    assert "\n" not in str(caught.value)
