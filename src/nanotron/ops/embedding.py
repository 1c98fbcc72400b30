"""Token vectors, from a table whose rows are spread over tp.

b rows   s tokens of a row   t tensor-parallel ranks   d hidden size
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from nanotron.ops.linear import TensorParallel, weight_grad
from nanotron.parallel.comm import scatter_sum, sum_from


def embedding(tokens: Tensor, weight: Tensor, first_row: int, tp: TensorParallel) -> Tensor:
    """Look up token vectors in a table whose rows are spread over tp; this rank's ``weight`` starts at ``first_row``.

    tokens [b, s] -> [b, s, d], or [b, s/t, d] under sequence parallelism.
    Forward: local look-up (zeros for foreign tokens), then all-reduce or reduce-scatter. Backward: its transpose, then
    rows are added to the table's gradient.
    """
    vectors: Tensor = _Embedding.apply(tokens, weight, first_row, tp)  # type: ignore[no-untyped-call]
    if tp.sequence_parallel:
        return scatter_sum(vectors, tp.mesh, "tp", dim=1)
    return sum_from(vectors, tp.mesh, "tp")


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first_row: int, tp: TensorParallel) -> Tensor:
        rows, foreign = local_ids(tokens, first_row, weight.shape[0])
        ctx.save_for_backward(rows, foreign)
        ctx.tp, ctx.weight = tp, weight
        return F.embedding(rows, weight).masked_fill_(foreign[..., None], 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, foreign = ctx.saved_tensors
        grad = grad.masked_fill(foreign[..., None], 0)
        return None, weight_grad(ctx.tp, ctx.weight, partial(_add_rows, rows=rows, grad=grad)), None, None


def local_ids(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Ids relative to this rank's rows [first, first + count), 0 for foreign ones, and a mask of the foreign ones."""
    foreign = (ids < first) | (ids >= first + count)
    return (ids - first).masked_fill(foreign, 0), foreign


def _add_rows(buffer: Tensor, first: bool, rows: Tensor, grad: Tensor) -> None:
    if first:
        buffer.zero_()
    buffer.index_add_(0, rows.flatten(), grad.flatten(0, -2).to(buffer.dtype))
