"""The benchmarks run, and print a table an axis."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from eagle_dropmatch import cli


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "kernels.py"
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_kernel_is_timed_over_every_size(
    kernels: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--nodes 2 9 --batch 1 3 --vocabulary 40 90 --times 1"
    assert cli.run_command(kernels.main, given.split()) == 0
    printed = capsys.readouterr().out
    for axis, sizes in (("nodes", "2 | 9"), ("batch", "1 | 3"), ("vocabulary", "40 | 90")):
        assert f"| microseconds over {axis} | {sizes} | exponent |" in printed
    for name in kernels.KERNELS:
        assert printed.count(f"\n| {name} | ") == (3 if name == "heads" else 2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--kernels forward", "invalid choice: 'forward'"),
        ("--nodes 1", "'1' is not an integer of at least 2"),
        ("--batch none", "'none' is not an integer"),
    ],
)
def test_bad_input_is_one_line(
    kernels: ModuleType, arguments: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run_command(kernels.main, arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
