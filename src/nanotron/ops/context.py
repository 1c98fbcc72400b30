"""Attention over sequences that are cut over the context-parallel ranks.

    b rows   s tokens of a whole row   c context-parallel ranks   h query heads   n key/value heads   e head dim

A rank holds pieces r and 2c−1−r of the 2c that a row is cut into, an early one and a late one, so that causal attention
is equal work for all; elsewhere in the model a token needs no other. Two ways to bring queries and keys together:

    ALL_GATHER   every rank gathers all keys and values and attends with its own queries; for any number of heads
    ALL_TO_ALL   meanwhile heads are cut, not the sequence (arXiv 2309.14509): fewer bytes where there are many ranks
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from nanotron.batch import Spans
from nanotron.ops.attention import attend_span, by_log_sums, causal_attention, each_span, flash, flash_gradients, joined
from nanotron.ops.kernels import Kernels
from nanotron.parallel.comm import all_gather, exchange, reduce_scatter, with_transpose
from nanotron.parallel.mesh import Mesh

ContextMode = Literal["ALL_GATHER", "ALL_TO_ALL"]


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans | None,
    mesh: Mesh,
    *,
    mode: ContextMode,
    kernels: Kernels,
    window: int | None = None,
    gather_again: bool = True,
) -> Tensor:
    """``causal_attention`` of rows cut over cp: q [b, s/c, h, e]; k, v [b, s/c, n, e] -> [b, s/c, h, e].

    ``spans``: queries count in this rank's tokens and keys in the whole row's (ALL_GATHER), or both in the whole row's.
    ``gather_again``: keep this rank's keys and values only until backward. A layer that is computed again keeps nothing
    anyhow, and need not.
    """
    attend = partial(causal_attention, spans=spans, kernels=kernels, window=window)
    if mesh.size("cp") == 1:
        return attend(q, k, v)
    if mode == "ALL_GATHER" and gather_again:
        attended: Tensor = _GatheredAttention.apply(q, k, v, spans, mesh, window, kernels)  # type: ignore[no-untyped-call]
        return attended
    if mode == "ALL_GATHER":
        whole = with_transpose(torch.stack([k, v]), partial(_gathered, mesh=mesh), partial(_scattered, mesh=mesh))
        return attend(q, *whole.unbind())
    ranks = mesh.size("cp")
    q, k, v = (in_order(exchange(x, mesh, "cp", split=2, join=1), ranks) for x in (q, k, v))  # [b, s, h/c, e]
    return exchange(by_rank(attend(q, k, v), ranks), mesh, "cp", split=1, join=2)  # [b, s, h/c, e] -> [b, s/c, h, e]


class _GatheredAttention(Function):
    """Forward: all-gather of keys and values. Backward: gathers them again, then reduce-scatter of their gradients.

    Only this rank's part is kept in between, or activations would not shrink with the number of ranks. What was
    attended is kept for ``flash_gradients`` only, the same memory as the projection after it keeps; for other spans
    backward attends again, where a kernel's backward needs that.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Spans, mesh: Mesh, window: int | None, kernels: Kernels
    ) -> Tensor:
        part = torch.stack([k, v])  # [2, b, s/c, n, e], so that nothing that v is a view of is kept
        ctx.spans, ctx.mesh, ctx.window, ctx.kernels = spans, mesh, window, kernels
        k, v = _gathered(part, mesh)
        parts = []
        for of_q, of_k in each_span(spans):
            span = q[of_q], k[of_k], v[of_k]
            straight = by_log_sums(*span[:2], window, kernels)
            parts.append(flash(*span) if straight else (attend_span(*span, window=window, kernels=kernels), None))
        attended, log_sums = joined([part for part, _ in parts], q), [log_sum for _, log_sum in parts]
        kept = attended if any(log_sum is not None for log_sum in log_sums) else None
        ctx.save_for_backward(q, part, kept, *log_sums)
        return attended

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, part, attended, *log_sums = ctx.saved_tensors
        k, v = whole = _gathered(part, ctx.mesh)
        q_grad = torch.empty_like(q)
        sums = torch.zeros_like(whole, dtype=torch.promote_types(q.dtype, torch.float32))  # over spans
        for (of_q, of_k), log_sum in zip(each_span(ctx.spans), log_sums, strict=True):
            span = q[of_q], k[of_k], v[of_k]
            if log_sum is not None:
                grads = flash_gradients(grad[of_q], *span, attended[of_q], log_sum)
            else:
                span = tuple(x.detach().requires_grad_() for x in span)
                with torch.enable_grad():
                    again = attend_span(*span, window=ctx.window, kernels=ctx.kernels, only_gradient=True)
                grads = torch.autograd.grad(again, span, grad[of_q])
            q_grad[of_q] = grads[0]
            for total, of_span in zip(sums, grads[1:], strict=True):
                total[of_k].add_(of_span)
        return q_grad, *_scattered(sums.to(part.dtype), ctx.mesh).unbind(), None, None, None, None


def _gathered(part: Tensor, mesh: Mesh) -> Tensor:
    """The whole row's keys and values in order, by one collective: [2, b, s/c, n, e] -> [2, b, s, n, e]."""
    return in_order(all_gather(part, mesh.group("cp"), dim=2), mesh.size("cp"), dim=2)


def _scattered(grad: Tensor, mesh: Mesh) -> Tensor:
    """The transpose: [2, b, s, n, e] of every rank -> the sum of this rank's [2, b, s/c, n, e]."""
    return reduce_scatter(by_rank(grad, mesh.size("cp"), dim=2), mesh.group("cp"), dim=2)


def in_order(x: Tensor, ranks: int, dim: int = 1) -> Tensor:
    """The pieces of a row, which lie rank by rank along ``dim``, in the row's order."""
    pieces = x.chunk(2 * ranks, dim)
    return torch.cat([pieces[2 * i] for i in range(ranks)] + [pieces[2 * i + 1] for i in reversed(range(ranks))], dim)


def by_rank(x: Tensor, ranks: int, dim: int = 1) -> Tensor:
    """The inverse of ``in_order``."""
    pieces = x.chunk(2 * ranks, dim)
    return torch.cat([piece for rank in range(ranks) for piece in (pieces[rank], pieces[2 * ranks - 1 - rank])], dim)
