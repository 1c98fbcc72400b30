"""The attention core: each token looks at itself and the earlier tokens of its span, such as its document.

    b rows   s queries   m keys   h query heads   n key/value heads   g = h/n query heads that share one   e head dim
    w window: where a layer has one, a token sees the last w keys only, its own among them

Two ways to the same numbers: torch's fused kernels, and, on a CPU, where those are slow, blocks of plain
matmuls; which of them, the kernels say (ops/kernels.py). Neither keeps anything of size s × s for backward. Under a
window either multiplies a piece of the queries with the keys that they reach, so that work goes by s · w:

    key      0 1 2 3 4 5 6 7        s = m = 8, w = 3; the second of two pieces of 4 queries
    query 4  · · ▪ ▪ ▪ x x x        · never multiplied
          5  · · x ▪ ▪ ▪ x x        x masked: two triangles, of keys before the window and of later ones
          6  · · x x ▪ ▪ ▪ x
          7  · · x x x ▪ ▪ ▪
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from nanotron.batch import Span, Spans
from nanotron.ops.gemm import add_gemm, gemm
from nanotron.ops.kernels import Kernels

_HALF = (torch.bfloat16, torch.float16)
LONG = 768
"""Tokens from which on float32 matmuls are large enough to be made one by one, which oneDNN is best at."""


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans | None, *, kernels: Kernels, window: int | None = None
) -> Tensor:
    """Scaled dot-product attention of each token to the keys of its span up to itself (arXiv 1706.03762).

    q [b, s, h, e]; k, v [b, m, n, e], h a multiple of n; None for ``spans``: each row is one. Returns [b, s, h, e].
    ``window``: of those keys, how many of the last are seen; None: all.
    In generation k and v begin with m − s tokens of earlier calls.
    """
    if kernels == "accelerator" and _is_for_varlen(q, k, v, spans, window):
        return _varlen(q, k, v, spans, window)
    attend = partial(attend_span, window=window, kernels=kernels)
    if spans is None:
        return attend(q, k, v)
    return joined([attend(q[of_q], k[of_k], v[of_k]) for of_q, of_k in each_span(spans)], q)


def _is_for_varlen(q: Tensor, k: Tensor, v: Tensor, spans: Spans | None, window: int | None) -> bool:
    """Whether flash attention to rows of many lengths takes this: documents or a window, each token its own key."""
    s, e = q.shape[1], q.shape[-1]
    fits = q.dtype in _HALF and e == v.shape[-1] and e % 8 == 0 and e <= 256
    if not (fits and _has_flash(q.device) and s == k.shape[1]):
        return False
    if spans is None:
        return window is not None and window < s
    return all((span.q_lo, span.q_hi) == (span.k_lo, span.k_hi) for row in set(spans) for span in row)


@cache
def _has_flash(device: torch.device) -> bool:
    return device.type == "meta" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))


def _varlen(q: Tensor, k: Tensor, v: Tensor, spans: Spans | None, window: int | None) -> Tensor:
    """Attention of all rows in one kernel, which needs no mask: q [b, s, h, e]; k, v [b, s, n, e] -> [b, s, h, e].

    It is told where each span begins in the tokens of all rows.
    """
    from torch.nn.attention.varlen import varlen_attn  # imports torch._dynamo: seconds, on every rank

    rows, length = q.shape[:2]
    starts, longest = _starts(spans or ((Span(0, length, 0, length),),) * rows, length, q.device)
    attended = varlen_attn(
        q.flatten(0, 1),  # [b, s, h, e] -> [b·s, h, e]
        k.flatten(0, 1),
        v.flatten(0, 1),
        starts,
        starts,
        longest,
        longest,
        window_size=(-1 if window is None else window - 1, 0),  # keys before a token's own, and after it
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return cast(Tensor, attended).view(q.shape)


@lru_cache(maxsize=64)
def _starts(spans: Spans, length: int, device: torch.device) -> tuple[Tensor, int]:
    """Where the spans of rows of ``length`` begin, and the last ends, and the longest span: once for all layers."""
    starts = [row * length + span.q_lo for row, own in enumerate(spans) for span in own]
    ends = torch.tensor([*starts, len(spans) * length], dtype=torch.int32, pin_memory=device.type == "cuda")
    longest = max(span.q_hi - span.q_lo for own in spans for span in own)
    return ends.to(device, non_blocking=True), longest


def each_span(spans: Spans) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """The rows and tokens of each span's queries, and of its keys: rows that are alike go together."""
    alike = len(set(spans)) == 1
    for i, row in enumerate(spans[:1] if alike else spans):
        rows = slice(None) if alike else slice(i, i + 1)
        for q_lo, q_hi, k_lo, k_hi in row:
            yield (rows, slice(q_lo, q_hi)), (rows, slice(k_lo, k_hi))


