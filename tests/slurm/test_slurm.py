"""The batch script of a run; and, on a cluster of two nodes (`make slurm`), a job that is preempted."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from nanotron.launch import codes
from tests.checkpoint.runs import different, metrics_of, values_of
from tests.commands import LONGEST_S, nanotron

STEPS = 60
DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch")


def written(folder: Path, layout: tuple[int, int, int] = (1, 2, 1)) -> Path:
    """A run's folder with its config."""
    folder.mkdir(exist_ok=True)
    values = values_of("run", layout, tokens__train_steps=STEPS, general__threads_per_rank=1)
    (folder / "x.yaml").write_text(yaml.safe_dump(values))
    return folder


def test_a_script_asks_for_what_the_layout_needs_and_bash_can_read_it(tmp_path: Path) -> None:
    folder = written(tmp_path, (4, 2, 2))
    ran = nanotron(folder, "slurm", "x.yaml", "--per-node", 8, "--sbatch=--partition=big one", "--time=2:00:00")
    assert (ran.returncode, ran.stdout) == (0, "run/slurm/job.sh: next, `sbatch run/slurm/job.sh`\n"), ran.stderr
    script = (folder / "run/slurm/job.sh").read_text()
    asked = re.findall("^#SBATCH (.*)$", script, re.MULTILINE)
    assert {"--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=2:00:00", "--requeue"} < set(asked)
    assert "'--partition=big one'" in asked
    assert "--signal=USR1@90" in asked, "checkpoints.preempt_grace_s and a margin"
    assert "LOCAL_WORLD_SIZE=8" in script
    assert subprocess.run(["bash", "-n", folder / "run/slurm/job.sh"], check=False).returncode == 0


def test_what_cannot_be_a_job_is_said_in_a_line(tmp_path: Path) -> None:
    folder = written(tmp_path)
    for options, line in {
        ("--per-node=3", "--nodes=1"): "makes 2 ranks, but 3 are launched",
        ("--override=parallelism.dp=3", "--per-node=4"): "--per-node 4: does not divide the 6 ranks of the layout",
        ("--submit", "--cpu"): "--submit: sbatch: No such file or directory; run this where Slurm's commands are",
    }.items():
        ran = nanotron(folder, "slurm", "x.yaml", *options, environment={"PATH": "/nowhere"})
        assert ran.returncode == codes.USER_MISTAKE
        assert len(ran.stderr.splitlines()) == 1
        assert line in ran.stderr


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two nodes on this machine, for as long as the test takes."""
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing or os.getuid():
        pytest.skip(f"needs root and Debian's slurmctld, slurmd, slurm-client and munge ({missing}): make slurm")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder.parent, folder.parent.parent):
        parent.chmod(0o755)  # munge's socket has to be within reach of everyone
    subprocess.run(["bash", Path(__file__).with_name("cluster.sh"), folder], check=True)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # the nodes' names are known to Slurm only
    try:
        wait_for(lambda: asked("sinfo", "--noheader", "--format=%D %t", "--partition=low") == "2 idle")
        yield
    finally:
        asked("scancel", "--user=root", "--signal=KILL", "--full")
        for file in folder.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGTERM)


def asked(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not happened():
        assert time.monotonic() < deadline, asked("scontrol", "show", "job")
        time.sleep(0.2)


def num_steps(folder: Path) -> int:
    metrics = folder / "run/metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_a_job_that_is_preempted_saves_is_queued_again_and_ends_like_one_that_was_not(tmp_path: Path) -> None:
    folder, plain = written(tmp_path / "job"), written(tmp_path / "plain")
    asks = ("--nodes=2", "--per-node=1", "--cpu", "--submit", "--time=1:00:00")
    ran = nanotron(folder, "slurm", "x.yaml", *asks)
    number = ran.stdout.rpartition(" job ")[2].strip()
    assert number.isdigit(), ran.stderr
    wait_for(lambda: num_steps(folder) >= 5)
    more_urgent = ("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")
    subprocess.run(["sbatch", *more_urgent], cwd=tmp_path, check=True)
    wait_for(lambda: "JobState=COMPLETED" in asked("scontrol", "show", "job", number))
    assert "Restarts=1" in asked("scontrol", "show", "job", number)
    logs = "".join(path.read_text() for path in sorted((folder / "run/slurm").glob("*.log")))
    (stopped,) = re.findall(r"stopped at step (\d+) as told, saved", logs)
    assert 5 <= int(stopped) < STEPS
    assert f"resuming from run/{stopped}, step {stopped}" in logs
    assert nanotron(plain, "train", "x.yaml").returncode == codes.DONE
    assert metrics_of(folder / "run") == metrics_of(plain / "run")
    assert different(folder / "run" / str(STEPS), plain / "run" / str(STEPS)) == []
