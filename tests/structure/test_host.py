"""The host never waits for the device inside a step nor between steps: nothing is read back, nothing is copied in step
with it; a step's few numbers are sent to the host behind it, and read when the next one has been made.

But a layer with experts reads how many rows they get, once, for so many have to be sent and multiplied.

Device "meta" stands in for an accelerator: its tensors have no values, so whoever reads one fails, and whoever copies
to it is seen. It also takes the ways through the code that every device but a CPU takes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.batch import Batch, document_spans
from nanotron.checkpoint.write import Saver
from nanotron.config import get_config_from_dict
from nanotron.data.feed import Feed
from nanotron.launch import codes
from nanotron.metrics.columns import WEIGHT_NORM
from nanotron.metrics.record import Metrics
from nanotron.metrics.sinks import read_rows
from nanotron.metrics.step_clock import StepClock
from nanotron.models import experts
from nanotron.models.specs import EMBED
from nanotron.ops.experts import Numbers, numbers_of
from nanotron.parallel.mesh import Mesh
from nanotron.plan.fakes import even_numbers
from nanotron.training import control, diagnostics, trainer
from nanotron.training.control import ControlWord, Outcome
from nanotron.training.host_copy import HostCopy
from nanotron.training.rollback import Rollbacks
from nanotron.training.step import Training
from nanotron.training.topology import mesh_axes
from tests.checkpoint.runs import run, values_of
from tests.data.fixtures import random_documents, write_nanoset
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


class Arrived:
    """Stands in for a copy to the host of a device without values: finite numbers, and no wish to save or stop."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.device.type == "meta"
        self._count = tensor.numel()

    def read(self) -> list[float]:
        return [1.0, 1.0, *[0.0] * self._count][: self._count]


def test_the_loop_waits_for_nothing_but_what_was_sent_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (control, diagnostics, trainer):
        monkeypatch.setattr(module, "HostCopy", Arrived)
    write_nanoset(tmp_path / "tokens", random_documents(40, vocab_size=67))
    data = {"data": {"dataset": {"dataset_folder": str(tmp_path / "tokens")}}}
    held_out = {"validation": {"dataset_folder": str(tmp_path / "tokens")}}
    values = values_of(tmp_path, checkpoints__checkpoint_interval=100, checkpoints__save_final_state=False)
    values["data_stages"] = [{"name": "only", "start_training_step": 1, **data, **held_out}]
    values["model"]["model_config"]["_use_doc_masking"] = True
    values["tokens"] |= {"train_steps": 6, "val_check_interval": 2}
    values["logging"] = {"iteration_step_info_interval": 1, "tensorboard": False}
    values["metrics_logging"] = {"log_level": 1, "log_detail_interval": 3}
    config, device = get_config_from_dict(values), torch.device("meta")
    metrics = Metrics(config, Mesh(), tmp_path, device=torch.device("cpu"))
    parts = Training(config, Mesh(), device), Feed(config, Mesh(), device=device), metrics, Saver(str(tmp_path))
    loop = trainer.Run(config, Mesh(), *parts, StepClock(torch.device("cpu")), Rollbacks(config, None), 0)
    with Waits() as waits:
        assert loop.to_the_end() == codes.DONE
    loop.feed.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4, 6]
    assert [row["step"] for row in rows if f"{WEIGHT_NORM}/{EMBED}" in row] == [3, 6]
    assert waits.seen == []


@pytest.mark.parametrize("interval", [1, 3])
def test_a_word_is_read_when_the_next_step_has_been_made_but_at_once_before_a_save(
    interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    step, save, read = Training.step, Saver.save, ControlWord.read
    words: dict[ControlWord, int] = {}

    def made(self: Training, update: int, *args: Any, **wishes: bool) -> ControlWord:
        events.append(f"make {update}")
        word = step(self, update, *args, **wishes)
        words[word] = update
        return word

    def read_now(self: ControlWord) -> Outcome:
        events.append(f"read {words[self]}")
        return read(self)

    def saved(self: Saver, number: int, *args: Any) -> None:
        events.append(f"save {number}")
        save(self, number, *args)

    monkeypatch.setattr(Training, "step", made)
    monkeypatch.setattr(ControlWord, "read", read_now)
    monkeypatch.setattr(Saver, "save", saved)
    values = values_of(tmp_path, tokens__train_steps=5, checkpoints__checkpoint_interval=3)
    values["logging"] = {"iteration_step_info_interval": interval}
    assert run(0, 1, values) == codes.DONE
    assert [event for event in events if event[:4] != "save"] == [
        *("make 1", "make 2", "read 1", "make 3", "read 2", "read 3"),  # 3 is saved
        *("make 4", "make 5", "read 4", "read 5"),
    ]
    assert events.index("save 3") == events.index("read 3") + 1


def test_a_copy_to_the_host_begins_when_it_is_asked_for_and_is_read_without_a_further_one() -> None:
    word = HostCopy(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64))
    with Waits() as waits:
        assert word.read() == [1.0, 2.0, 3.0, 4.0]
    assert waits.seen == []
