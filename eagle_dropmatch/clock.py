"""Wall-clock seconds of work whose device is at rest at both ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def timed(work: Callable[[], T], device: Any) -> tuple[T, float]:
    """The result of ``work`` and its seconds, one synchronisation of the device at each end."""
    start = now(device)
    result = work()
    return result, now(device) - start


def now(device: Any) -> float:
    """The clock, once the device has done everything it was given."""
    synchronise(device)
    return time.perf_counter()


def synchronise(device: Any) -> None:
    """Wait until the device has done everything it was given; a CPU always has."""
    if device.type != "cpu":
        import torch

        torch.accelerator.synchronize(device)
