"""Matmuls of numbers in 8 bits (e4m3), each block of them with a scale in float32 (arXiv 2412.19437, section 3.3).

    m rows   k, n input and output features
    activations, gradients of outputs   [m, k]   a scale for every 128 features of a row    [m, k/128]
    weights                             [n, k]   a scale for every 128 × 128 of the matrix  [n/128, k/128]

Shards whose sides are multiples of 128 cut no block, so every layout has the numbers and scales of one device; and a
weight that is turned around for backward has its blocks turned around. Weight gradients are not made here: they are
sums over tokens, of what was multiplied as it was before it was rounded (ops/linear.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from nanotron.ops.fused import Fuse, any_number_of_rows, eager, precise
from nanotron.ops.gemm import gemm
from nanotron.ops.kernels import Kernels

BLOCK = 128
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
LEAST_SCALE = torch.finfo(torch.float32).tiny  # what is less is no normal number: some devices take it for zero

Multiplier = Literal["scaled_mm", "dequantised"]
"""torch's kernel for block scales, or numbers that are multiplied by their scales first, in float32 at least."""


def multiplier_of(device: torch.device | str, dtype: torch.dtype) -> Multiplier:
    """Who multiplies on a device: torch has a kernel for Hopper GPUs, from cuBLAS 12.9, for these two dtypes."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.cuda is None or dtype not in (torch.bfloat16, torch.float32):
        return "dequantised"
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    is_recent = tuple(map(int, torch.version.cuda.split("."))) >= (12, 9)
    return "scaled_mm" if is_hopper and is_recent else "dequantised"


@any_number_of_rows
def quantise(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in e4m3 and the scales to multiply them by: blocks [i, p, j, q] of p × q -> [i, p, j, q], [i, 1, j, 1].

    The largest of a block becomes 448. A block of zeros stays zeros; one that has a number that is not finite becomes
    one that has none that is.
    """
    largest = torch.linalg.vector_norm(blocks, torch.inf, (1, 3), keepdim=True)
    scales = (precise(largest) / LARGEST).clamp(min=LEAST_SCALE)
    return (blocks / scales).to(E4M3), scales


@dataclass(frozen=True)
class Fp8:
    """How a layer multiplies in fp8."""

    by: Multiplier
    kernels: Kernels
    """Of those who multiply what was dequantised."""
    fuse: Fuse = eager

    def gemms(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """x · wᵀ for each weight, in x's dtype: x [.., k], w [n, k] -> [.., n]. Not differentiable."""
        rows = x.reshape(-1, x.shape[-1])  # [m, k]
        if not len(rows):
            return [x.new_empty(*x.shape[:-1], len(w)) for w in weights]
        multiply = self._scaled_mm if self.by == "scaled_mm" else self._dequantised
        if self.by == "scaled_mm" and len(rows) % 4:  # its kernel takes rows by four
            rows = F.pad(rows, (0, 0, 0, -len(rows) % 4))
        left = self._quantised_rows(rows)
        outputs = (multiply(left, self._quantised_matrix(w), x.dtype) for w in weights)
        return [y[: x.shape[:-1].numel()].view(*x.shape[:-1], -1) for y in outputs]

    def _quantised_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[m, k] -> its numbers, and scales [m, k/128]."""
        values, scales = self.fuse(quantise)(rows.reshape(-1, 1, 1, BLOCK))
        return values.view(rows.shape), scales.view(len(rows), rows.shape[1] // BLOCK)

    def _quantised_matrix(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """[n, k] -> its numbers, row by row in memory, and scales [n/128, k/128]."""
        if not w.is_contiguous():  # turned around
            values, scales = self._quantised_matrix(w.t())
            return values.t().contiguous(), scales.t()
        values, scales = self.fuse(quantise)(w.view(len(w) // BLOCK, BLOCK, -1, BLOCK))
        return values.view(w.shape), scales.view(len(w) // BLOCK, -1)

    def _dequantised(self, x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """[m, k] · [n, k]ᵀ -> [m, n]."""
        return gemm(dequantised(*x), dequantised(*w), kernels=self.kernels).to(dtype)

    def _scaled_mm(self, x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """[m, k] · [n, k]ᵀ -> [m, n]. Scales lie as cuBLAS wants them: k/128 outermost for x, innermost for w, and
        filled up to a multiple of 4.
        """
        (left, of_left), (right, of_right) = x, w
        return F.scaled_mm(
            left,
            right.t(),
            of_left.t().contiguous().t(),
            ScalingType.BlockWise1x128,
            F.pad(of_right, (0, -of_right.shape[1] % 4)).contiguous().t(),
            ScalingType.BlockWise128x128,
            output_dtype=dtype,
        )


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """The numbers [m, k] that values in e4m3 stand for, with a scale [m/p, k/q] for each block of p × q."""
    height = len(values) // max(1, len(scales))
    blocks = values.to(scales.dtype).view(len(scales), height, scales.shape[1], BLOCK)
    return (blocks * scales[:, None, :, None]).view(values.shape)
