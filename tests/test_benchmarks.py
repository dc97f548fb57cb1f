"""The benchmarks run, and print a table an axis."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from eagle_dropmatch import cli


@pytest.fixture(scope="module")
def kernels(load_script: Callable[..., ModuleType]) -> ModuleType:
    return load_script("kernels", "benchmarks")


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
    kernels: ModuleType, arguments: str, told: str, refused_in_one_line: Callable[..., None]
) -> None:
    refused_in_one_line(kernels.main, arguments.split(), told)
