"""Attention of rows that are cut over context-parallel ranks, where torch's kernel for CPUs attends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.data.context import ContextCut
from nanotron.ops.attention import LONG
from nanotron.ops.context import context_attention
from nanotron.parallel.mesh import Mesh
from tests.pool import Pool

LENGTH = 4 * (LONG + 128)
DOCUMENTS = [[0], [0, LONG + 232, 3000]]  # the second row's spans are long and short ones, on either rank
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


class _Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def attended(mesh: Mesh, documents: list[list[int]] | None) -> tuple[list[Tensor], Counter[str]]:
    """What this rank's tokens give, the gradients of q, k and v, and the operators of backward."""
    shape = len(DOCUMENTS), LENGTH
    starts = None
    if documents:
        starts = np.stack([np.repeat(row, np.diff([*row, LENGTH])) for row in documents])
    held, spans = ContextCut(mesh, "ALL_GATHER").of(shape, starts)
    generator = torch.Generator().manual_seed(1)
    *leaves, grad = (torch.randn(*shape, heads, 16, generator=generator)[:, held].clone() for heads in (4, 2, 2, 4))
    out = context_attention(*(x.requires_grad_() for x in leaves), spans, mesh, mode="ALL_GATHER", kernels="cpu")
    with _Operators() as operators:
        out.backward(grad)  # type: ignore[no-untyped-call]
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [out.detach(), *gradients], operators.calls


def errors_and_calls(rank: int, world: int) -> list[tuple[float, Counter[str]]]:
    """Of whole rows, and of documents: how far this rank's part is from one device's, and backward's operators."""
    mesh = Mesh({"cp": world}, rank)
    mesh.create_groups()
    held, _ = ContextCut(mesh, "ALL_GATHER").of((1, LENGTH), None)
    results = []
    for documents in (None, DOCUMENTS):
        expected, _ = attended(Mesh(), documents)
        found, calls = attended(mesh, documents)
        errors = [
            float((ours - theirs[:, held]).abs().max() / theirs.abs().max().clamp(min=1))
            for ours, theirs in zip(found, expected, strict=True)
        ]
        results.append((max(errors), calls))
    return results


def test_cut_rows_have_one_devices_numbers_and_their_backward_attends_to_no_long_span_again(pool: Pool) -> None:
    backwards = []
    for whole_rows, documents in pool.run(2, errors_and_calls):
        for error, calls in (whole_rows, documents):
            assert error < 1e-6
            assert calls[FLASH] == 0
        assert whole_rows[1]["bmm"] == 0 < documents[1]["bmm"] + documents[1]["addmm_"] + documents[1]["mm"]
        backwards.append((whole_rows[1][FLASH + "_backward"], documents[1][FLASH + "_backward"]))
    # of a piece that begins its span one, of others two; documents: row by row, and the long spans only
    assert backwards == [(3, 4), (4, 7)]
