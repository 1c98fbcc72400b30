"""The attention core: each token looks at itself and the earlier tokens of its document.

    b rows   s tokens   h query heads   n key/value heads   g = h/n query heads that share one   e head dim

Two ways to the same numbers: torch's fused kernels, and, where those are slow (half precision on a CPU), blocks of
plain matrix products. Neither keeps anything of size s × s for backward.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


def causal_attention(q: Tensor, k: Tensor, v: Tensor, doc_starts: Tensor | None) -> Tensor:
    """Scaled dot-product attention of each token to itself and the earlier tokens of its document (arXiv 1706.03762).

    q [b, s, h, e]; k, v [b, s, n, e], h a multiple of n; doc_starts [b, s] or None (each row is one document).
    In generation k and v [b, m, n, e] begin with m − s tokens of earlier calls. Returns [b, s, h, e].
    """
    if k.shape[1] > q.shape[1]:
        return _fused(q, k, v, _mask_with_earlier(q, k, doc_starts), is_causal=False)
    if doc_starts is None:
        return _attend(q, k, v)
    if q.device.type == "cpu":  # reading the boundaries costs nothing here, and saves the s × s mask
        return torch.stack([_attend_documents(q[i], k[i], v[i], starts) for i, starts in enumerate(doc_starts)])
    return _fused(q, k, v, document_mask(doc_starts), is_causal=False)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plainly causal attention over rows: q [b, s, h, e]; k, v [b, s, n, e] -> [b, s, h, e]."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        attended: Tensor = _BlockCausal.apply(q, k, v, 64 if q.shape[1] <= 512 else 128)  # type: ignore[no-untyped-call]
        return attended
    return _fused(q, k, v, None, is_causal=True)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool) -> Tensor:
    """torch's own choice of kernel: q [b, s, h, e]; k, v [b, m, n, e]; mask broadcasts to [b, h, s, m]."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, h, e] -> [b, h, s, e]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped).transpose(
        1, 2
    )


def document_mask(doc_starts: Tensor, earlier: int = 0) -> Tensor:
    """Which keys each query sees, its own document up to itself: doc_starts [b, s] -> [b, 1, s, earlier + s]."""
    index = torch.arange(earlier + doc_starts.shape[1], device=doc_starts.device)
    return (index[earlier:, None] >= index) & (index >= doc_starts[:, None, :, None])


def _mask_with_earlier(q: Tensor, k: Tensor, doc_starts: Tensor | None) -> Tensor | None:
    """The mask for keys [b, m, n, e] that begin before the queries [b, s, h, e]; None where all see all."""
    if doc_starts is None:
        if q.shape[1] == 1:
            return None
        doc_starts = torch.zeros(q.shape[0], q.shape[1], dtype=torch.int64, device=q.device)
    return document_mask(doc_starts, k.shape[1] - q.shape[1])


def _attend_documents(q: Tensor, k: Tensor, v: Tensor, doc_starts: Tensor) -> Tensor:
    """Attention document by document in one row: q [s, h, e], k and v [s, n, e], doc_starts [s] -> [s, h, e]."""
    starts = torch.unique_consecutive(doc_starts).tolist()
    spans = zip(starts, [*starts[1:], q.shape[0]], strict=True)
    return torch.cat([_attend(q[None, lo:hi], k[None, lo:hi], v[None, lo:hi])[0] for lo, hi in spans])


class _BlockCausal(Function):
    """Causal attention by blocks of query rows: rows [lo, hi) multiply with keys [0, hi) only.

    The g query heads of a key/value head are stacked into one matrix, so every product is a batch of b·n matrices.
    Backward computes each block's probabilities again.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        ctx.block, ctx.scale, ctx.shape = block, q.shape[-1] ** -0.5, q.shape
        q = _heads_first(q, k.shape[2], ctx.scale)  # [b, s, h, e] -> [b·n, g, s, e]
        k, v = (_heads_first(x, x.shape[2]).squeeze(1) for x in (k, v))  # [b, s, n, e] -> [b·n, s, e]
        out = torch.empty_like(q)
        for lo, hi in _spans(q.shape[2], block):
            out[:, :, lo:hi] = torch.bmm(_probabilities(q, k, lo, hi), v[:, :hi]).view(out[:, :, lo:hi].shape)
        ctx.save_for_backward(q, k, v)
        return _tokens_first(out, ctx.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        grad = _heads_first(grad, k.shape[0] // grad.shape[0])
        precision = torch.promote_types(k.dtype, torch.float32)
        q_grad = torch.empty_like(q)
        k_grad, v_grad = (torch.zeros_like(x, dtype=precision) for x in (k, v))  # sums over blocks
        for lo, hi in _spans(q.shape[2], ctx.block):
            probabilities = _probabilities(q, k, lo, hi)  # [b·n, g·(hi−lo), hi]
            rows, row_grads = (x[:, :, lo:hi].flatten(1, 2) for x in (q, grad))  # [b·n, g·(hi−lo), e]
            v_grad[:, :hi] += torch.bmm(probabilities.transpose(1, 2), row_grads)
            seen = torch.bmm(row_grads, v[:, :hi].transpose(1, 2))
            scores_grad = torch._softmax_backward_data(seen, probabilities, -1, seen.dtype)
            q_grad[:, :, lo:hi] = torch.bmm(scores_grad, k[:, :hi]).view(q[:, :, lo:hi].shape)
            k_grad[:, :hi] += torch.bmm(scores_grad.transpose(1, 2), rows)
        b, s, _, e = ctx.shape
        kv_shape = (b, s, k.shape[0] // b, e)
        return (
            _tokens_first(q_grad.mul_(ctx.scale), ctx.shape),
            _tokens_first(k_grad.to(k.dtype)[:, None], kv_shape),
            _tokens_first(v_grad.to(v.dtype)[:, None], kv_shape),
            None,
        )


def _spans(length: int, block: int) -> list[tuple[int, int]]:
    return [(lo, min(lo + block, length)) for lo in range(0, length, block)]


def _heads_first(x: Tensor, kv_heads: int, scale: float = 1.0) -> Tensor:
    """[b, s, h, e] -> [b·n, g, s, e], times ``scale``, in memory of its own."""
    b, s, h, e = x.shape
    moved = x.reshape(b, s, kv_heads, h // kv_heads, e).permute(0, 2, 3, 1, 4)
    out = x.new_empty(moved.shape)
    torch.mul(moved, scale, out=out) if scale != 1.0 else out.copy_(moved)
    return out.flatten(0, 1)


def _tokens_first(x: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """[b·n, g, s, e] -> ``shape`` [b, s, h, e], contiguous."""
    b, s, _, e = shape
    return x.view(b, -1, x.shape[1], s, e).permute(0, 3, 1, 2, 4).reshape(shape)


def _probabilities(q: Tensor, k: Tensor, lo: int, hi: int) -> Tensor:
    """Softmax of the scores of query rows [lo, hi): q [b·n, g, s, e], k [b·n, s, e] -> [b·n, g·(hi−lo), hi]."""
    scores = torch.bmm(q[:, :, lo:hi].flatten(1, 2), k[:, :hi].transpose(1, 2))
    scores.view(q.shape[0], q.shape[1], hi - lo, hi)[..., lo:] += _later(hi - lo, scores.dtype)
    return scores.softmax(-1)


@lru_cache(maxsize=8)
def _later(size: int, dtype: torch.dtype) -> Tensor:
    """−∞ where a key is later than the query, else 0: [size, size]."""
    return torch.full((size, size), -torch.inf, dtype=dtype).triu_(1)
