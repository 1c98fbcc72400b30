"""Attention by blocks of plain matmuls against torch's own, and what it keeps for backward."""

from __future__ import annotations

from math import prod
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers.masking_utils import sliding_window_causal_mask_function

from nanotron.batch import Span, document_spans
from nanotron.ops import attention
from nanotron.ops.attention import LONG, attend_span, causal_attention
from nanotron.ops.kernels import Kernels

by_each = pytest.mark.parametrize("kernels", get_args(Kernels))


def inputs(rows: int, length: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(rows, length, count, 16) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def value_and_grads(function, q, k, v, grad):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("kernels", ["accelerator", "cpu"])  # with oneDNN, short rows go the way they go with MKL
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
def test_attention_and_its_gradients_equal_torchs(length, heads, kv_heads, dtype, tolerance, kernels):
    q, k, v, grad = inputs(2, length, heads, kv_heads, dtype)
    found = value_and_grads(lambda *x: causal_attention(*x, None, kernels=kernels), q, k, v, grad)
    expected = value_and_grads(reference, q, k, v, grad)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
@by_each
def test_long_sequences_have_the_same_numbers_by_any_kernels(dtype, tolerance, kernels):
    q, k, v, grad = inputs(2, LONG + 150, 4, 2, dtype)
    found = value_and_grads(lambda *x: causal_attention(*x, None, kernels=kernels), q, k, v, grad)
    for ours, theirs in zip(found, value_and_grads(reference, q, k, v, grad), strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=tolerance * scale)


@by_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [96, 192, LONG])
def test_nothing_is_kept_for_backward_that_grows_with_the_square_of_the_length(length, dtype, kernels):
    q, k, v, _ = inputs(1, length, 4, 2, dtype)
    kept: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        causal_attention(q.requires_grad_(), k, v, None, kernels=kernels)
    by_torch = kernels == "accelerator" or (kernels == "cpu" and dtype == torch.float32 and length == LONG)
    result_and_log_sums = 4 * 16 + 4 if by_torch else 0  # of a token: torch's kernel keeps these, too
    assert sum(kept) == length * (16 * (4 + 2 + 2) + result_and_log_sums)


@by_each
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("length", [100, LONG + 50])
def test_who_asks_for_the_gradient_only_gets_the_same_bits_and_no_values_from_blocks(kernels, length, window):
    q, k, v, grad = inputs(2, length, 4, 2, torch.float32)

    def gradients(only_gradient):
        def attend(*x):
            return attend_span(*x, kernels=kernels, window=window, only_gradient=only_gradient)

        with FlopCounterMode(display=False) as counter:
            found = value_and_grads(attend, q, k, v, grad)[1:]
        return found, counter.get_total_flops()

    (whole, most), (alone, least) = gradients(False), gradients(True)
    assert all(map(torch.equal, whole, alone))
    if length < LONG and kernels != "accelerator":
        assert least == most * 5 / 7  # not the scores, nor their products with values


@by_each
def test_documents_of_a_row_do_not_see_each_other(kernels):
    q, k, v, _ = inputs(1, 100, 4, 2, torch.float64)
    together = causal_attention(q, k, v, document_spans([[0, 30, 75]], 100), kernels=kernels)
    for lo, hi in [(0, 30), (30, 75), (75, 100)]:
        alone = causal_attention(q[:, lo:hi], k[:, lo:hi], v[:, lo:hi], None, kernels=kernels)
        torch.testing.assert_close(together[:, lo:hi], alone, rtol=0, atol=1e-13)


