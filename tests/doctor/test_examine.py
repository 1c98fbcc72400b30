"""`nanotron doctor`: what is planted in some rank's machine is named, whichever rank that is."""

from __future__ import annotations

import json
import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from nanotron.checkpoint.storage import LocalFolder
from nanotron.config import get_config_from_dict
from nanotron.doctor import examine as examining
from nanotron.doctor import measure
from nanotron.doctor.examine import checkpoint_bytes, examine
from nanotron.errors import ConfigError
from nanotron.launch import codes
from nanotron.launch.place import Place
from nanotron.parallel.mesh import Mesh
from nanotron.training.step import Training
from tests.checkpoint.runs import mesh_of, sparse_values_of, values_of
from tests.commands import nanotron
from tests.pool import Pool

PLANTED = {
    "device": (3, "matmul float32: "),
    "link": (2, "bandwidth dp between hosts: .*rank 0 on a to rank 2 on b, "),
    "disk": (2, "write: .*, rank 2 on b, "),
    "clock": (None, "clock of b: 1.5 s ahead; set it by NTP"),
    "folder": (2, r".*/run/\.doctor-2 on b: Read-only file system; "),
}
"""What is planted -> the rank that has it (None: the host b), how the line begins that names it."""


def slow(function: Any, seconds: float) -> Any:
    """The same, later."""

    def later(*arguments: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments)

    return later


def plant(what: str, rank: int, node: int) -> mock._patch[Any] | None:
    """What makes this rank, of a node, be out of line."""
    pass_on, write, now = measure.pass_on, LocalFolder._write, time.time
    befallen, _ = PLANTED[what]
    if rank != befallen and (befallen is not None or node == 0):
        return None
    if what == "device":
        return mock.patch.object(measure, "multiply", slow(measure.multiply, 0.2))
    if what == "link":
        from_another = lambda *transfer: pass_on(*transfer) + 0.2 * (transfer[2] != 3)  # noqa: E731
        return mock.patch.object(measure, "pass_on", from_another)
    if what == "disk":
        return mock.patch.object(LocalFolder, "_write", slow(write, 0.3))
    if what == "folder":
        return mock.patch.object(LocalFolder, "_open", mock.Mock(side_effect=OSError(30, "Read-only file system")))
    return mock.patch.object(measure, "wall_clock", mock.Mock(side_effect=lambda: now() + 3))


