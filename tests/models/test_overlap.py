"""With tp_linear_async_communication a matmul runs between a collective's beginning and its arrival."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.ops import linear as layers
from nanotron.ops.linear import TensorParallel, linear
from nanotron.ops.weight_grads import WeightGrads
from nanotron.parallel.comm import AsyncHandle
from nanotron.parallel.mesh import Mesh
from tests.pool import Pool

BEGINNINGS = ("begin_all_gather", "begin_reduce_scatter", "begin_all_reduce_")


class Matmuls(TorchDispatchMode):
    """Notes every matmul in ``events``."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname in ("mm", "addmm", "addmm_", "_linear_pointwise"):
            self.events.append("matmul")
        return func(*args, **(kwargs or {}))


def noting(name: str, begin: Callable[..., AsyncHandle], events: list[str]) -> Callable[..., AsyncHandle]:
    """``begin``, with its beginning and its arrival noted in ``events``."""
    word = name.removeprefix("begin_").rstrip("_")

    def noted(x: Tensor, group: Any, **options: Any) -> AsyncHandle:
        if group is None:
            return begin(x, group, **options)
        events.append(f"{word} begins")
        arrival = begin(x, group, **options)

        def arrive() -> Tensor:
            events.append(f"{word} arrives")
            return arrival()

        return arrive

    return noted


def events_of(rank: int, world: int, sequence_parallel: bool, overlap: bool) -> tuple[list[str], list[str]]:
    """What happens in the forward and in the backward of one column-cut layer."""
    mesh = Mesh({"tp": world}, rank)
    mesh.create_groups()
    tp = TensorParallel(mesh, WeightGrads(), sequence_parallel, overlap=overlap)
    x, weight = torch.randn(1, 4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    events: list[str] = []
    noted = {name: noting(name, getattr(layers, name), events) for name in BEGINNINGS}
    with mock.patch.multiple(layers, **noted), Matmuls(events):
        (y,) = linear(x, [weight], tp, enter=tp.enter)
        forward = events.copy()
        events.clear()
        y.sum().backward()  # type: ignore[no-untyped-call]
    return forward, events


@pytest.mark.parametrize("overlap", [True, False])
def test_matmuls_run_while_tokens_are_gathered_and_gradients_are_scattered(pool: Pool, overlap: bool) -> None:
    for rank, (forward, backward) in enumerate(pool.run(2, events_of, True, overlap)):
        if overlap:
            assert forward[:3] == ["all_gather begins", "matmul", "all_gather arrives"]
            assert backward == [
                *("all_gather begins", "matmul", "reduce_scatter begins", "all_gather arrives"),
                *("matmul", "reduce_scatter arrives"),
            ]
        else:
            assert "all_gather begins" not in forward, f"rank {rank} has nothing to do meanwhile"
            assert backward == [
                *("all_gather begins", "all_gather arrives", "matmul"),
                *("reduce_scatter begins", "reduce_scatter arrives", "matmul"),
            ]


def test_weight_gradients_are_computed_while_input_gradients_are_summed(pool: Pool) -> None:
    for _, backward in pool.run(2, events_of, False, True):
        assert backward == ["matmul", "all_reduce begins", "matmul", "all_reduce arrives"]
    for _, backward in pool.run(2, events_of, False, False):
        assert backward == ["matmul", "all_reduce begins", "all_reduce arrives", "matmul"]
