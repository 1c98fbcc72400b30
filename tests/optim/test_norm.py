"""The gradient norm does not depend on how gradients are cut into buckets, whatever their number."""

from __future__ import annotations

import pytest
import torch

from nanotron.optim.buckets import squared_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_long_float32_norm_keeps_six_digits(dtype: torch.dtype) -> None:
    flat = torch.randn(4_000_001, generator=torch.Generator().manual_seed(0)).mul_(1e-3).to(dtype)
    exact = float(flat.double().square().sum())
    assert float(squared_norm(flat)) == pytest.approx(exact, rel=5e-7)
    parts = sum(float(squared_norm(flat[start : start + 333_333])) for start in range(0, len(flat), 333_333))
    assert parts == pytest.approx(exact, rel=5e-7)
    assert float(squared_norm(flat[:0])) == 0.0
