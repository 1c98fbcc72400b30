"""Matrix products: the same numbers from whichever library makes them, and the choice between the two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanotron.ops import gemm as products
from nanotron.plan.counting import Counting


@pytest.fixture(params=["mkl", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both libraries on any machine: torch on a CPU brings both."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: request.param == "onednn")
    return str(request.param)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("rows", [(), (1,), (0,), (7,), (2, 0), (3, 5)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_of_any_rows(rows: tuple[int, ...], biased: bool) -> None:
    x, w = normal(*rows, 33), normal(17, 33, seed=1)
    bias = normal(17, seed=2) if biased else None
    expected = x.double() @ w.double().t() + (0 if bias is None else bias.double())
    found = products.product(x, w, bias)
    assert found.shape == (*rows, 17)
    close(found, expected)


@pytest.mark.usefixtures("library")
def test_views_of_other_tensors_are_multiplied_as_they_look() -> None:
    x, w = normal(4, 6, 40)[:, 1:4, ::2], normal(20, 64, seed=1)
    for weight in (w[:, :20], w[:, :20].t(), w[:, ::3][:, :20], w.t()[:20]):
        close(products.product(x, weight), x.double() @ weight.double().t())


@pytest.mark.parametrize(("n", "k"), [(24, 8), (8, 24), (1, 5), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_add_to_what_is_there(library: str, n: int, k: int, dtype: torch.dtype) -> None:
    left, right = normal(9, n).to(dtype), normal(9, k, seed=1).to(dtype)
    start = normal(n, k, seed=2)
    total = start.to(torch.promote_types(dtype, torch.float32), copy=True)
    products.add_product(total, left, right)
    expected = start.double() + left.double().t() @ right.double()
    if dtype == torch.bfloat16:
        torch.testing.assert_close(total.double(), expected, rtol=2e-2, atol=2e-2)
    else:
        close(total, expected)


def test_float32_on_a_cpu_goes_to_the_chosen_library(library: str) -> None:
    class Names(Counting):
        def _count_operator(self, func, args, result) -> None:  # type: ignore[no-untyped-def]
            names.append(func._opname)
            if func.namespace == "mkldnn":
                dense.append(args[1].is_contiguous() or args[1].t().is_contiguous())

    names: list[str] = []
    dense: list[bool] = []
    with Names():
        products.product(normal(3, 8), normal(4, 16)[:, :8])
        products.add_product(normal(4, 8), normal(3, 4), normal(3, 8))
    assert ("_linear_pointwise" in names) == (library == "onednn")
    assert ("mm" in names or "addmm_" in names) == (library == "mkl")
    assert all(dense), "oneDNN multiplies by a matrix with gaps between its rows a hundred times slower"
    names.clear()
    with Names():
        products.product(normal(3, 8).double(), normal(4, 8).double())
        products.product(normal(3, 8).bfloat16(), normal(4, 8).bfloat16())
    assert "_linear_pointwise" not in names


@pytest.mark.parametrize(
    ("capability", "vendor", "chosen"),
    [
        ("AVX512", "AuthenticAMD", True),
        ("AVX2", "AuthenticAMD", False),
        ("AVX512", "GenuineIntel", False),
        ("AVX512", "", False),
        ("DEFAULT", "", False),
    ],
)
def test_onednn_is_chosen_where_mkl_lacks_code(
    monkeypatch: pytest.MonkeyPatch, capability: str, vendor: str, chosen: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(products, "_vendor", lambda: vendor)
    found = products.onednn_is_faster.__wrapped__()
    assert found == (chosen and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available())


def test_a_torch_without_the_operator_multiplies_by_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(products, "_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not products.onednn_is_faster.__wrapped__()
