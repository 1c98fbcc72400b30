"""Runs over collectives as NCCL makes them: one that its caller waits for gives nothing to wait on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.launch import codes
from nanotron.metrics.sinks import read_rows
from nanotron.training.diagnostics import _is_asynchronous
from tests.checkpoint.runs import run, values_of
from tests.data.fixtures import random_documents, write_nanoset
from tests.pool import Pool


class NoWork(TorchDispatchMode):
    """Has every collective that is not asynchronous return no Work, as NCCL's do since torch 2.8."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False keeps torch from importing its compiler when the mode is entered."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "c10d" or not isinstance(result, tuple) or _is_asynchronous(func, args):
            return result
        Work.unbox(result[-1]).wait()
        self.seen += 1
        return (*result[:-1], Work.boxed(None))


def run_without_work(rank: int, world: int, values: dict[str, Any]) -> tuple[int, int]:
    with NoWork() as mode:
        return run(rank, world, values), mode.seen


@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 1, 1)], ids=["tp", "dp"])
def test_steps_measured_steps_validation_and_saves_need_no_work(
    pool: Pool, tmp_path: Path, layout: tuple[int, int, int]
) -> None:
    write_nanoset(tmp_path / "held out", random_documents(40, seed=2, vocab_size=67))
    values = values_of(tmp_path / "run", layout, tokens__train_steps=4, tokens__val_check_interval=2)
    values["metrics_logging"] = {"log_level": 1, "log_detail_interval": 2, "straggler_interval": 2}
    values["checkpoints"]["checkpoint_interval"] = 2
    values["data_stages"][0]["validation"] = {"dataset_folder": str(tmp_path / "held out")}
    for code, seen in pool.run(2, run_without_work, values):
        assert code == codes.DONE
        assert seen > 0
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert ["slowest_rank" in row for row in rows] == [False, True, False, True]
    assert ["val_loss" in row for row in rows] == [False, True, False, True]
    assert (tmp_path / "run/4/index.json").exists()
