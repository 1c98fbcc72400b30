"""Who this process is among its peers, and what it runs on."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nanotron.errors import ConfigError
from nanotron.metrics.memory import resident_bytes

if TYPE_CHECKING:
    import torch


SETS_THEM = "torchrun sets it, or whoever starts the ranks without torchrun"


@dataclass(frozen=True)
class Place:
    """One process of a run: its rank of ``world``, and its place among the ranks of its machine; alone by default."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = ""
    """MASTER_ADDR, where ranks meet, and with ``port`` MASTER_PORT; unused in a run of one process."""
    port: int = 0
    launched: bool = False
    """Whether a launcher watches over this process: torchrun, or our own."""
    store_is_launchers: bool = False
    """Whether that launcher holds the store at the address, else rank 0 does."""
    restartable: bool = False
    """Whether the launcher may start the ranks again, more or fewer of them, around its store: torchrun."""

    @property
    def num_nodes(self) -> int:
        """Machines of the run, each with as many ranks."""
        return self.world // self.local_world

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Place:
        """Read what torchrun sets; without it this process is the whole run.

        Raises ConfigError for numbers that make no run, and for those that are missing.
        """
        numbers = _Numbers(environment)
        world = numbers.read("WORLD_SIZE", 1, least=1, most=1 << 24)
        if numbers.problems:  # all others are measured by it
            raise ConfigError(numbers.problems)
        if world > 1:
            numbers.need("RANK", "MASTER_ADDR", "MASTER_PORT")
        local_world = numbers.read("LOCAL_WORLD_SIZE", world, least=1, most=world)
        by_torchrun = "TORCHELASTIC_RUN_ID" in environment
        has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        rank = numbers.read("RANK", 0, least=0, most=world - 1)
        place = Place(
            rank=rank,
            world=world,
            local_rank=numbers.read("LOCAL_RANK", rank % local_world, least=0, most=local_world - 1),
            local_world=local_world,
            address=environment.get("MASTER_ADDR", ""),
            port=numbers.read("MASTER_PORT", 0, least=1, most=65535) if world > 1 else 0,
            launched=by_torchrun or has_store,
            store_is_launchers=has_store,
            restartable=by_torchrun and has_store,
        )
        if numbers.problems:
            raise ConfigError(numbers.problems)
        return place