@by_each
@pytest.mark.parametrize(("queries", "keys"), [(1, 90), (40, 130), (70, 900)])
def test_queries_that_end_a_span_see_the_keys_before_them_too(kernels, queries, keys):
    """As in generation with a cache, and as where a sequence is cut: query i of s sees keys up to m − s + i of m."""
    _, k, v, _ = inputs(2, keys, 4, 2, torch.float64)
    q, _, _, grad = inputs(2, queries, 4, 2, torch.float64)
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    def masked(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    found = value_and_grads(lambda *x: causal_attention(*x, None, kernels=kernels), q, k, v, grad)
    for ours, theirs in zip(found, value_and_grads(masked, q, k, v, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * max(1.0, float(theirs.abs().max())))


@by_each
@pytest.mark.parametrize("earlier", [1, LONG + 70])
def test_many_queries_that_end_a_span_have_the_numbers_of_a_whole_row(kernels, earlier):
    q, k, v, grad = inputs(2, earlier + LONG, 4, 2, torch.float32)
    last = slice(earlier, None)
    grad[:, :earlier] = 0
    expected = value_and_grads(reference, q, k, v, grad)
    found = value_and_grads(
        lambda q, k, v: causal_attention(q[:, last], k, v, None, kernels=kernels), q, k, v, grad[:, last]
    )
    for ours, theirs in zip(found, [expected[0][:, last], *expected[1:]], strict=True):
        torch.testing.assert_close(
            ours.double(), theirs.double(), rtol=0, atol=2e-6 * max(1.0, float(theirs.abs().max()))
        )


@by_each
def test_a_span_of_other_keys_than_its_queries_places(kernels):
    """Queries [40, 100) of a row that see keys [10, 100) of it, and [0, 40) that see themselves."""
    q, k, v, _ = inputs(1, 100, 4, 2, torch.float64)
    spans = ((Span(0, 40, 0, 40), Span(40, 100, 10, 100)),)
    found = causal_attention(q, k, v, spans, kernels=kernels)
    later = causal_attention(q[:, 40:], k[:, 10:], v[:, 10:], None, kernels=kernels)
    torch.testing.assert_close(found[:, 40:], later, rtol=0, atol=1e-13)


WINDOWED = [(60, 60, 1), (60, 60, 7), (200, 200, 130), (1, 90, 12), (40, 130, 50), (40, 130, 129), (600, 900, 300)]


@by_each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("queries", "keys", "window"), [*WINDOWED, (LONG + 150, LONG + 150, 20)])
def test_under_a_window_a_token_sees_itself_and_the_last_before_it(kernels, dtype, queries, keys, window):
    """By the mask that transformers makes: key > query − window, and not later."""
    _, k, v, _ = inputs(2, keys, 4, 2, dtype)
    q, _, _, grad = inputs(2, queries, 4, 2, dtype)
    places = torch.arange(keys - queries, keys)[:, None]
    sees = sliding_window_causal_mask_function(window)
    mask = torch.ones(queries, keys, dtype=torch.bool) & sees(0, 0, places, torch.arange(keys))

    def masked(q, k, v):
        q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    found = value_and_grads(lambda *x: causal_attention(*x, None, kernels=kernels, window=window), q, k, v, grad)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for ours, theirs in zip(found, value_and_grads(masked, q, k, v, grad), strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=tolerance * scale)


@by_each
def test_a_window_does_not_reach_beyond_its_document(kernels):
    q, k, v, _ = inputs(2, 100, 4, 2, torch.float64)
    spans = document_spans([[0, 30, 75], [0, 50]], 100)
    found = causal_attention(q, k, v, spans, kernels=kernels, window=20)
    for row, lo, hi in [(0, 0, 30), (0, 30, 75), (0, 75, 100), (1, 0, 50), (1, 50, 100)]:
        part = slice(row, row + 1), slice(lo, hi)
        alone = causal_attention(q[part], k[part], v[part], None, kernels=kernels, window=20)
        torch.testing.assert_close(found[part], alone, rtol=0, atol=1e-13)


@by_each
def test_work_and_memory_under_a_window_go_by_the_length_and_not_by_its_square(kernels):
    def largest_and_flops(length: int) -> tuple[int, int]:
        q, k, v, grad = inputs(1, length, 2, 1, torch.float32)
        with _Largest() as made, FlopCounterMode(display=False) as counter:
            causal_attention(q.requires_grad_(), k, v, None, kernels=kernels, window=32).backward(grad)
        return made.numel, counter.get_total_flops()

    (_, few), (largest, many) = largest_and_flops(2048), largest_and_flops(8192)
    assert largest == 8192 * 2 * 16, "something is larger than the queries"
    if kernels == "cpu":  # torch counts plain matmuls only
        assert 0 < many <= 4.1 * few


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that anything makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return result


@pytest.mark.parametrize(("documents", "window"), [(True, None), (False, 20), (True, 20)])
def test_on_a_device_documents_and_windows_are_one_kernel_that_keeps_nothing_by_the_square(documents, window):
    """On "meta", for which torch has the kernel's shapes: its other attention there keeps all scores."""
    rows, length = 2, 96
    q, k, v, _ = (x.to("meta") for x in inputs(rows, length, 4, 2, torch.bfloat16))
    spans = document_spans([[0, 40, 41], [0]], length) if documents else None
    kept: list[tuple[int, ...]] = []

    def pack(x: torch.Tensor) -> tuple[int, ...]:
        kept.append(tuple(x.shape))
        return tuple(x.shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.empty), _Largest() as made:
        attended = causal_attention(q.requires_grad_(), k, v, spans, kernels="accelerator", window=window)
    assert attended.shape == q.shape
    assert max(map(prod, kept)) == made.numel == rows * length * 4 * 16, "something is larger than the queries"


def attention_by_lengths(q, k, v, starts, key_starts, longest, longest_key, *, window_size, enable_gqa):
    """``varlen_attn`` as its documentation has it, document by document."""
    lengths = starts.diff().tolist()
    assert starts.dtype == torch.int32
    assert (starts is key_starts, longest, longest_key) == (True, max(lengths), max(lengths))
    before, after = window_size
    parts = []
    for document in zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q, k, v)), strict=True):  # [h, tokens, e]
        tokens = torch.arange(document[0].shape[1])
        distance = tokens[:, None] - tokens
        mask = (distance >= -after) & (distance <= before if before >= 0 else True)
        attended = F.scaled_dot_product_attention(*document, attn_mask=mask, enable_gqa=enable_gqa)
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("documents", "window"), [(True, None), (False, 20), (True, 20)])
def test_the_kernel_for_many_lengths_is_told_what_each_token_sees(monkeypatch, documents, window, kv_heads):
    rows, length = 2, 96
    q, k, v, grad = inputs(rows, length, 4, kv_heads, torch.bfloat16)
    spans = document_spans([[0, 40, 41], [0]], length) if documents else None

    def attend(*x):
        return causal_attention(*x, spans, kernels="accelerator", window=window)

    expected = value_and_grads(attend, q, k, v, grad)
    monkeypatch.setattr(attention, "_has_flash", lambda device: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attention_by_lengths)
    monkeypatch.setattr(attention, "attend_span", None)  # the other way there is
    for ours, theirs in zip(value_and_grads(attend, q, k, v, grad), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=2e-2 * float(theirs.abs().max()))


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.float32, 20), (torch.bfloat16, 20)])
def test_kernels_of_a_device_that_know_no_groups_get_as_many_keys_as_queries(monkeypatch, dtype, window):
    """Flash attention alone knows them, and takes half precision and no mask; torch then falls to what keeps scores."""
    q, k, v, _ = (x.to("meta") for x in inputs(1, 96, 4, 2, dtype))
    asked = []

    def attention_of_torch(q, k, v, *_, enable_gqa, **options):
        asked.append((k.shape[1], v.shape[1], enable_gqa))
        return torch.empty_like(q)

    monkeypatch.setattr(attention, "_has_flash", lambda device: False)  # as on consumers' older cards
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention_of_torch)
    causal_attention(q, k, v, None, kernels="accelerator", window=window)
    assert set(asked) == {(4, 4, False)}
