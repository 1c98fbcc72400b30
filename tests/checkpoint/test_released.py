"""Every version of the checkpoint format that was released opens: checkpoints of then, as they were written.

released/version-N is step 2 of a run on two replicas; sums.json has each tensor's sum, written at the same time.
Neither changes any more: a new version of the format comes with a folder of its own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from nanotron.checkpoint.inspect import inspect_checkpoint
from nanotron.checkpoint.schema import Version
from tests.checkpoint.read_checkpoint import read_tensor
from tests.commands import nanotron

ROOT = Path(__file__).parents[2]
RELEASED = Path(__file__).with_name("released")
SUMS: dict[str, dict[str, float]] = json.loads((RELEASED / "sums.json").read_text())
VERSIONS = sorted(SUMS)


def folder(version: str) -> Path:
    return RELEASED / f"version-{version}"


def index(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder(version) / "index.json").read_text())
    return found


def test_there_is_one_of_each_version_that_readers_take() -> None:
    assert [int(version) for version in VERSIONS] == sorted(get_args(Version))
    assert [index(version)["version"] for version in VERSIONS] == [int(version) for version in VERSIONS]


@pytest.mark.parametrize("version", VERSIONS)
def test_its_tensors_are_what_they_were(version: str) -> None:
    found = {
        name: float(read_tensor(folder(version), tensor).astype("f8").sum())
        for name, tensor in index(version)["tensors"].items()
    }
    assert found == pytest.approx(SUMS[version], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_inspected_and_a_run_goes_on_from_it_on_another_layout(version: str, tmp_path: Path) -> None:
    assert "files are as they were written" in list(inspect_checkpoint(str(folder(version))))[-1]
    shutil.copytree(folder(version), tmp_path / "run" / "2")
    changes = ["parallelism.dp=1", "tokens.batch_accumulation_per_replica=2", "tokens.train_steps=3"]
    options = [f"--override={change}" for change in [*changes, "checkpoints.checkpoints_path=run"]]
    ran = nanotron(
        tmp_path, ROOT / "run_train.py", "--config-file", folder(version).absolute() / "config.yaml", *options
    )
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3]
    written = json.loads((tmp_path / "run" / "3" / "index.json").read_text())
    assert written["tensors"].keys() == index(version)["tensors"].keys()
