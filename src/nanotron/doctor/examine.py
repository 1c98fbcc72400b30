"""Every rank measures, rank 0 tells; together they know whether anything is out of line."""

from __future__ import annotations

import json
import shutil
import socket
from typing import TYPE_CHECKING, Any

import torch

from nanotron.checkpoint.resume import check_shared
from nanotron.checkpoint.storage import LocalFolder, open_folder
from nanotron.doctor import measure
from nanotron.doctor.judge import problems_of, table
from nanotron.errors import say
from nanotron.launch import codes
from nanotron.launch.folder import run_directory
from nanotron.launch.place import Place
from nanotron.logging import human_format
from nanotron.optim.muon import Muon
from nanotron.optim.optimizer import SGD, AdamW
from nanotron.parallel.agreement import Agreement
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.store import Store
from nanotron.training.topology import parameter_specs

if TYPE_CHECKING:
    from nanotron.config import Config

NUM_MOMENTS = {"adamW": len(AdamW.moment_names), "sgd": len(SGD.moment_names), "muon": len(Muon.moment_names)}


def examine(
    config: Config, place: Place, mesh: Mesh, device: torch.device, store: Store | None, *, as_json: bool = False
) -> int:
    """Measure on every rank, and print on rank 0; returns the exit code: 1 where something is out of line.

    Collective. Raises ConfigError for a folder of checkpoints that cannot be written, or is not one for all ranks.
    """
    general, path = config.general, config.checkpoint_places[0]
    agreement = Agreement("doctor", mesh.rank, mesh.world, store, timeout_s=general.timeout_s)
    check_shared(path, mesh.rank, mesh.world, store, timeout_s=general.timeout_s)
    clock = measure.clock_offset(agreement)
    numbers = {f"matmul {config.model.dtype}": measure.matmul_rate(device, getattr(torch, config.model.dtype))}
    sources = {}
    for what, value, source in measure.links(mesh, device, place.local_world):
        numbers[what], sources[what] = value, source
    problems: list[str] = []
    with agreement.at_work(f"measuring {path}"):
        if place.local_rank == 0:
            try:
                numbers |= measure.disk_rates(open_folder(path), mesh.rank)
                if mesh.rank == 0:
                    measure.try_to_write(LocalFolder(str(run_directory(config))))
            except OSError as error:
                where = f"{error.filename or path} on {socket.gethostname()}"
                problems.append(f"{where}: {error.strerror}; checkpoints and the run's folder have to be writable")
    account = {
        "rank": mesh.rank,
        "host": socket.gethostname(),
        "device": str(device),
        "facts": measure.facts_of(device),
        "variables": measure.variables_that_matter(),
        "numbers": numbers,
        "sources": sources,
        "clock": clock,
        "problems": problems,
    }

    def tell(accounts: list[Any]) -> list[str]:
        room, size = _room(path), checkpoint_bytes(config)
        found = problems_of(accounts)
        if room is not None and room < size:
            found.append(f"checkpoints.checkpoints_path={_storage(path, room, size)}; make room")
        if as_json:
            say(json.dumps({"problems": found, "checkpoint_bytes": size, "free_bytes": room, "ranks": accounts}))
        else:
            say(*table(accounts, _storage(path, room, size)))
            say(*(f"out of line: {line}" for line in found) if found else ["nothing is out of line"])
        return found

    return codes.INTERNAL_ERROR if agreement.decide("accounts", account, tell) else codes.DONE


def checkpoint_bytes(config: Config) -> int:
    """What a checkpoint of the run takes, but for its names and numbers."""
    weight = getattr(torch, config.model.dtype).itemsize
    update = max(weight, 4)
    averages = int(config.optimizer.ema_decay is not None)
    total = 0
    for spec in parameter_specs(config).values():
        if spec.learns:
            states = NUM_MOMENTS[spec.optimizer] + averages + (update > weight)
            total += spec.numel * (weight + states * update)
        else:
            total += spec.numel * update
    return total


def _room(path: str) -> int | None:
    """Free bytes where a local folder is or will be; None of a remote one."""
    folder = open_folder(path)
    return shutil.disk_usage(folder.path).free if isinstance(folder, LocalFolder) else None


def _storage(path: str, room: int | None, size: int) -> str:
    free = "" if room is None else f"{_bytes(room)} free, "
    return f"{path}: {free}a checkpoint takes {_bytes(size)}"


def _bytes(count: int) -> str:
    return human_format(count).replace("B", "G") + "B"  # billions are giga here
