"""The loss, cross entropy, from logits whose vocabulary is spread over tp.

b rows   s tokens of a row   t tensor-parallel ranks   V vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ReduceOp

from nanotron.batch import IGNORED_LABEL
from nanotron.ops.embedding import local_ids
from nanotron.ops.fused import Fuse, eager, logit_gradient, softmax_and_log_z
from nanotron.parallel.comm import all_reduce
from nanotron.parallel.mesh import Mesh


def cross_entropy(
    logits: Tensor, labels: Tensor, first_column: int, mesh: Mesh, *, fuse: Fuse = eager
) -> tuple[Tensor, Tensor]:
    """Sums over the valid tokens of −log p(label) and of (log Σ exp logits)², from logits spread over tp.

    logits [b, s, V/t], of which this rank's columns start at ``first_column``; labels [b, s].
    Three numbers per token cross ranks, never the logits. Forward: all-reduce max, all-reduce sum; backward: nothing.
    Computed in float32 at least.
    """
    losses: tuple[Tensor, Tensor] = _CrossEntropy.apply(logits, labels, first_column, mesh, fuse)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(Function):
    """Each rank takes the softmax of its own columns, and then learns its ``share``: what they are of all columns."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, first_column: int, mesh: Mesh, fuse: Fuse
    ) -> tuple[Tensor, Tensor]:
        group = mesh.group("tp")
        ctx.dtype, ctx.shape, ctx.fuse = logits.dtype, logits.shape, fuse
        logits, labels = logits.flatten(0, 1), labels.flatten()  # [b, s, V/t] -> [b·s, V/t]
        softmax, local_log_z = fuse(softmax_and_log_z)(logits)
        peak = all_reduce(local_log_z, group, ReduceOp.MAX)
        columns, foreign = local_ids(labels, first_column, logits.shape[1])
        target = (logits.gather(1, columns[:, None]).squeeze(1) - peak).masked_fill(foreign, 0)
        total, target = all_reduce(torch.stack([(local_log_z - peak).exp(), target]), group)
        log_total = total.log()
        valid = labels != IGNORED_LABEL
        log_z = log_total + peak
        ctx.save_for_backward(softmax, (local_log_z - log_z).exp(), columns, foreign, valid, log_z)
        return (log_total - target).masked_fill(~valid, 0).sum(), log_z.masked_fill(~valid, 0).square().sum()

    @staticmethod
    def backward(ctx: Any, lm_grad: Tensor, z_grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, share, columns, foreign, valid, log_z = ctx.saved_tensors
        scale = share * (lm_grad + 2 * z_grad * log_z) * valid
        mine = ((valid & ~foreign) * lm_grad).to(softmax.dtype)
        grad = ctx.fuse(logit_gradient)(softmax, scale, columns, mine, ctx.dtype)
        return grad.view(ctx.shape), None, None, None, None
