"""The package as users get it: what a wheel holds, what an editable install imports."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import eagle_dropmatch


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter that sees what is installed, not this source tree."""
    return subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )


def package_folders(repository: Path) -> dict[str, Path]:
    """Source folder of every package (anything with an ``__init__.py``), keyed by its place."""
    found = {}
    for source, place in (("eagle_dropmatch", "eagle_dropmatch"), ("tree", "eagle_dropmatch/tree")):
        for init in (repository / source).rglob("__init__.py"):
            below = init.parent.relative_to(repository / source)
            found[(Path(place) / below).as_posix()] = init.parent
    return found


@pytest.fixture(scope="module")
def wheel_names(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel that is built from a copy of the sources, without a network."""
    pytest.importorskip("setuptools", reason="building a wheel needs setuptools")
    source = tmp_path_factory.mktemp("source")
    for folder in ("eagle_dropmatch", "tree"):
        shutil.copytree(
            repository / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / file, source / file)
    # What a draft of any layout would look like, whether one is checked out or not.
    nested = source / "eagle_dropmatch" / "assets" / "some_draft" / "deeper"
    nested.mkdir(parents=True)
    (nested / "model.safetensors").write_bytes(b"weights")

    out = tmp_path_factory.mktemp("wheel")
    command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    built = subprocess.run(
        [sys.executable, *command], cwd=source, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_installs_one_top_level_package_and_no_tree(wheel_names: set[str]) -> None:
    top_level = {name.split("/")[0] for name in wheel_names}
    assert top_level == {
        "eagle_dropmatch",
        f"eagle_dropmatch-{eagle_dropmatch.__version__}.dist-info",
    }


def test_wheel_holds_every_module_of_every_package(wheel_names: set[str], repository: Path) -> None:
    folders = package_folders(repository)
    assert "eagle_dropmatch/tree" in folders
    expected = {
        f"{place}/{module.name}"
        for place, source in folders.items()
        for module in source.glob("*.py")
    }
    assert expected <= wheel_names


def test_every_module_folder_is_a_package(repository: Path) -> None:
    packages = set(package_folders(repository).values())
    modules = [
        *(repository / "eagle_dropmatch").rglob("*.py"),
        *(repository / "tree").rglob("*.py"),
    ]
    assert {module.parent for module in modules} <= packages


def test_wheel_holds_type_marker_and_licence(wheel_names: set[str]) -> None:
    assert "eagle_dropmatch/py.typed" in wheel_names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)


def test_wheel_holds_assets_at_any_depth(wheel_names: set[str], repository: Path) -> None:
    assets = repository / "eagle_dropmatch" / "assets"
    expected = {
        f"eagle_dropmatch/assets/{path.relative_to(assets).as_posix()}"
        for path in assets.rglob("*")
        if path.is_file()
    }
    assert "eagle_dropmatch/assets/some_draft/deeper/model.safetensors" in wheel_names
    assert expected <= wheel_names


def test_wheel_holds_the_files_of_the_trace_page(wheel_names: set[str]) -> None:
    files = {f"eagle_dropmatch/tracing/assets/page.{ending}" for ending in ("html", "css", "js")}
    assert files <= wheel_names


def test_wheel_holds_every_cpp_file(wheel_names: set[str], repository: Path) -> None:
    package = repository / "eagle_dropmatch"
    files = [
        path.relative_to(repository) for end in ("cpp", "h") for path in package.rglob(f"*.{end}")
    ]
    assert {path.suffix for path in files} == {".cpp", ".h"}
    assert {path.as_posix() for path in files} <= wheel_names


def test_tree_is_importable_under_the_package_only(tmp_path: Path) -> None:
    code = "import eagle_dropmatch.tree as t; print(t.__name__, t.DraftTree.__module__)"
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("eagle_dropmatch.tree eagle_dropmatch.tree.")


def test_installation_adds_no_top_level_tree(tmp_path: Path, repository: Path) -> None:
    # dm-tree may be installed beside this package; the folder of this repository must not be it.
    code = "import importlib.util as u; s = u.find_spec('tree'); print(s and s.origin)"
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert str(repository / "tree") not in result.stdout


def test_importing_the_package_does_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys, eagle_dropmatch, eagle_dropmatch.errors, eagle_dropmatch.assets\n"
        "print(eagle_dropmatch.__version__, {'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    result = run_python(code, tmp_path)
    assert result.stdout == f"{eagle_dropmatch.__version__} set()\n", result.stderr


def test_decoder_is_exported_lazily_and_once() -> None:
    from eagle_dropmatch.decoder import SpeculativeDecoder

    assert eagle_dropmatch.SpeculativeDecoder is SpeculativeDecoder
    assert "SpeculativeDecoder" in dir(eagle_dropmatch)


def test_unknown_attribute_is_named() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Decoder'"):
        eagle_dropmatch.Decoder  # noqa: B018
