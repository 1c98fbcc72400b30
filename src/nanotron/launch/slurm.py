"""A run as a Slurm job: a batch script whose srun starts one task per rank, and what becomes of it.

    sbatch ──► srun: world tasks, each of them a rank        rank 0 holds the store, at the first node's address
    the limit is near, or a job is preempted: USR1, TERM ──► every rank saves, exits with 75 ──► the job is queued again

No torchrun is between them: srun starts, signals and ends tasks, keeps their output by node, and tells their exit code.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanotron.errors import ConfigError
from nanotron.launch import codes
from nanotron.launch.folder import run_directory
from nanotron.launch.run import SAVE_MARGIN_S

if TYPE_CHECKING:
    from nanotron.config import Config

FAILURE_WAIT_S = 60  # from the end of the first task to that of the others, which name who failed first meanwhile

_SCRIPT = """\
#!/bin/bash
{directives}

# A signal is for the tasks, which save; this script only waits for them.
trap : USR1 TERM
export MASTER_ADDR="${{MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}}"
export MASTER_PORT="${{MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}}"
export WORLD_SIZE="$SLURM_NTASKS" LOCAL_WORLD_SIZE={per_node}
cd {folder}

srun --kill-on-bad-exit=0 --wait={wait} --output={logs}/%j-%N.log --open-mode=append \\
  bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"' rank \\
  {command} &
while true; do # a signal ends a wait, not srun
  wait $!
  code=$?
  kill -0 $! 2> /dev/null || break
done

if [ "$code" = {preempted} ]; then # saved: the same job goes on from there
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def script(
    config: Config, argv: Sequence[str], *, nodes: int, per_node: int, gpus: bool, time: str, options: Sequence[str]
) -> str:
    """The batch script of a config that has been checked; ``argv`` are the options of ``run_train.py``.

    ``time``: the job's limit, as sbatch reads it. ``options``: further ones of sbatch, such as `--partition=big`.
    """
    logs = (run_directory(config) / "slurm").absolute()
    before_limit = math.ceil(config.checkpoints.preempt_grace_s + SAVE_MARGIN_S)
    directives = [
        f"--job-name={config.general.project}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={per_node}",
        *([f"--gpus-per-node={per_node}"] if gpus else []),
        f"--time={time}",
        f"--signal=USR1@{before_limit}",
        "--requeue",
        "--open-mode=append",
        f"--output={logs}/%j.log",
        *options,
    ]
    program = "import sys; from nanotron.launch.run import run_train; sys.exit(run_train())"
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {shlex.quote(directive)}" for directive in directives),
        per_node=per_node,
        folder=shlex.quote(os.getcwd()),
        wait=FAILURE_WAIT_S,
        logs=shlex.quote(str(logs)),
        command=shlex.join([sys.executable, "-c", program, *argv]),
        preempted=codes.PREEMPTED,
    )


def write_script(config: Config, text: str) -> Path:
    """Write the script to the run's folder, where its logs go too."""
    path = run_directory(config) / "slurm" / "job.sh"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; set general.run_dir to a folder that can be written") from error
    return path


def submit(path: Path) -> str:
    """Hand a script in; returns the number of the job. Raises ConfigError when Slurm does not take it."""
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"--submit: sbatch: {error.strerror}; run this where Slurm's commands are") from error
    number = re.search(r"Submitted batch job (\d+)", done.stdout)
    if done.returncode or number is None:
        raise ConfigError(f"--submit: {' '.join((done.stderr or done.stdout).split())}")
    return number[1]
