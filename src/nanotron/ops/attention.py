"""The attention core: each token looks at itself and the earlier tokens of its span, such as its document.

    b rows   s queries   m keys   h query heads   n key/value heads   g = h/n query heads that share one   e head dim

Two ways to the same numbers: torch's fused kernels, and, on a CPU, where those are slow, blocks of plain matrix
products; which of them, the kernels say (ops/kernels.py). Neither keeps anything of size s × s for backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from nanotron.batch import Spans
from nanotron.ops.gemm import add_product, product
from nanotron.ops.kernels import Kernels

LONG = 768
"""Tokens from which on float32 products are large enough to be made one by one, which oneDNN is best at."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans | None, *, kernels: Kernels) -> Tensor:
    """Scaled dot-product attention of each token to the keys of its span up to itself (arXiv 1706.03762).

    q [b, s, h, e]; k, v [b, m, n, e], h a multiple of n; None for ``spans``: each row is one. Returns [b, s, h, e].
    In generation k and v begin with m − s tokens of earlier calls.
    """
    if spans is None:
        return _attend(q, k, v, kernels)
    if len(set(spans)) == 1:  # all rows alike
        parts = [_attend(q[:, q_lo:q_hi], k[:, lo:hi], v[:, lo:hi], kernels) for q_lo, q_hi, lo, hi in spans[0]]
        return torch.cat(parts, dim=1)
    rows = [
        [_attend(q[i, None, q_lo:q_hi], k[i, None, lo:hi], v[i, None, lo:hi], kernels) for q_lo, q_hi, lo, hi in row]
        for i, row in enumerate(spans)
    ]
    return torch.cat([torch.cat(parts, dim=1) for parts in rows])


def _attend(q: Tensor, k: Tensor, v: Tensor, kernels: Kernels) -> Tensor:
    """Attention over whole spans: q [b, s, h, e]; k, v [b, m, n, e]; query i sees keys [0, m − s + i] -> [b, s, h, e].

    Blocks are faster than the kernel on a CPU, but for long float32 rows without oneDNN, and for single queries.
    """
    s, m = q.shape[1], k.shape[1]
    long_float32 = kernels == "cpu" and q.dtype == torch.float32 and s >= LONG
    if s == 1 or kernels == "accelerator" or (long_float32 and s == m):
        return _fused(q, k, v)
    attended: Tensor = _BlockCausal.apply(q, k, v, kernels)  # type: ignore[no-untyped-call]
    return attended


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by torch's own choice of kernel."""
    s, m, grouped = q.shape[1], k.shape[1], q.shape[2] != k.shape[2]
    bias = None
    if 1 < s < m:
        from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo: seconds, on every rank

        bias = causal_lower_right(s, m)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, h, e] -> [b, h, s, e]
    return F.scaled_dot_product_attention(q, k, v, bias, is_causal=1 < s == m, enable_gqa=grouped).transpose(1, 2)