def examined(rank: int, world: int, values: dict[str, Any], what: str) -> tuple[int, list[str]]:
    """This rank on one of two hosts; the exit code, and what it prints."""
    import torch.distributed as dist

    config, said = get_config_from_dict(values), []
    place = Place(rank, world, local_rank=rank % 2, local_world=2)
    store = dist.distributed_c10d._get_default_store()
    with ExitStack() as around:
        for patch in (
            mock.patch("socket.gethostname", return_value="ab"[rank // 2]),
            mock.patch.object(examining, "say", lambda *lines: said.extend(lines)),
            mock.patch.object(measure, "DISK_BYTES", 4 << 20),
            plant(what, rank, rank // 2),
        ):
            if patch is not None:
                around.enter_context(patch)
        return examine(config, place, mesh_of(config, rank), torch.device("cpu"), store), said


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_named(pool: Pool, tmp_path: Path, what: str) -> None:
    ended = pool.run(4, examined, values_of(tmp_path / "run", (2, 2, 1)), what)
    assert [code for code, _ in ended] == [codes.INTERNAL_ERROR] * 4
    said = ended[0][1]
    assert any(re.match(f"out of line: {PLANTED[what][1]}", line) for line in said), said
    assert [said for _, said in ended[1:]] == [[]] * 3, "told once"
    assert list((tmp_path / "run").iterdir()) == [], "nothing is left behind"


def blind(rank: int, world: int, values: dict[str, Any]) -> str:
    """Rank 1 has another folder under the same name."""
    import torch.distributed as dist

    values["checkpoints"]["checkpoints_path"] += f"/{rank}"
    config = get_config_from_dict(values)
    store = dist.distributed_c10d._get_default_store()
    with pytest.raises(ConfigError) as refused:
        examine(config, Place(rank, world), mesh_of(config, rank), torch.device("cpu"), store)
    return str(refused.value)


def test_a_folder_that_is_not_shared_is_the_users_mistake(pool: Pool, tmp_path: Path) -> None:
    for line in pool.run(2, blind, values_of(tmp_path, (2, 1, 1))):
        assert "is not one folder for all ranks: rank 1 does not see what rank 0 writes" in line


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__dtype": "bfloat16"},
        {"optimizer__ema_decay": 0.9},
        {"optimizer__optimizer_factory": {"name": "sgd"}},
        {"optimizer__optimizer_factory": {"name": "muon"}, "model__dtype": "bfloat16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_checkpoint_takes_what_is_said(tmp_path: Path, changes: dict[str, Any], sparse: bool) -> None:
    make = (lambda *args, **keys: sparse_values_of(*args, 1, **keys)) if sparse else values_of
    config = get_config_from_dict(make(tmp_path, (1, 1, 1), **changes))
    pieces = Training(config, Mesh(), "cpu").state_shards()
    assert checkpoint_bytes(config) == sum(piece.tensor.nbytes for piece in pieces if piece.writes)


def test_a_full_disk_is_told_before_training(tmp_path: Path) -> None:
    config = get_config_from_dict(values_of(tmp_path))
    said: list[str] = []
    with (
        mock.patch.object(examining, "_room", return_value=1000),
        mock.patch.object(examining, "say", lambda *lines: said.extend(lines)),
    ):
        assert examine(config, Place(), Mesh(), torch.device("cpu"), None) == codes.INTERNAL_ERROR
    (line,) = [line for line in said if line.startswith("out of line")]
    assert re.fullmatch(rf"out of line: .*={tmp_path}: 1KB free, a checkpoint takes \d+KB; make room", line)


ONE_RANK = "--override=parallelism.tp=1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a config of 2 ranks."""
    values = values_of("run", (1, 2, 1), tokens__train_steps=3)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def test_the_command_prints_a_table_or_json_and_trains_nothing(folder: Path) -> None:
    done = nanotron(folder, "doctor", "tiny.yaml", ONE_RANK)
    assert done.returncode == codes.DONE, done.stderr
    assert done.stdout.startswith("1 rank on "), done.stdout
    assert done.stdout.endswith("nothing is out of line\n")
    done = nanotron(folder, "doctor", "tiny.yaml", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == int(bool(found["problems"])), done.stderr
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert {"matmul float32", "bandwidth tp", "latency tp", "write", "read"} == set(found["ranks"][0]["numbers"])
    assert not (folder / "run/metrics.jsonl").exists()


def test_a_wrong_config_is_told_as_anywhere(folder: Path) -> None:
    done = nanotron(folder, "doctor", "tiny.yaml", "--override=parallelism.tp=3")
    assert done.returncode == codes.USER_MISTAKE
    assert done.stderr.count("\n") == 1
    assert "parallelism.tp: 3 does not divide" in done.stderr


def test_a_preflight_comes_before_training_and_may_keep_from_it(folder: Path) -> None:
    done = nanotron(folder, "train", "tiny.yaml", "--preflight", ONE_RANK)
    assert done.returncode == codes.DONE, done.stderr
    assert done.stdout.index("nothing is out of line") < done.stdout.index("iteration: 1 / 3")
    (folder / "run/metrics.jsonl").unlink()
    script = "import sys\nfrom nanotron.doctor import examine\nfrom nanotron.launch.run import run_train\n"
    script += "examine.problems_of = lambda accounts: ['too hot']\nsys.exit(run_train())"
    (folder / "hot.py").write_text(script)
    done = nanotron(folder, folder / "hot.py", "--config-file", "tiny.yaml", "--preflight", ONE_RANK)
    assert done.returncode == codes.INTERNAL_ERROR
    assert "out of line: too hot\n" in done.stdout
    assert "no step is made" in done.stdout
    assert done.stderr == ""
    assert not (folder / "run/metrics.jsonl").exists()