def joined(parts: list[Tensor], q: Tensor) -> Tensor:
    """What the spans of q [b, s, h, e] give, one after another: [b, s, h, e]."""
    return torch.cat(parts, dim=1).view(q.shape)  # [b, s, h, e], or of rows that are not alike [1, b·s, h, e]


def by_log_sums(q: Tensor, k: Tensor, window: int | None, kernels: Kernels) -> bool:
    """Whether a span is attended to by ``flash``: a long one in float32 on a CPU without oneDNN.

    Not under a window, which the kernel would take as a mask.
    """
    seen = window is None or window >= k.shape[1]
    return kernels == "cpu" and q.dtype == torch.float32 and q.shape[1] >= LONG and seen


def attend_span(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, kernels: Kernels, only_gradient: bool = False
) -> Tensor:
    """Attention over whole spans: q [b, s, h, e]; k, v [b, m, n, e]; query i sees keys [0, m − s + i] -> [b, s, h, e].

    Of these, the last ``window``. Blocks are faster than torch's kernel on a CPU, but for single queries, and where
    ``by_log_sums`` says so.
    ``only_gradient``: nobody reads the values, backward is all that is wanted: where it needs none, there are none.
    """
    if by_log_sums(q, k, window, kernels):
        by_flash: Tensor = _Flash.apply(q, k, v)  # type: ignore[no-untyped-call]
        return by_flash
    if window is not None:
        k, v = (x[:, max(0, x.shape[1] - q.shape[1] - window + 1) :] for x in (k, v))  # what the first query reaches
        window = window if window < k.shape[1] else None
    if kernels == "accelerator" and window is not None:
        return _fused_pieces(q, k, v, window)
    if q.shape[1] == 1 or kernels == "accelerator":
        return _fused(q, k, v)
    attended: Tensor = _BlockCausal.apply(q, k, v, window, kernels, only_gradient)  # type: ignore[no-untyped-call]
    return attended


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same by torch's own choice of kernel; ``mask`` [s, m] is added to the scores, instead of the causal one."""
    s, m, grouped = q.shape[1], k.shape[1], q.shape[2] != k.shape[2]
    if grouped and not q.is_cpu and (mask is not None or q.dtype not in _HALF):
        # only flash attention, which takes neither, knows groups; torch would go on to the way that keeps all scores
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        grouped = False
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, h, e] -> [b, h, s, e]
    if mask is None and 1 < s < m:
        return last_queries(q, k, v, grouped=grouped).transpose(1, 2)
    causal = mask is None and 1 < s == m
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def last_queries(q: Tensor, k: Tensor, v: Tensor, *, grouped: bool) -> Tensor:
    """Of the last s of m tokens, as torch's kernels take it: q [b, h, s, e]; k, v [b, n, m, e] -> [b, h, s, e].

    A mask is written out only where no kernel takes the shape, as on a CPU.
    """
    from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo: seconds, on every rank

    return F.scaled_dot_product_attention(q, k, v, causal_lower_right(q.shape[2], k.shape[2]), enable_gqa=grouped)


