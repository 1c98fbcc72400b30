"""The matrix product of every linear layer, and the library that makes it.

torch gives float32 products on x86 to MKL, which has AVX-512 code for Intel's processors only: an AMD Zen 5 does half
of what it can. oneDNN, which torch brings as well and uses for half precision, goes by what the processor can do.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · wᵀ (+ bias): x [.., k], w [n, k], bias [n] -> [.., n]. Not differentiable: for use in a Function."""
    if not _by_onednn(x):
        return F.linear(x, w, bias)
    if not (w.is_contiguous() or w.t().is_contiguous()):
        w = w.contiguous()  # oneDNN has fast code for whole matrices only
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    return result


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += leftᵀ · right, with left [m, n], right [m, k], total [n, k]; with a temporary [n, k] unless MKL adds."""
    if total.dtype != right.dtype:
        total.add_(product(left.t(), right.t()))
    elif not _by_onednn(total):
        total.addmm_(left.t(), right)
    elif left.shape[1] <= right.shape[1]:  # it copies its first argument to turn it: the smaller one
        total.add_(product(left.t(), right.t()))
    else:
        total.add_(product(right.t(), left.t()).t())


def _by_onednn(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and onednn_is_faster()


@cache
def onednn_is_faster() -> bool:
    """Whether float32 products should go to oneDNN: on a processor with AVX-512 for which MKL has no such code."""
    return (
        torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # private to torch: a later one may lack it
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and _vendor() not in ("", "GenuineIntel")
    )


def _vendor() -> str:
    """Who made the processor, in its own words; "" where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
