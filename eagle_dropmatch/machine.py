"""What this machine is called: part of every record, and of the names of what is measured or
compiled for it alone."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any


def device_name(device: Any) -> str:
    """The accelerator's or the processor's own name."""
    import torch

    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type != "cpu":
        return str(device)
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
