"""What a run costs does not grow with its length, nor with what it has saved; its work is linear in tokens."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nanotron.batch import Batch
from nanotron.config import get_config_from_dict
from nanotron.parallel.mesh import Mesh
from nanotron.training.control import ControlWord
from nanotron.training.step import Training
from nanotron.training.trainer import train
from tests.checkpoint.runs import values_of
from tests.plan.configs import small

SAMPLED = (50, 100, 250)  # steps; times four where more of the same is asked for
PAGES = 1 << 20  # bytes by which the resident set may differ: the allocator's, not the run's


def tiny(folder: Path, steps: int, interval: int) -> dict[str, Any]:
    values = values_of(folder / "checkpoints", checkpoints__checkpoint_interval=interval)
    values["general"]["run"] = "growth"
    values["model"]["model_config"]["num_hidden_layers"] = 1
    values["tokens"] |= {"micro_batch_size": 1, "batch_accumulation_per_replica": 1, "train_steps": steps}
    return values


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_memory_does_not_grow_with_the_number_of_steps(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    samples: list[tuple[int, int, int]] = []
    step = Training.step

    def step_and_look(training: Training, update: int, *args: Any, **options: Any) -> ControlWord:
        if update % times == 0 and update // times in SAMPLED:
            gc.collect()
            objects = gc.get_objects()
            tensors = sum(issubclass(type(thing), torch.Tensor) for thing in objects)
            samples.append((tensors, len(objects), resident_bytes()))
        return step(training, update, *args, **options)

    monkeypatch.setattr(Training, "step", step_and_look)
    assert train(get_config_from_dict(tiny(tmp_path, times * SAMPLED[-1], 10_000)), Mesh(), torch.device("cpu")) == 0
    (tensors, objects, _), (_, _, resident), last = samples
    assert last[0] == tensors, "tensors pile up"
    assert last[1] <= objects + 50, "objects pile up"
    assert last[2] <= resident + PAGES, "memory piles up"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_start_opens_as_many_files_whatever_was_saved_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, folder = get_config_from_dict(tiny(tmp_path, 20, 20)), tmp_path / "checkpoints"
    assert train(config, Mesh(), torch.device("cpu")) == 0
    opened = []
    for earlier in (3, 19):
        for number in range(1, earlier + 1):
            if not (folder / str(number)).exists():
                shutil.copytree(folder / "20", folder / str(number))
        with seen_by_python(folder) as paths:
            assert train(config, Mesh(), torch.device("cpu")) == 0  # loads, and finds that nothing is left to train
        opened.append(paths)
    assert any("/20" in path for path in opened[0])
    assert sorted(opened[0]) == sorted(opened[1])


_watching: list[tuple[str, list[str]]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event in {"open", "os.listdir", "os.scandir"} and isinstance(args[0], (str, os.PathLike)):
        folder, paths = _watching[-1]
        if str(args[0]).startswith(folder):
            paths.append(f"{event} {args[0]}")


@contextmanager
def seen_by_python(folder: Path) -> Iterator[list[str]]:
    """Collects what is opened and listed in a folder."""
    if not hasattr(sys, "_growth_audited"):  # a hook stays for as long as the process lives
        sys.addaudithook(_audit)
        sys._growth_audited = True  # type: ignore[attr-defined]
    _watching.append((str(folder), []))
    yield _watching[-1][1]
    _watching.pop()


def test_work_is_linear_in_tokens() -> None:
    one, rows, batches = (flops(*sizes) for sizes in ((1, 1), (3, 1), (1, 3)))
    assert rows == batches == 3 * one


def flops(rows: int, microbatches: int) -> int:
    """Floating point operations of a step of this many rows in each of so many microbatches."""
    config = small(hidden=64, sequence=64, layers=2, micro_batch=rows, accumulation=microbatches)
    training = Training(config, Mesh(), "cpu")
    ids = torch.zeros(rows, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        training.step(1, [Batch(ids, ids, torch.arange(64).expand(rows, 64))] * microbatches)
    return counter.get_total_flops()
