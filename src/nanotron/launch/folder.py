"""The run directory: where it is, and the files that say what was run and on what.

<run_dir>/
  config.yaml         the config with every default filled in
  environment.json    machine, versions, layout, threads
  tokenizer.json      (and tokenizer_config.json) when the tokenizer is local
  metrics.jsonl  tensorboard/  traces/  failures/
  .lock               who is at work here (in the folder of the checkpoints, where that is another)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nanotron.data.probe import tokenizer_name
from nanotron.data.tokenize.tokenizer import tokenizer_file
from nanotron.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from nanotron.config import Config
    from nanotron.parallel.mesh import Mesh

PACKAGES = ("nanotron", "torch", "numpy", "pydantic", "safetensors", "tokenizers")


def name_of_run(pattern: str) -> str:
    """``general.run`` with ``%date`` and ``%jobid`` filled in."""
    now = time.strftime("%Y%m%d_%H%M%S")
    return pattern.replace("%date", now).replace("%jobid", os.environ.get("SLURM_JOB_ID", "local"))


def run_directory(config: Config) -> Path:
    """``general.run_dir``; else ``checkpoints.checkpoints_path`` when that is local; else ``runs/<run>``."""
    if config.general.run_dir is not None:
        return Path(config.general.run_dir)
    checkpoints = config.checkpoints.checkpoints_path
    return Path(checkpoints) if "://" not in checkpoints else Path("runs") / config.general.run


def claim_folder(config: Config) -> IO[str]:
    """Keep a second run out of the checkpoints' folder while the returned file is open: each would spoil the other's.

    For remote checkpoints it is the run directory's. The kernel lets go when the process ends, however it ends; where
    a file system has no locks nobody is kept out. Raises ConfigError when another run is at work there.
    """
    path = config.checkpoints.checkpoints_path
    folder = run_directory(config) if "://" in path else Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, it is no child process's too
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return file
        file.seek(0)
        with file:
            raise ConfigError(
                f"another run is at work in {folder} ({file.read().strip()}); wait until it has ended, or set"
                " checkpoints.checkpoints_path to another folder"
            ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def describe_run(run_dir: Path, config: Config, mesh: Mesh, device: torch.device) -> None:
    """Write the files that describe the run (rank 0)."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config.save_as_yaml(run_dir / "config.yaml", resolved=True)
    text = json.dumps(environment(mesh, device), indent=1)
    (run_dir / "environment.json").write_text(text + "\n", encoding="utf-8")
    tokenizer = tokenizer_file(tokenizer_name(config) or "")
    if tokenizer is not None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            source = Path(tokenizer).with_name(name)
            if source.is_file() and source.resolve() != (run_dir / name).resolve():
                shutil.copyfile(source, run_dir / name)


def environment(mesh: Mesh, device: torch.device) -> dict[str, Any]:
    """What a reader of old numbers asks for: machine, versions, layout, threads, command."""
    import torch

    is_cpu = device.type == "cpu"
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "device": _cpu_model() if is_cpu else torch.get_device_module(device).get_device_name(device),
        "layout": {axis: mesh.size(axis) for axis in ("pp", "dp", "cp", "tp")},
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