class _Numbers:
    """Whole numbers of the environment, and what is wrong with them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.problems: list[str] = []

    def read(self, name: str, default: int, *, least: int, most: int) -> int:
        """The variable's value, or ``default`` where it is not set or not allowed."""
        text = self._environment.get(name, "").strip()
        if not text:
            return default
        if text.isdecimal() and text.isascii() and len(text) < 10 and least <= int(text) <= most:
            return int(text)
        with_world = f" with WORLD_SIZE={self._environment.get('WORLD_SIZE', '1')}" if name != "WORLD_SIZE" else ""
        self.problems.append(f"{name}={text[:20]}: {SETS_THEM}, to a whole number from {least} to {most}{with_world}")
        return default

    def need(self, *names: str) -> None:
        """Let these variables be set."""
        for name in names:
            if not self._environment.get(name, "").strip():
                self.problems.append(
                    f"{name} is not set, but WORLD_SIZE={self._environment['WORLD_SIZE']}: {SETS_THEM}"
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

    A launcher may show each rank its own accelerator alone, which is number 0 to each of them (srun --gpus-per-task=1);
    whether it is their own, the ranks tell each other (alike.py). Raises ConfigError for fewer accelerators than ranks.
    """
    import torch
    import torch.distributed as dist

    kind = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.get_default_backend_for_device(kind) if kind is not None else "gloo"
    if kind is None or backend == "gloo":
        return torch.device("cpu"), "gloo"
    count = torch.accelerator.device_count()
    if 1 < count < place.local_world:
        raise ConfigError(
            f"{place.local_world} ranks on this machine, which has {count} {kind.type} devices; start at most one rank "
            "per device"
        )
    index = place.local_rank if count > 1 else 0
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index), backend


def identity_of(device: torch.device) -> str | None:
    """What no other accelerator is called, on any machine; None for a CPU, and where the device does not tell."""
    import torch

    if device.type == "cpu":
        return None
    found = getattr(torch.get_device_module(device).get_device_properties(device), "uuid", None)
    return None if found is None else str(found)


def name_of(device: torch.device) -> str:
    """What kind of device it is: two of one name compute alike."""
    import torch

    if device.type == "cpu":
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return str(torch.get_device_module(device).get_device_name(device))


def repeat_bits(environment: MutableMapping[str, str]) -> None:
    """Let an accelerator give the same bits whenever it computes the same; what cannot raises an error that names it.

    Has to come before the first kernel. cuDNN's attention is left out, cuBLAS keeps one workspace per stream, flash
    attention's backward and ``index_add_`` add up in a fixed order.
    """
    import torch

    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nobody reads it
    torch.backends.cuda.enable_cudnn_sdp(False)


def grow_segments(environment: MutableMapping[str, str]) -> None:
    """Let CUDA's allocator grow its segments: tensors of changing sizes leave no gaps. Before the first of them."""
    if not environment.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def schedule_as_batch() -> None:
    """Let gloo's receiving thread wait its turn: it otherwise preempts the thread that it waits for, and spins.

    Inherited by threads, so it has to come before they start. Only a hint: where it is not allowed nothing changes.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_freed_memory() -> None:
    """Let the C library keep what is freed: it otherwise hands large tensors back to the system, step after step.

    Each would then be zeroed page by page when it comes again. Small pieces are merged with free neighbours at once,
    not kept apart for the next of their size: between two large ones they would be in the way (FreedMemory). Only glibc
    has these choices; elsewhere nothing changes.
    """
    fast_bins, trim_threshold, mmap_threshold = 1, -1, -3  # as malloc.h numbers them; values are bytes
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(fast_bins, 0)
        if libc.mallopt(mmap_threshold, 2**30) or libc.mallopt(mmap_threshold, 2**25):  # the most before glibc 2.35
            libc.mallopt(trim_threshold, 2**31 - 1)


STEPS_BETWEEN_TRIMS = 8


class FreedMemory:
    """Hands freed memory back to the system where it piles up from step to step.

    torch wants tensors aligned, and for that glibc looks for 96 bytes more than it then hands out. What a tensor leaves
    is too small for the next one of its size, wherever something small lives on beside it, so each takes new memory
    though no more is in use: a rank of the tiny example had grown to 1.1 GB after 80 steps.
    """

    def __init__(self) -> None:
        self._limit: int | None = None
        self._steps = 0

    def after_step(self) -> None:
        """Hand everything free back once a sixteenth more is resident, 16 MiB at least, than a step needs.

        Not in every step: what the next one needs has to be paged in again, some per cent of it.
        """
        resident, self._steps = resident_bytes(), self._steps + 1
        if self._limit is None:  # a whole step was made since: all that it needs is there
            self._limit = resident + max(resident // 16, 16 << 20)
        elif resident > self._limit and self._steps >= STEPS_BETWEEN_TRIMS:
            with suppress(OSError, AttributeError):  # only glibc can
                ctypes.CDLL(None).malloc_trim(0)
            self._limit, self._steps = None, 0


def keep_few_shapes(environment: MutableMapping[str, str]) -> None:
    """Let oneDNN keep the code it compiled for 128 shapes of matmuls, not 1,024, unless the environment says how many.

    Each takes a third of a megabyte, and is kept by torch as well as by oneDNN. A run meets some dozens of shapes; only
    attention to long documents of all lengths meets new ones all the time, and compiling takes less than a millisecond.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # read when the first matmul is made
        environment.setdefault(name, "128")


def cpp_compiler() -> str:
    """The C++ compiler that torch.compile looks for, to make a CPU's kernels."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def has_compiler(device: torch.device) -> bool:
    """Whether kernels can be compiled here: a GPU's by Triton, which builds its launchers with a C compiler."""
    if device.type == "cpu":
        compilers = [cpp_compiler()]
    elif device.type == "cuda" and find_spec("triton"):
        compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    else:
        return False
    return any(map(shutil.which, compilers)) and Path(sysconfig.get_paths()["include"], "Python.h").exists()
