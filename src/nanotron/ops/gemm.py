"""The GEMM (matmul) of every linear layer, by the library that its kernels name (ops/kernels.py)."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from nanotron.ops.kernels import Kernels
from nanotron.ops.weight_grads import add


def gemm(x: Tensor, w: Tensor, bias: Tensor | None = None, *, kernels: Kernels) -> Tensor:
    """x · wᵀ (+ bias): x [.., k], w [n, k], bias [n] -> [.., n]. Not differentiable: for use in a Function."""
    if not _by_onednn(x, kernels):
        return F.linear(x, w, bias)
    if not (w.is_contiguous() or w.t().is_contiguous()):
        w = w.contiguous()  # oneDNN has fast code for whole matrices only
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    return result


def add_gemm(total: Tensor, left: Tensor, right: Tensor, *, first: bool = False, kernels: Kernels) -> None:
    """total += leftᵀ · right, or total = leftᵀ · right if ``first``, with left [m, n], right [m, k], total [n, k].

    By oneDNN, or into another dtype, with a temporary [n, k]; not where a device adds half precision up in float32.
    """
    if total.dtype != right.dtype:
        if kernels == "accelerator" and adds_in(total.dtype, right.dtype, total.device.type):
            torch.addmm(total, left.t(), right, beta=int(not first), out_dtype=total.dtype, out=total)
        else:
            add(total, gemm(left.t(), right.t(), kernels=kernels), first)
    elif not _by_onednn(total, kernels):
        total.addmm_(left.t(), right, beta=int(not first))
    elif left.shape[1] <= right.shape[1]:  # it copies its first argument to turn it: the smaller one
        add(total, gemm(left.t(), right.t(), kernels=kernels), first)
    else:
        add(total, gemm(right.t(), left.t(), kernels=kernels).t(), first)


@cache
def adds_in(total: torch.dtype, factors: torch.dtype, device: str) -> bool:
    """Whether a kind of device adds products of one dtype to a sum of another; tried once, on a few numbers."""
    with _disable_current_modes():  # the answer is kept, and may not be that of fake tensors
        sums, x = (torch.zeros(16, 16, dtype=dtype, device=device) for dtype in (total, factors))
        try:
            torch.addmm(sums, x, x, out_dtype=total, out=sums)
        except RuntimeError:
            return False
    return True


def _by_onednn(x: Tensor, kernels: Kernels) -> bool:
    return kernels == "cpu_onednn" and x.dtype == torch.float32
