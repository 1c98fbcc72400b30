"""Whose kernels compute matmuls and attention: named by whoever builds a model, else chosen for its device.

    accelerator    torch's own choice for both
    cpu            matmuls by torch's default library, which is MKL on x86; attention in blocks of them, but for long
                   float32 rows, which go to torch's own kernel
    cpu_onednn     float32 matmuls by oneDNN, but for experts' (ops/experts.py); attention always in blocks

MKL has AVX-512 code for Intel's processors only: an AMD Zen 5 does half of what it can. oneDNN, which torch brings as
well and uses for half precision, goes by what the processor can do. Any of the three runs on any CPU, with the same
numbers but for rounding.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import torch

Kernels = Literal["accelerator", "cpu", "cpu_onednn"]


def kernels_of(device: torch.device | str) -> Kernels:
    """The kernels that are fastest on a device; it follows from the processor, never from a measurement."""
    if torch.device(device).type != "cpu":
        return "accelerator"
    return kernels_of_processor(torch.backends.cpu.get_cpu_capability(), _vendor())


def kernels_of_processor(capability: str, vendor: str) -> Kernels:
    """Those of a CPU: ``capability`` in torch's words ("AVX512", "AVX2", …), ``vendor`` in the processor's own."""
    lacks_code = capability.startswith("AVX512") and vendor not in ("", "GenuineIntel")
    return "cpu_onednn" if lacks_code and _has_both_libraries() else "cpu"


@cache
def _has_both_libraries() -> bool:
    return (
        torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # private to torch: a later one may lack it
    )


@cache
def _vendor() -> str:
    """Who made the processor, in its own words; "" where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
