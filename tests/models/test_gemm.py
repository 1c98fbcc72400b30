"""GEMMs: the same numbers from whichever library makes them, and the choice between the two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from nanotron.ops import kernels
from nanotron.ops.gemm import add_gemm, adds_in, gemm
from nanotron.ops.kernels import Kernels, kernels_of, kernels_of_processor
from nanotron.plan.counting import Counting

by_each_library = pytest.mark.parametrize("by", ["cpu", "cpu_onednn"])  # torch on a CPU brings both


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@by_each_library
@pytest.mark.parametrize("rows", [(), (1,), (0,), (7,), (2, 0), (3, 5)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_gemm_of_any_rows(rows: tuple[int, ...], biased: bool, by: Kernels) -> None:
    x, w = normal(*rows, 33), normal(17, 33, seed=1)
    bias = normal(17, seed=2) if biased else None
    expected = x.double() @ w.double().t() + (0 if bias is None else bias.double())
    found = gemm(x, w, bias, kernels=by)
    assert found.shape == (*rows, 17)
    close(found, expected)


@by_each_library
def test_views_of_other_tensors_are_multiplied_as_they_look(by: Kernels) -> None:
    x, w = normal(4, 6, 40)[:, 1:4, ::2], normal(20, 64, seed=1)
    for weight in (w[:, :20], w[:, :20].t(), w[:, ::3][:, :20], w.t()[:20]):
        close(gemm(x, weight, kernels=by), x.double() @ weight.double().t())


@by_each_library
@pytest.mark.parametrize(("n", "k"), [(24, 8), (8, 24), (1, 5), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gemms_add_to_what_is_there(by: Kernels, n: int, k: int, dtype: torch.dtype) -> None:
    left, right = normal(9, n).to(dtype), normal(9, k, seed=1).to(dtype)
    start = normal(n, k, seed=2)
    total = start.to(torch.promote_types(dtype, torch.float32), copy=True)
    add_gemm(total, left, right, kernels=by)
    expected = start.double() + left.double().t() @ right.double()
    if dtype == torch.bfloat16:
        torch.testing.assert_close(total.double(), expected, rtol=2e-2, atol=2e-2)
    else:
        close(total, expected)
    first, sum_of_one = torch.full_like(total, torch.nan), torch.zeros_like(total)
    add_gemm(first, left, right, first=True, kernels=by)
    add_gemm(sum_of_one, left, right, kernels=by)
    assert torch.equal(first, sum_of_one), "the first one writes over what is there"


@by_each_library
def test_float32_goes_to_the_library_that_is_named(by: Kernels) -> None:
    class Names(Counting):
        def _count_operator(self, func, args, kwargs, result) -> None:  # type: ignore[no-untyped-def]
            names.append(func._opname)
            if func.namespace == "mkldnn":
                dense.append(args[1].is_contiguous() or args[1].t().is_contiguous())

    names: list[str] = []
    dense: list[bool] = []
    with Names():
        gemm(normal(3, 8), normal(4, 16)[:, :8], kernels=by)
        add_gemm(normal(4, 8), normal(3, 4), normal(3, 8), kernels=by)
    assert ("_linear_pointwise" in names) == (by == "cpu_onednn")
    assert ("mm" in names or "addmm_" in names) == (by == "cpu")
    assert all(dense), "oneDNN multiplies by a matrix with gaps between its rows a hundred times slower"
    names.clear()
    with Names():
        gemm(normal(3, 8).double(), normal(4, 8).double(), kernels=by)
        gemm(normal(3, 8).bfloat16(), normal(4, 8).bfloat16(), kernels=by)
    assert "_linear_pointwise" not in names


@pytest.mark.parametrize(
    ("capability", "vendor", "chosen"),
    [
        ("AVX512", "AuthenticAMD", "cpu_onednn"),
        ("AVX512_BF16", "AuthenticAMD", "cpu_onednn"),
        ("AVX2", "AuthenticAMD", "cpu"),
        ("AVX512", "GenuineIntel", "cpu"),
        ("AVX512", "", "cpu"),
        ("DEFAULT", "", "cpu"),
    ],
)
def test_onednn_is_chosen_where_mkl_lacks_code(
    monkeypatch: pytest.MonkeyPatch, capability: str, vendor: str, chosen: Kernels
) -> None:
    monkeypatch.setattr(kernels, "_has_both_libraries", lambda: True)
    assert kernels_of_processor(capability, vendor) == chosen
    monkeypatch.setattr(kernels, "_has_both_libraries", lambda: False)
    assert kernels_of_processor(capability, vendor) == "cpu"


def test_other_devices_than_a_cpu_have_torchs_own_kernels() -> None:
    assert kernels_of("meta") == "accelerator"
    assert kernels_of("cpu") in ("cpu", "cpu_onednn")


def test_a_torch_without_the_operator_multiplies_by_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not kernels._has_both_libraries.__wrapped__()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_device_that_adds_up_in_float32_makes_no_temporary_in_half_precision(dtype: torch.dtype, first: bool) -> None:
    class Made(Counting):
        def _count_operator(self, func, args, kwargs, result) -> None:  # type: ignore[no-untyped-def]
            made.extend(
                leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.shape == (24, 40)
            )

    made: list[torch.dtype] = []
    total = torch.empty(24, 40, device="meta")
    left, right = (torch.empty(9, size, dtype=dtype, device="meta") for size in (24, 40))
    with Made():
        add_gemm(total, left, right, first=first, kernels="accelerator")
    assert made
    assert dtype not in made


def test_whether_a_device_adds_up_in_float32_is_asked_of_real_tensors() -> None:
    adds_in.cache_clear()
    with FakeTensorMode():  # as the planner does
        assert not adds_in(torch.float32, torch.bfloat16, "cpu")
    total, x = normal(8, 8), normal(4, 8, seed=1).bfloat16()
    expected = total.double() + x.double().t() @ x.double()
    add_gemm(total, x, x, kernels="accelerator")
    torch.testing.assert_close(total.double(), expected, rtol=2e-2, atol=2e-2)
