"""What a rank measures of its device, clock, links and storage. The best of several tries counts, for others may be at
work on the same machine. All but ``disk_rates`` is called by all ranks at once.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from nanotron.checkpoint.storage import CHUNK_BYTES, Folder, LocalFolder
from nanotron.launch.alike import KIND_OF, VERSION_OF
from nanotron.launch.folder import cpu_model
from nanotron.parallel.agreement import Agreement
from nanotron.parallel.mesh import Mesh

TRIES = 10
MATMULS_S = 0.5  # long enough that every rank has a core for a while, where they share them
DISK_BYTES = 32 << 20
AXES = ("tp", "cp", "ep", "dp", "pp")
THAT_MATTER = re.compile(r"(NCCL|GLOO|TORCH_NCCL|UCX|FI|OMP|MKL|CUDA|PYTORCH)_\w+")
OF_A_RANK = {"CUDA_VISIBLE_DEVICES"}


def facts_of(device: torch.device) -> dict[str, str]:
    """Versions, and the kind of device: what should be the same on all ranks."""
    facts = {f"{VERSION_OF}{package}": version(package) for package in ("nanotron", "torch")}
    facts[f"{VERSION_OF}python"] = platform.python_version()
    if device.type == "cpu":
        return facts | {f"{KIND_OF}device": cpu_model()}
    with suppress(OSError, TypeError):
        found = re.search(r"\d+\.\d+[.\d]*", Path("/proc/driver/nvidia/version").read_text())
        facts[f"{VERSION_OF}driver"] = found[0]  # type: ignore[index]
    if device.type == "cuda" and dist.is_nccl_available():
        found_version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        facts[f"{VERSION_OF}NCCL"] = ".".join(map(str, found_version))
    return facts | {f"{KIND_OF}device": str(torch.get_device_module(device).get_device_name(device))}


def variables_that_matter() -> dict[str, str]:
    """Of the environment, what libraries between ranks and devices read."""
    found = {name: os.environ[name] for name in sorted(os.environ) if THAT_MATTER.fullmatch(name)}
    return {name: value for name, value in found.items() if name not in OF_A_RANK}


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matmul."""
    size = 512 if device.type == "cpu" else 8192
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    best, until = _seconds(lambda: multiply(a, b), device), time.perf_counter() + MATMULS_S
    while time.perf_counter() < until:
        best = min(best, _seconds(lambda: multiply(a, b), device))
    return 2 * size**3 / best


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b."""
    return a @ b


def disk_rates(folder: Folder, rank: int) -> dict[str, float]:
    """Bytes per second that this rank writes durably into a folder, and reads back: from storage where Linux lets go of
    what it has in memory.
    """
    name, chunk = f".doctor-{rank}", os.urandom(CHUNK_BYTES)
    folder.make()
    began = time.perf_counter()
    folder.write(name, (chunk for _ in range(DISK_BYTES // CHUNK_BYTES)))
    written = time.perf_counter()
    try:
        if isinstance(folder, LocalFolder) and hasattr(os, "posix_fadvise"):
            with open(f"{folder.path}/{name}", "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begins_to_read = time.perf_counter()
        for _ in folder.stream(name, 0, DISK_BYTES):
            pass
        read = time.perf_counter()
    finally:
        folder.remove(name)
    return {"write": DISK_BYTES / (written - began), "read": DISK_BYTES / (read - begins_to_read)}


def try_to_write(folder: Folder) -> None:
    """Raises OSError where that is not possible."""
    folder.make()
    folder.write(".doctor", [b""])
    folder.remove(".doctor")


def clock_offset(agreement: Agreement) -> tuple[float, float]:
    """Seconds by which this machine's clock is ahead of rank 0's, and how far off that may be: half a round trip."""
    found = []
    for number in range(TRIES):
        before = wall_clock()
        theirs = agreement.decide(f"clock {number}", None, lambda _: wall_clock())
        after = wall_clock()
        found.append(((after - before) / 2, (before + after) / 2 - theirs))
    error, offset = min(found)
    return offset, error


def wall_clock() -> float:
    """Seconds since 1970."""
    return time.time()


def links(mesh: Mesh, device: torch.device, local_world: int) -> Iterator[tuple[str, float, int]]:
    """(what, value, from which rank) of the links along each axis, all ranks sending to the next one on it at once:
    bandwidth in bytes per second, latency in seconds.
    """
    size = 4 << 20 if device.type == "cpu" else 64 << 20
    for axis in AXES:
        ranks = mesh.ranks_along(axis)
        if len(ranks) == 1:
            continue
        place = ranks.index(mesh.rank)
        source, target = ranks[place - 1], ranks[(place + 1) % len(ranks)]
        between = " between hosts" if source // local_world != mesh.rank // local_world else ""
        for kind, num_bytes in (("bandwidth", size), ("latency", 8)):
            sent, received = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
            seconds = min(pass_on(sent, received, source, target) for _ in range(TRIES))
            yield f"{kind} {axis}{between}", num_bytes / seconds if kind == "bandwidth" else seconds, source


def pass_on(sent: torch.Tensor, received: torch.Tensor, source: int, target: int) -> float:
    """Send to one rank what another sends to this one; seconds until that is here. All ranks begin at once."""
    dist.barrier()
    transfers = [dist.P2POp(dist.irecv, received, source), dist.P2POp(dist.isend, sent, target)]
    works: list[dist.Work] = []

    def receive() -> None:
        works.extend(dist.batch_isend_irecv(transfers))
        works.pop(0).wait()

    seconds = _seconds(receive, received.device)
    for work in works:
        work.wait()
    return seconds


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    _settle(device)
    began = time.perf_counter()
    action()
    _settle(device)
    return time.perf_counter() - began


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
