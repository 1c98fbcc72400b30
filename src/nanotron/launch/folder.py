"""The run directory: where it is, and the files that say what was run and on what.

<run_dir>/
  config.yaml         the config with every default filled in
  environment.json    machine, versions, layout, threads
  tokenizer.json      the tokenizer of the data, and what else says how it is used
  metrics.jsonl  starts.jsonl  expert_loads.jsonl  tensorboard/  traces/  failures/
  .lock               who is at work here (and in the folder of the checkpoints, where that is another)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from nanotron.checkpoint.storage import LocalFolder
from nanotron.config.document import dump
from nanotron.data.probe import tokenizer_name
from nanotron.data.tokenize.tokenizer import kept_files, read_files
from nanotron.errors import ConfigError
from nanotron.logging import get_logger
from nanotron.parallel.agreement import Agreement
from nanotron.parallel.store import Store

if TYPE_CHECKING:
    import torch

    from nanotron.config import Config
    from nanotron.parallel.mesh import Mesh

T = TypeVar("T")

logger = get_logger(__name__)

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


def on_rank_0(what: str, action: Callable[[], T], config: Config, mesh: Mesh, store: Store | None) -> T | None:
    """Do on rank 0 what touches the run's folders and return its result there; what keeps it from that, all ranks tell.

    Collective through the store. Raises ConfigError on every rank.
    """
    made: list[T] = []

    def act(_: list[Any]) -> list[str]:
        try:
            made.append(action())
        except ConfigError as mistake:
            return mistake.problems
        except OSError as error:
            file = error.filename2 or error.filename or run_directory(config)
            return [
                f"the run directory cannot be written: {file} ({error.strerror}); make room, or set general.run_dir or"
                " checkpoints.checkpoints_path to another folder"
            ]
        return []

    agreement = Agreement(f"folder/{what}", mesh.rank, mesh.world, store, timeout_s=config.general.timeout_s)
    problems = agreement.decide("done", None, act, doing=f"writing to {run_directory(config)}")
    if problems:
        raise ConfigError(problems)
    return made[0] if made else None


def claim_folders(config: Config) -> ExitStack:
    """Keep a second run out of this one's folders while the returned stack is open: each would spoil the other's.

    The kernel lets go when the process ends, however it ends; where a file system has no locks nobody is kept out.
    Raises ConfigError when another run is at work in one of them.
    """
    checkpoints, copies = config.checkpoint_places
    places = [(str(run_directory(config)), "general.run_dir"), (checkpoints, "checkpoints.checkpoints_path")]
    places += [(copies, "s3_upload.upload_s3_path")] if copies is not None else []
    local = [(path.removeprefix("file://"), key) for path, key in places]
    folders = {os.path.realpath(path): (path, key) for path, key in local if "://" not in path}
    with ExitStack() as claims:
        for path, key in folders.values():  # one lock a folder: closing a second file of it would give up the first
            claims.enter_context(_claim(Path(path), key))
        return claims.pop_all()


def _claim(folder: Path, key: str) -> IO[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("a+b", buffering=0)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, it is no child process's too
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return file
        file.seek(0)
        with file:
            who = file.read().decode().strip()
        raise ConfigError(
            f"another run is at work in {folder} ({who}); wait until it has ended, or set {key} to another folder"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return file


def describe_run(run_dir: Path, config: Config, mesh: Mesh, device: torch.device) -> None:
    """Write the files that describe the run (rank 0); on a full disk the old ones stay whole."""
    folder = LocalFolder(str(run_dir))
    folder.write("config.yaml", [dump(config.to_dict()).encode()])
    folder.write("environment.json", [json.dumps(environment(mesh, device), indent=1).encode(), b"\n"])
    for name, text in _tokenizer_files(run_dir, config).items():
        folder.write(name, [text.encode()])


def _tokenizer_files(run_dir: Path, config: Config) -> dict[str, str]:
    """The files that keep the tokenizer in the run directory; a line says so where it is not to be had."""
    name = tokenizer_name(config)
    try:
        return kept_files(read_files(name), name) if name else {}
    except ConfigError as error:
        logger.warning(f"{run_dir} keeps no tokenizer: {error}")
        return {}


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
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "device": cpu_model() if is_cpu else torch.get_device_module(device).get_device_name(device),
        "layout": mesh.layout(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def cpu_model() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
