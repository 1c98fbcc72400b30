"""Matmuls in fp8: what is rounded and how far, what is not, and that torch's kernel is asked for the same product."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from nanotron.ops.fp8 import BLOCK, E4M3, Fp8, dequantised, multiplier_of
from nanotron.ops.fused import fused
from nanotron.ops.linear import TensorParallel, linear
from nanotron.ops.weight_grads import WeightGrads
from nanotron.parallel.mesh import Mesh
from tests.models.test_gemm import normal
from tests.parity.cases import Case
from tests.parity.run import config_of, feed_of, microbatches_of, prepare
from tests.pool import Pool

REFERENCE, ON_DEVICE = Fp8("dequantised", "cpu"), Fp8("scaled_mm", "cpu")
Quantised = tuple[Tensor, Tensor]


def rows_of(x: Tensor) -> Quantised:
    return REFERENCE._quantised_rows(x)


def matrix_of(w: Tensor) -> Quantised:
    return REFERENCE._quantised_matrix(w)


def spread(scales: Tensor, height: int) -> Tensor:
    """Each number's scale."""
    return scales.repeat_interleave(height, 0).repeat_interleave(BLOCK, 1)


# ------------------------------------------------------------------------------------------------ rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("quantise", "height"), [(rows_of, 1), (matrix_of, BLOCK)])
def test_a_number_is_rounded_to_4_bits_or_to_a_step_that_its_block_has(
    quantise: Any, height: int, dtype: torch.dtype
) -> None:
    x = (normal(256, 384) * normal(256, 384, seed=1).mul(4).exp()).to(dtype)  # over twelve orders of magnitude
    values, scales = quantise(x)
    assert values.dtype == E4M3
    assert scales.shape == (256 // height, 3)
    assert scales.dtype == torch.promote_types(dtype, torch.float32)
    error = (dequantised(values, scales) - x).abs().double()
    step = spread(scales, height).double() * 2**-9  # from one subnormal number to the next
    assert bool((error <= torch.maximum(x.abs().double() / 16, step / 2) * (1 + 1e-5)).all())
    largest = values.float().abs().view(256 // height, height, 3, BLOCK).amax((1, 3))
    assert bool((largest == 448).all()), "a block uses all the range that there is"


def test_a_scale_is_of_one_rows_128_features_and_of_128_rows_of_a_weight() -> None:
    x = torch.ones(256, 256)
    x[130, 200] = 7.0
    of_rows, of_matrix = rows_of(x)[1], matrix_of(x)[1]
    assert (of_rows * 448).unique(return_counts=True)[1].tolist() == [511, 1]
    assert (of_rows[130] * 448).tolist() == pytest.approx([1, 7])
    assert (of_matrix * 448).flatten().tolist() == pytest.approx([1, 1, 1, 7])


def test_a_matrix_that_is_turned_around_has_the_same_numbers() -> None:
    w = normal(256, 384)
    values, scales = matrix_of(w)
    turned, its_scales = matrix_of(w.t())
    assert turned.is_contiguous()
    assert torch.equal(turned.t().float(), values.float())
    assert torch.equal(its_scales.t(), scales)


@pytest.mark.parametrize("quantise", [rows_of, matrix_of])
def test_zeros_stay_zeros_and_the_least_numbers_stay_finite(quantise: Any) -> None:
    for x in (torch.zeros(128, 128), torch.full((128, 128), 1e-45), torch.full((128, 128), 1e-38)):
        values, scales = quantise(x)
        back = dequantised(values, scales)
        assert bool((scales >= torch.finfo(torch.float32).tiny).all()), "no subnormal scale, which devices flush"
        assert bool(((back - x).abs() <= torch.maximum(x / 16, scales.amax() * 2**-10)).all())
    assert bool((dequantised(*quantise(torch.zeros(128, 128))) == 0).all())


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_is_not_lost(wrong: float) -> None:
    x, w = normal(4, 256), normal(128, 256, seed=1)
    x[2, 5] = wrong
    (y,) = REFERENCE.gemms(x, [w])
    assert y.isfinite().all(1).tolist() == [True, True, False, True]
    w[7, 3] = wrong
    (y,) = REFERENCE.gemms(normal(4, 256), [w])
    assert not y.isfinite().any()


@pytest.mark.nightly  # ten seconds and more of a compiler
def test_compiled_it_gives_the_same_bits() -> None:
    compiled = Fp8("dequantised", "cpu", fused)
    for rows in (3, 8):
        x, w = normal(rows, 256).bfloat16(), normal(128, 256, seed=1).bfloat16()
        for found, expected in zip(compiled.gemms(x, [w]), REFERENCE.gemms(x, [w]), strict=True):
            assert torch.equal(found, expected)


# ------------------------------------------------------------------------------------------------ products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [(0,), (3,), (2, 5)], ids=str)
def test_a_product_is_that_of_the_rounded_numbers(rows: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w, v = normal(*rows, 384).to(dtype), normal(256, 384, seed=1).to(dtype), normal(128, 384, seed=2).to(dtype)
    found = REFERENCE.gemms(x, [w, v])
    for y, weight in zip(found, (w, v), strict=True):
        exact = dequantised(*rows_of(x.reshape(-1, 384))).double() @ dequantised(*matrix_of(weight)).double().t()
        assert y.shape == (*rows, len(weight))
        assert y.dtype == dtype
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(y.double().view(exact.shape), exact, rtol=tolerance, atol=10 * tolerance)
        if len(exact):
            as_is = x.double() @ weight.double().t()
            assert 1e-3 < (y.double() - as_is).norm() / as_is.norm() < 0.06


def scaled_mm(
    a: Tensor, b: Tensor, of_a: Tensor, how_a: Any, of_b: Tensor, how_b: Any, output_dtype: torch.dtype
) -> Tensor:
    """What torch's kernel takes and gives (ScaledBlas.cpp, cuBLAS "Scaling factors layouts"), on a CPU."""
    (m, k), (_, n) = a.shape, b.shape
    filled = -(-k // BLOCK // 4) * 4
    assert (a.dtype, b.dtype, of_a.dtype, of_b.dtype) == (E4M3, E4M3, torch.float32, torch.float32)
    assert (how_a, how_b) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    assert a.stride() == (k, 1)
    assert b.stride() == (1, k)
    assert m % 4 == 0
    assert of_a.shape == (m, k // BLOCK)
    assert of_a.stride() in ((1, m), (1, 1) if k == BLOCK else (1, m))
    assert of_b.shape == (filled, n // BLOCK)
    assert of_b.stride() == (1, filled)
    assert output_dtype in (torch.bfloat16, torch.float32)
    left, right = dequantised(a, of_a), dequantised(b.t(), of_b.t()[:, : k // BLOCK])
    return (left @ right.t()).to(output_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "n", "k"), [((0,), 128, 128), ((3,), 256, 128), ((2, 5), 128, 640), ((8,), 384, 512)])
def test_a_device_is_asked_for_the_product_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...], n: int, k: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    x, g = normal(*rows, k).to(dtype), normal(*rows, n, seed=1).to(dtype)
    w = normal(n, k, seed=2).to(dtype)
    for left, right in ((x, w), (g, w.t())):
        (found,), (expected,) = ON_DEVICE.gemms(left, [right]), REFERENCE.gemms(left, [right])
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected)


def test_torch_takes_the_scales_as_they_lie() -> None:
    """By the checks that it makes of tensors without values, which are those of its CUDA code."""
    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((2, 6, 640), (384, 640)))
    (y,) = ON_DEVICE.gemms(x, [w])
    (dx,) = ON_DEVICE.gemms(y, [w.t()])
    assert (y.shape, y.dtype, dx.shape) == ((2, 6, 384), torch.bfloat16, (2, 6, 640))
    with pytest.raises(RuntimeError, match="L4"):
        F.scaled_mm(
            torch.empty(8, 640, dtype=E4M3, device="meta"),
            torch.empty(384, 640, dtype=E4M3, device="meta").t(),
            torch.empty(5, 8, device="meta").t(),
            ScalingType.BlockWise1x128,
            torch.empty(3, 5, device="meta").t(),  # not filled up to 8
            ScalingType.BlockWise128x128,
        )


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "cuda", "by"),
    [
        ("cuda", torch.bfloat16, (9, 0), "12.9", "scaled_mm"),
        ("cuda", torch.float32, (9, 0), "13.0", "scaled_mm"),
        ("cuda", torch.float64, (9, 0), "13.0", "dequantised"),
        ("cuda", torch.bfloat16, (9, 0), "12.8", "dequantised"),
        ("cuda", torch.bfloat16, (8, 9), "13.0", "dequantised"),
        ("cuda", torch.bfloat16, (10, 0), "13.0", "dequantised"),
        ("cuda", torch.bfloat16, (9, 0), None, "dequantised"),  # AMD's
        ("cpu", torch.bfloat16, (9, 0), "13.0", "dequantised"),
    ],
)
def test_who_multiplies_follows_from_the_device(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    cuda: str | None,
    by: str,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert multiplier_of(device, dtype) == by


# ------------------------------------------------------------------------------------------------ layers


def test_weight_gradients_are_of_numbers_that_were_not_rounded() -> None:
    tp = TensorParallel(Mesh(), WeightGrads(), kernels="cpu", fp8=REFERENCE)
    x, w, g = normal(2, 4, 256).requires_grad_(), normal(128, 256, seed=1).requires_grad_(), normal(2, 4, 128, seed=2)
    (y,) = linear(x, [w], tp)
    y.backward(g)
    assert w.grad is not None
    assert x.grad is not None
    torch.testing.assert_close(w.grad, g.flatten(0, 1).t() @ x.detach().flatten(0, 1))
    assert torch.equal(y, REFERENCE.gemms(x.detach(), [w.detach()])[0])
    assert torch.equal(x.grad, REFERENCE.gemms(g, [w.detach().t()])[0])


def two_layers(mesh: Mesh, options: dict[str, bool]) -> dict[str, Tensor]:
    """A matrix into a rank's features and one out of them, and all gradients of a sum of the result."""
    tp, rank = mesh.size("tp"), mesh.coord("tp")
    layout = TensorParallel(mesh, WeightGrads(), kernels="cpu", fp8=REFERENCE, **options)
    into, out = normal(256, 384, seed=1).chunk(tp, 0)[rank], normal(384, 256, seed=2).chunk(tp, 1)[rank]
    x, g = normal(2, 8, 384), normal(2, 8, 384, seed=3)
    if layout.sequence_parallel:
        x, g = x.chunk(tp, 1)[rank], g.chunk(tp, 1)[rank]
    x, into, out = (tensor.contiguous().requires_grad_() for tensor in (x, into, out))
    (h,) = linear(x, [into], layout, enter=layout.enter)
    (y,) = linear(torch.tanh(h / 20), [out], layout, exit=layout.exit)
    y.backward(g)
    found = {"y": y.detach(), "x": x.grad, "into": into.grad, "out": out.grad}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def on_rank(rank: int, world: int, options: dict[str, bool]) -> dict[str, Tensor]:
    mesh = Mesh({"tp": world}, rank)
    mesh.create_groups()
    return two_layers(mesh, options)


@pytest.mark.parametrize(
    "options",
    [{}, {"sequence_parallel": True}, {"sequence_parallel": True, "overlap": True, "recompute_allgather": False}],
    ids=str,
)
def test_shards_have_the_scales_of_the_whole(pool: Pool, options: dict[str, bool]) -> None:
    whole, ranks = two_layers(Mesh(), {}), pool.run(2, on_rank, options)
    for name, dim in {"y": 1, "x": 1, "into": 0, "out": 1}.items():
        cut = name in ("into", "out") or options.get("sequence_parallel")
        found = torch.cat([of[name] for of in ranks], dim) if cut else ranks[0][name]
        assert (found - whole[name]).abs().max() <= 1e-5 * whole[name].abs().max(), name


def losses_of(rank: int, world: int, fp8: str | None) -> list[float]:
    """Fifty steps of a tiny model in bfloat16, on one process."""
    case = Case(dtype="bfloat16", layers=2, steps=50, fp8=True)
    config, mesh = config_of(case), Mesh()
    config.model.fp8 = fp8
    training, feed = prepare(config, mesh), feed_of(config, mesh)
    steps = range(1, case.steps + 1)
    losses = [training.step(step, microbatches_of(feed, step, case, mesh)).read().lm_loss for step in steps]
    feed.close()
    return losses


def test_a_model_learns_in_fp8_as_in_bfloat16(pool: Pool) -> None:
    rounded, plain = (pool.run(1, losses_of, fp8)[0] for fp8 in ("block128", None))
    assert plain[-1] < 0.4 * plain[0]
    assert max(abs(a - b) / b for a, b in zip(rounded, plain, strict=True)) < 0.03
    assert rounded != plain
