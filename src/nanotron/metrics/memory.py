"""How much memory this process holds: the device's peak, or the resident set on a CPU."""

from __future__ import annotations

import os
import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30


def memory_gib(device: torch.device) -> float:
    """GiB held by this process: peak of PyTorch's allocator on an accelerator, resident set size now on a CPU.

    Forked ranks share pages, so on a CPU the sum over ranks counts those several times.
    """
    if device.type == "cpu":
        return resident_bytes() / GIB
    import torch

    return float(torch.get_device_module(device).max_memory_reserved(device)) / GIB


def resident_bytes() -> int:
    """Resident set size in bytes: now on Linux, the peak so far elsewhere."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
