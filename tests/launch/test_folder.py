"""The run directory: where it is, what is written there, and who else may not."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanotron.checkpoint.storage import LocalFolder
from nanotron.config import get_config_from_dict
from nanotron.errors import ConfigError
from nanotron.launch.folder import claim_folders, describe_run, name_of_run, on_rank_0, run_directory
from nanotron.metrics.sinks import keep_steps
from nanotron.parallel.mesh import Mesh
from tests.checkpoint.runs import run, values_of


@pytest.mark.parametrize(
    ("run_dir", "checkpoints", "expected"),
    [
        ("here", "ck", "here"),
        (None, "ck/points", "ck/points"),
        (None, "s3://bucket/ck", "runs/my-run"),
    ],
)
def test_the_run_directory_is_the_checkpoints_when_those_are_local(
    run_dir: str | None, checkpoints: str, expected: str
) -> None:
    config = SimpleNamespace(
        general=SimpleNamespace(run_dir=run_dir, run="my-run"),
        checkpoints=SimpleNamespace(checkpoints_path=checkpoints),
    )
    assert str(run_directory(config)) == expected


def test_a_runs_name_gets_its_date_and_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    date, job = name_of_run("%date_%jobid").rsplit("_", 1)
    assert len(date) == len("20260102_030405")
    assert job == "local"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert name_of_run("x-%jobid") == "x-77"


def claim_in_turn(rank: int, world: int, runs: list[dict[str, str]]) -> list[str]:
    """Each rank is a run of its own, one after the other; what the claim of this one's folders ends with."""
    import torch.distributed as dist

    values, problems = values_of(runs[rank]["checkpoints"]), []
    values["general"] |= {"run_dir": runs[rank]["run_dir"]}
    values["s3_upload"] = {"upload_s3_path": f"file://{runs[rank]['copies']}", "remove_after_upload": False}
    with ExitStack() as claims:
        for turn in range(world):
            dist.barrier()
            try:
                if turn == rank:
                    claims.enter_context(claim_folders(get_config_from_dict(values)))
            except ConfigError as error:
                problems = error.problems
        dist.barrier()
    return problems


KEYS = {
    "checkpoints": "checkpoints.checkpoints_path",
    "run_dir": "general.run_dir",
    "copies": "s3_upload.upload_s3_path",
}


@pytest.mark.parametrize("shared", [*KEYS, None])
def test_a_second_run_is_kept_out_of_every_folder_of_the_first(pool, tmp_path: Path, shared: str | None) -> None:
    runs = [
        {key: str(tmp_path / ("shared" if key == shared else f"{key}-{number}")) for key in KEYS} for number in (0, 1)
    ]
    first, second = pool.run(2, claim_in_turn, runs)
    assert first == []
    assert len(second) == (shared is not None)
    for line in second:
        assert line.startswith(f"another run is at work in {tmp_path}/shared (process ")
        assert line.endswith(f"; wait until it has ended, or set {KEYS[shared]} to another folder")


def test_a_full_disk_leaves_the_description_of_the_run_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, mesh = get_config_from_dict(values_of(tmp_path)), Mesh()
    describe = partial(describe_run, tmp_path, config, mesh, torch.device("cpu"))
    on_rank_0("description", describe, config, mesh, None)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert before.keys() == {"config.yaml", "environment.json"}

    def write(self: LocalFolder, file: int, view: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LocalFolder, "_write", write)
    with pytest.raises(ConfigError, match=rf"cannot be written: {tmp_path}/config.yaml \(No space left.*; make room"):
        on_rank_0("description", describe, config, mesh, None)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_record_that_cannot_be_replaced_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "metrics.jsonl"
    record.write_text('{"step": 1}\n{"step": 2}\n')

    def rename(self: LocalFolder, source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)

    monkeypatch.setattr(LocalFolder, "_rename", rename)
    with pytest.raises(PermissionError):
        keep_steps(record, last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert len(record.read_text().splitlines()) == 2


def try_to_run(rank: int, world: int, values: dict[str, Any]) -> list[str]:
    try:
        run(rank, world, values)
    except ConfigError as error:
        return error.problems
    return []


def test_a_record_that_rank_0_cannot_write_ends_all_ranks_with_one_line(pool, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    first, second = pool.run(2, try_to_run, values_of(tmp_path, (2, 1, 1)))
    assert first == second
    assert len(first) == 1
    assert first[0].startswith(f"the run directory cannot be written: {tmp_path}/metrics.jsonl (Is a directory); make")
