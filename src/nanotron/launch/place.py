"""Who this process is among its peers, and what it runs on."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanotron.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Place:
    """One process of a run: its rank of ``world``, and its place among the ranks of its machine."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def num_nodes(self) -> int:
        """Machines of the run, each with as many ranks."""
        return self.world // self.local_world

    @property
    def node(self) -> int:
        """Which of the machines this is, from 0."""
        return self.rank // self.local_world

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Place:
        """Read what torchrun sets; without it this process is the whole run."""
        world = int(environment.get("WORLD_SIZE", "1"))
        rank = int(environment.get("RANK", "0"))
        return Place(
            rank=rank,
            world=world,
            local_rank=int(environment.get("LOCAL_RANK", rank)),
            local_world=int(environment.get("LOCAL_WORLD_SIZE", world)),
        )


def num_threads(asked: int | None, place: Place, environment: Mapping[str, str]) -> int:
    """CPU threads of this rank: ``general.threads_per_rank``, else OMP_NUM_THREADS, else cores // ranks of the machine.

    torchrun sets OMP_NUM_THREADS to 1 where nobody set it; that 1 is not taken for a wish.
    """
    if asked is not None:
        return asked
    wished = environment.get("OMP_NUM_THREADS", "")
    by_torchrun = wished == "1" and "TORCHELASTIC_RUN_ID" in environment
    if wished.isdigit() and int(wished) > 0 and not by_torchrun:
        return int(wished)
    return max(1, num_cores() // place.local_world)


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(place: Place) -> tuple[torch.device, str]:
    """This rank's device and the backend that connects such devices: an accelerator when there is one, else the CPU.

    Raises ConfigError when the machine has fewer accelerators than ranks.
    """
    import torch
    import torch.distributed as dist

    kind = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.get_default_backend_for_device(kind) if kind is not None else "gloo"
    if kind is None or backend == "gloo":
        return torch.device("cpu"), "gloo"
    if place.local_world > torch.accelerator.device_count():
        raise ConfigError(
            f"{place.local_world} ranks on this machine, which has {torch.accelerator.device_count()} {kind.type} "
            "devices; start at most one rank per device"
        )
    torch.accelerator.set_device_index(place.local_rank)
    return torch.device(kind.type, place.local_rank), backend


def schedule_as_batch() -> None:
    """Let gloo's receiving thread wait its turn: it otherwise preempts the thread that it waits for, and spins.

    Inherited by threads, so it has to come before they start. Only a hint: where it is not allowed nothing changes.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_freed_memory() -> None:
    """Let the C library keep what is freed: it otherwise hands large tensors back to the system, step after step.

    Each would then be zeroed page by page when it comes again. Resident memory stays at its peak. Only glibc has this
    choice; elsewhere nothing changes.
    """
    trim_threshold, mmap_threshold = -1, -3  # as malloc.h numbers them; values are bytes
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        if libc.mallopt(mmap_threshold, 2**30) or libc.mallopt(mmap_threshold, 2**25):  # the most before glibc 2.35
            libc.mallopt(trim_threshold, 2**31 - 1)


def keep_few_shapes(environment: MutableMapping[str, str]) -> None:
    """Let oneDNN keep the code it compiled for 128 shapes of products, not 1,024, unless the environment says how many.

    Each takes a third of a megabyte, and is kept by torch as well as by oneDNN. A run meets some dozens of shapes; only
    attention to long documents of all lengths meets new ones all the time, and compiling takes less than a millisecond.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # read when the first product is made
        environment.setdefault(name, "128")
