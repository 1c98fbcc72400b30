"""The GEMM (matmul) of every linear layer, by the library that its kernels name (ops/kernels.py)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotron.ops.kernels import Kernels


def gemm(x: Tensor, w: Tensor, bias: Tensor | None = None, *, kernels: Kernels) -> Tensor:
    """x · wᵀ (+ bias): x [.., k], w [n, k], bias [n] -> [.., n]. Not differentiable: for use in a Function."""
    if not _by_onednn(x, kernels):
        return F.linear(x, w, bias)
    if not (w.is_contiguous() or w.t().is_contiguous()):
        w = w.contiguous()  # oneDNN has fast code for whole matrices only
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    return result


def add_gemm(total: Tensor, left: Tensor, right: Tensor, *, kernels: Kernels) -> None:
    """total += leftᵀ · right, with left [m, n], right [m, k], total [n, k].

    By oneDNN, or into another dtype, with a temporary [n, k].
    """
    if total.dtype != right.dtype:
        total.add_(gemm(left.t(), right.t(), kernels=kernels))
    elif not _by_onednn(total, kernels):
        total.addmm_(left.t(), right)
    elif left.shape[1] <= right.shape[1]:  # it copies its first argument to turn it: the smaller one
        total.add_(gemm(left.t(), right.t(), kernels=kernels))
    else:
        total.add_(gemm(right.t(), left.t(), kernels=kernels).t())


def _by_onednn(x: Tensor, kernels: Kernels) -> bool:
    return kernels == "cpu_onednn" and x.dtype == torch.float32