def _fused_pieces(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The same under a window, piece of queries by piece, all by parts of one mask: its size goes by the window.

    A piece takes one key more than it sees, for kernels like sizes that are even.
    """
    s, m = q.shape[1], k.shape[1]
    size = min(s, max(256, min(window, 1024)))
    hidden = torch.full((size, size + window), -torch.inf, dtype=q.dtype, device=q.device)
    mask = hidden.tril() + hidden.triu(window + 1)  # query i of a piece sees its keys i + 1 to i + window
    parts = []
    for lo in range(0, s, size):
        queries = min(size, s - lo)
        last = m - s + lo + queries
        first = max(0, last - queries - window)
        part = mask[:queries, queries + window - (last - first) : queries + window]
        parts.append(_fused(q[:, lo : lo + queries], k[:, first:last], v[:, first:last], part))
    return torch.cat(parts, dim=1)


def flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of the last s of m tokens by torch's kernel for CPUs, and the log Σ exp of each query's scores.

    q [b, s, h, e]; k, v [b, m, n, e] -> [b, s, h, e], [b, h, s]. The kernel knows the causal mask of a square only: the
    m − s keys that all queries see are attended to apart, and what that gives is merged by the log Σ exp.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, h, e] -> [b, h, s, e], [b, m, n, e] -> [b, n, m, e]
    seen = k.shape[2] - q.shape[2]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sum = kernel(q, k[:, :, seen:], v[:, :, seen:], is_causal=True)  # [b, h, s, e], [b, h, s]
    if seen:
        more, its_log_sum = kernel(q, k[:, :, :seen], v[:, :, :seen])
        total = torch.logaddexp(log_sum, its_log_sum)
        out.mul_((log_sum - total).exp()[..., None]).add_(more.mul_((its_log_sum - total).exp()[..., None]))
        log_sum = total
    return out.transpose(1, 2), log_sum


def flash_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *result: Tensor) -> tuple[Tensor, ...]:
    """The gradients of q, k and v from that of what ``flash`` gave as ``result``: nothing is attended to again."""
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, result[0]))
    seen = k.shape[2] - q.shape[2]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = kernel(grad, q, k[:, :, seen:], v[:, :, seen:], out, result[1], 0.0, True)
    q_grad, k_grad, v_grad = (x.transpose(1, 2) for x in grads)
    if seen:
        grads = kernel(grad, q, k[:, :, :seen], v[:, :, :seen], out, result[1], 0.0, False)
        more, k_more, v_more = (x.transpose(1, 2) for x in grads)
        return q_grad + more, torch.cat([k_more, k_grad], 1), torch.cat([v_more, v_grad], 1)
    return q_grad, k_grad, v_grad


class _Flash(Function):
    """``flash`` with its gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, log_sum = flash(q, k, v)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return flash_gradients(grad, *ctx.saved_tensors)


class _BlockCausal(Function):
    """Causal attention by blocks of queries: tokens [lo, hi) multiply with keys [0, m − s + hi) only.

    Under a window, with those from m − s + lo − window + 1 on.

    The g query heads of a key/value head are one matrix, token by token, and a block is a slice of it. Backward
    computes each block's probabilities again; what was attended it does not need.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, kernels: Kernels, only_gradient: bool
    ) -> Tensor:
        ctx.scale, ctx.q_shape, ctx.kv_shape = q.shape[-1] ** -0.5, q.shape, k.shape
        ctx.window, ctx.kernels = window, kernels
        q = _heads_first(q, k.shape[2], ctx.scale)  # [b, s, h, e] -> [b·n, s·g, e]
        k, v = (_heads_first(x, x.shape[2]) for x in (k, v))  # [b, m, n, e] -> [b·n, m, e]
        ctx.save_for_backward(q, k, v)
        out = torch.empty_like(q)
        if only_gradient:
            return _tokens_first(out, ctx.q_shape)
        for q_, k_, v_, out_ in _parts(q, k, v, out):
            for size, rows, keys in _blocks(q_, k_, ctx.q_shape[1], window):
                probabilities = _probabilities(q_[:, rows], k_[:, keys], size, window, kernels)  # [.., rows, keys]
                out_[:, rows] = _times(probabilities, v_[:, keys], kernels)
        return _tokens_first(out, ctx.q_shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v), window, kernels = ctx.saved_tensors, ctx.window, ctx.kernels
        grad = _heads_first(grad, ctx.kv_shape[2])
        precision = torch.promote_types(k.dtype, torch.float32)
        q_grad = torch.empty_like(q)
        k_grad, v_grad = (torch.zeros_like(x, dtype=precision) for x in (k, v))  # sums over blocks
        for q_, k_, v_, grad_, q_grad_, k_grad_, v_grad_ in _parts(q, k, v, grad, q_grad, k_grad, v_grad):
            for size, rows, keys in _blocks(q_, k_, ctx.q_shape[1], window):
                probabilities = _probabilities(q_[:, rows], k_[:, keys], size, window, kernels)
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
            None,
            None,
        )


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """What is multiplied at once of [b·n, …] tensors, k second: all; where sequences are long, each matrix alone."""
    alone = tensors[1].shape[1] >= LONG and tensors[1].dtype == torch.float32
    return zip(*[torch.split(x, 1) if alone else [x] for x in tensors], strict=True)


def _blocks(q: Tensor, k: Tensor, s: int, window: int | None) -> Iterator[tuple[int, slice, slice]]:
    """Tokens of a block, its rows of q [.., s·g, e], and the keys that they see of k [.., m, e]."""
    g, m = q.shape[1] // s, k.shape[1]
    most = 128 if m >= LONG else 32 if q.dtype == torch.float32 else 64  # by measurement
    for lo in range(0, s, most):
        hi = min(lo + most, s)
        first = 0 if window is None else max(0, m - s + lo - window + 1)
        yield hi - lo, slice(lo * g, hi * g), slice(first, m - s + hi)


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


def _probabilities(q: Tensor, k: Tensor, size: int, window: int | None, kernels: Kernels) -> Tensor:
    """Softmax of a block's scores: q [.., size·g, e], k [.., m, e], of which it is the last -> [.., size·g, m]."""
    g, m = q.shape[1] // size, k.shape[1]
    later, earlier = _triangles(size, g, q.dtype)
    scores = _times(q, k.transpose(1, 2), kernels)
    scores[..., -size:].add_(later)
    clear = size if window is None else size + window - 1 - m  # how many of the queries reach back to the first key
    if (cut := size - clear) > 1:
        scores[:, clear * g :, :cut].add_(earlier[: cut * g, :cut])
    return scores.softmax(-1)


def _times(a: Tensor, b: Tensor, kernels: Kernels) -> Tensor:
    """Batched a · b: [.., l, m] and [.., m, n] -> [.., l, n]."""
    if a.shape[0] == 1:
        return gemm(a[0], b[0].t(), kernels=kernels)[None]
    return torch.bmm(a, b)


def _add_times(total: Tensor, left: Tensor, right: Tensor, kernels: Kernels) -> None:
    """total += leftᵀ · right: total [.., m, n], left [.., l, m], right [.., l, n]."""
    if total.shape[0] == 1:
        add_gemm(total[0], left[0], right[0], kernels=kernels)
    else:
        total += torch.bmm(left.transpose(1, 2), right)  # baddbmm_ into a slice goes matrix by matrix, on one thread


@lru_cache(maxsize=8)
def _triangles(size: int, queries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """−∞ where a key is later than the query, or earlier, else 0, for ``size`` tokens: 2 × [size·queries, size]."""
    hidden = torch.full((size, size), -torch.inf, dtype=dtype)
    return hidden.triu(1).repeat_interleave(queries, 0), hidden.tril(-1).repeat_interleave(queries, 0)
