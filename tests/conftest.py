"""What every test shares: where data lies, when a test is skipped, how torch runs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

# Before torch is imported. The tests' models are tiny: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A test that needs the network is a test that fails on a train.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU, and import torch for that only if there are any."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree that these tests belong to."""
    return REPOSITORY


@pytest.fixture(scope="session")
def load_script(repository: Path) -> Callable[[str], ModuleType]:
    """Loads a file of scripts/, or another folder, by its name as a module of its own."""

    def load(name: str, folder: str = "scripts") -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, repository / folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Recorded reference runs and question sets: EAGLE_DROPMATCH_DATA, or beside the repository."""
    default = REPOSITORY.parent / "shared" / "data"
    folder = Path(os.environ.get("EAGLE_DROPMATCH_DATA") or default)
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set EAGLE_DROPMATCH_DATA")
    return folder


@pytest.fixture(scope="session")
def reference_target_dir() -> Path:
    """The reference target as a local checkpoint; for tests marked ``reference``."""
    from eagle_dropmatch.assets import reference_target
    from eagle_dropmatch.errors import UserError

    try:
        target = reference_target()
    except UserError as error:
        pytest.skip(str(error))
    if not isinstance(target, Path):
        pytest.skip("the reference target is not installed: run `make setup`")
    return target


@pytest.fixture(scope="session")
def reference_draft_dir() -> Path:
    """The draft that ships with the package; for tests marked ``reference``."""
    from eagle_dropmatch.assets import reference_draft
    from eagle_dropmatch.errors import UserError

    try:
        return reference_draft()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Asserts that a script's ``main`` refuses its arguments in one line that says why."""
    from eagle_dropmatch import cli

    def refused(main: Callable[[list[str]], int], arguments: list[str], told: str) -> None:
        assert cli.run_command(main, arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line

    return refused