class _BlockCausal(Function):
    """Causal attention by blocks of queries: tokens [lo, hi) multiply with keys [0, m − s + hi) only.

    The g query heads of a key/value head are one matrix, token by token, and a block is a slice of it. Backward
    computes each block's probabilities again.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernels: Kernels) -> Tensor:
        ctx.scale, ctx.q_shape, ctx.kv_shape, ctx.kernels = q.shape[-1] ** -0.5, q.shape, k.shape, kernels
        q = _heads_first(q, k.shape[2], ctx.scale)  # [b, s, h, e] -> [b·n, s·g, e]
        k, v = (_heads_first(x, x.shape[2]) for x in (k, v))  # [b, m, n, e] -> [b·n, m, e]
        out = torch.empty_like(q)
        for q_, k_, v_, out_ in _parts(q, k, v, out):
            for size, rows, keys in _blocks(q_, k_, ctx.q_shape[1]):
                probabilities = _probabilities(q_[:, rows], k_[:, keys], size, kernels)  # [.., rows, keys]
                out_[:, rows] = _times(probabilities, v_[:, keys], kernels)
        ctx.save_for_backward(q, k, v)
        return _tokens_first(out, ctx.q_shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (q, k, v), kernels = ctx.saved_tensors, ctx.kernels
        grad = _heads_first(grad, ctx.kv_shape[2])
        precision = torch.promote_types(k.dtype, torch.float32)
        q_grad = torch.empty_like(q)
        k_grad, v_grad = (torch.zeros_like(x, dtype=precision) for x in (k, v))  # sums over blocks
        for q_, k_, v_, grad_, q_grad_, k_grad_, v_grad_ in _parts(q, k, v, grad, q_grad, k_grad, v_grad):
            for size, rows, keys in _blocks(q_, k_, ctx.q_shape[1]):
                probabilities = _probabilities(q_[:, rows], k_[:, keys], size, kernels)
                _add_times(v_grad_[:, keys], probabilities, grad_[:, rows], kernels)
                seen = _times(grad_[:, rows], v_[:, keys].transpose(1, 2), kernels)
                scores_grad = torch._softmax_backward_data(seen, probabilities, -1, seen.dtype)
                q_grad_[:, rows] = _times(scores_grad, k_[:, keys], kernels)
                _add_times(k_grad_[:, keys], scores_grad, q_[:, rows], kernels)
        return (
            _tokens_first(q_grad.mul_(ctx.scale), ctx.q_shape),
            _tokens_first(k_grad.to(k.dtype), ctx.kv_shape),
            _tokens_first(v_grad.to(v.dtype), ctx.kv_shape),
            None,
        )


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """What is multiplied at once of [b·n, …] tensors, k second: all; where sequences are long, each matrix alone."""
    alone = tensors[1].shape[1] >= LONG and tensors[1].dtype == torch.float32
    return zip(*(torch.split(x, 1) if alone else [x] for x in tensors), strict=True)


def _blocks(q: Tensor, k: Tensor, s: int) -> Iterator[tuple[int, slice, slice]]:
    """Tokens of a block, its rows of q [.., s·g, e], and the keys that they see of k [.., m, e]."""
    g, m = q.shape[1] // s, k.shape[1]
    most = 128 if m >= LONG else 32 if q.dtype == torch.float32 else 64  # by measurement
    for lo in range(0, s, most):
        hi = min(lo + most, s)
        yield hi - lo, slice(lo * g, hi * g), slice(0, m - s + hi)


def _heads_first(x: Tensor, kv_heads: int, scale: float = 1.0) -> Tensor:
    """[b, s, h, e] -> [b·n, s·g, e], times ``scale``, in memory of its own."""
    b, s, h, e = x.shape
    moved = x.reshape(b, s, kv_heads, h // kv_heads, e).transpose(1, 2)  # [b, n, s, g, e]
    out = x.new_empty(moved.shape)
    torch.mul(moved, scale, out=out) if scale != 1.0 else out.copy_(moved)
    return out.view(b * kv_heads, -1, e)


def _tokens_first(x: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """[b·n, s·g, e] -> ``shape`` [b, s, h, e], contiguous."""
    b, s, _, e = shape
    return x.view(b, x.shape[0] // b, s, -1, e).transpose(1, 2).reshape(shape)


def _probabilities(q: Tensor, k: Tensor, size: int, kernels: Kernels) -> Tensor:
    """Softmax of a block's scores: q [.., size·g, e], k [.., m, e], of which it is the last -> [.., size·g, m]."""
    scores = _times(q, k.transpose(1, 2), kernels)
    scores[..., -size:].add_(_later(size, q.shape[1] // size, scores.dtype))
    return scores.softmax(-1)


def _times(a: Tensor, b: Tensor, kernels: Kernels) -> Tensor:
    """Batched a · b: [.., l, m] and [.., m, n] -> [.., l, n]."""
    if a.shape[0] == 1:
        return product(a[0], b[0].t(), kernels=kernels)[None]
    return torch.bmm(a, b)


def _add_times(total: Tensor, left: Tensor, right: Tensor, kernels: Kernels) -> None:
    """total += leftᵀ · right: total [.., m, n], left [.., l, m], right [.., l, n]."""
    if total.shape[0] == 1:
        add_product(total[0], left[0], right[0], kernels=kernels)
    else:
        total += torch.bmm(left.transpose(1, 2), right)  # baddbmm_ into a slice goes matrix by matrix, on one thread


@lru_cache(maxsize=8)
def _later(size: int, queries: int, dtype: torch.dtype) -> Tensor:
    """−∞ where a key is later than the query, else 0, for blocks of ``size`` tokens: [size·queries, size]."""
    return torch.full((size, size), -torch.inf, dtype=dtype).triu_(1).repeat_interleave(queries, 0)
