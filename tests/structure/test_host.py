"""The host never waits for the device inside a step: nothing is read back, nothing is copied in step with it.

But a layer with experts reads how many rows they get, once, for so many have to be sent and multiplied.

Device "meta" stands in for an accelerator: its tensors have no values, so whoever reads one fails, and whoever copies
to it is seen. It also takes the ways through the code that every device but a CPU takes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.batch import Batch, document_spans
from nanotron.models import experts
from nanotron.ops.experts import Numbers, numbers_of
from nanotron.parallel.mesh import Mesh
from nanotron.plan.fakes import even_numbers
from nanotron.training.step import Training
from nanotron.training.topology import mesh_axes
from tests.parity.cases import Case
from tests.parity.run import config_of, cut, prepare
from tests.pool import Pool

READS = {"_local_scalar_dense", "item", "equal", "is_nonzero"}
SIZED_BY_VALUES = {"nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim", "bincount"}


class Waits(TorchDispatchMode):
    """Notes every operator for which the host would have to wait for a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False keeps torch from importing its compiler when the mode is entered."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._opname
        if name in READS | SIZED_BY_VALUES or (name.startswith("index") and _has_mask(args)):
            self.seen.append(name)
        if name in {"_to_copy", "copy_"} and not _goes_on(name, args, kwargs or {}):
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], result)
            if source.device != target.device:
                self.seen.append(f"{name} from {source.device} to {target.device}")
        return result


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else []
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)


def _goes_on(name: str, args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))


def batches(case: Case, device: str) -> list[Batch]:
    shape = case.micro_batch_size, 32
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    positions = torch.arange(32, device=device).expand(shape)
    spans = document_spans([[0, 5, 20]] * case.micro_batch_size, 32) if case.documents else None
    return [Batch(ids, ids, positions, spans)] * case.accumulation


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(documents=True, dtype="bfloat16"),
        Case(documents=True, recompute_layer=True, tied=True, family="qwen3"),
        Case(recompute_layer="selective"),
        Case(loss_chunk=7, z_loss=True, family="qwen2", dtype="bfloat16"),
    ],
    ids=str,
)
def test_a_step_on_a_device_reads_nothing_back(case: Case) -> None:
    training = Training(config_of(case), Mesh(), "meta")
    microbatches = batches(case, "meta")
    with Waits() as waits:
        word = training.step(1, microbatches)
    assert waits.seen == []
    with pytest.raises(NotImplementedError, match="no data"), Waits() as waits:
        word.read()  # which is where the host waits


@pytest.mark.parametrize(
    "case",
    [
        Case(experts=8, router="shared"),
        Case(experts=8, router="grouped", dtype="bfloat16", documents=True),
        Case(experts=8, router="z-loss", recompute_layer=True, layers=2),
    ],
    ids=str,
)
def test_a_layer_with_experts_reads_once_how_many_rows_they_get(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def told(chosen: Tensor, ranks: Tensor, here: int, mesh: Mesh) -> Numbers:
        reads.append(here)
        return even_numbers(chosen, ranks, here, mesh)

    monkeypatch.setattr(experts, "numbers_of", told)
    config = config_of(case)
    training = Training(config, Mesh(), "meta")
    with Waits() as waits:
        training.step(1, batches(case, "meta"))
    assert waits.seen == []
    passes = 2 if case.recompute_layer else 1
    assert len(reads) == passes * case.accumulation * len(config.model.model_config.sparse_layers)


def test_how_many_rows_experts_get_is_one_read() -> None:
    with Reads() as reads, Waits() as waits:
        numbers_of(torch.tensor([[0, 2], [1, 0]]), torch.zeros(2, 2, dtype=torch.int64), 4, Mesh())
    assert (reads.seen, waits.seen) == (["tolist"], [])


class Reads(TorchFunctionMode):
    """Notes every call that gives values to Python."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.__name__) in {"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__index__"}:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, zero_stage=1),
        Case(tp=2, tp_mode="REDUCE_SCATTER"),
        Case(pp=2, schedule="zb_h1", tied=True),
        Case(dp=2, tp=2, pp=2, zero_stage=1, tied=True),
        Case(cp=2, documents=True),
        Case(cp=2, cp_mode="ALL_TO_ALL", documents=True),
        Case(dp=2, ep=2, tp=2, experts=8, router="shared", zero_stage=1),
    ],
    ids=str,
)
def test_a_step_of_several_ranks_reads_nothing_back(pool: Pool, case: Case) -> None:
    for seen in pool.run(case.world, waits_of, case):
        assert seen == []


def waits_of(rank: int, world: int, case: Case) -> list[str]:
    config = config_of(case)
    mesh = Mesh(mesh_axes(config), rank)
    training = prepare(config, mesh)
    microbatches = [cut(batch, case, mesh) for batch in batches(case, "cpu")]
    word = training.step(1, microbatches)
    with Waits() as waits:
        training.step(2, microbatches)
    word.read()
    return waits.seen


def test_the_control_word_is_read_once() -> None:
    case = replace(Case(), layers=1)
    training = prepare(config_of(case), Mesh())
    with Waits() as waits:
        word = training.step(1, batches(case, "cpu"))
        assert waits.seen == []
        word.read()
    assert set(waits.seen) <= READS
