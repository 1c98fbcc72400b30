"""Who a process is, and how many threads it takes."""

import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanotron.errors import ConfigError
from nanotron.launch.place import Place, choose_device, grow_segments, identity_of, num_cores, num_threads
from tests.commands import nanotron

FAULTS = """
import resource
from nanotron.launch.place import keep_freed_memory

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(10))
keep_freed_memory()
faults(1)
print(faults(10))
"""
SHAPES = """
import os, torch
from nanotron.launch.place import keep_few_shapes

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def multiply(rows):
    torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 64), weight, None, "none", [], "")

torch.set_num_threads(1)
keep_few_shapes(os.environ)
weight = torch.ones(32, 64)
multiply(1)
before = resident()
for rows in range(2, 450):
    multiply(rows)
print(resident() - before)
"""
HOLES = """
import torch
from nanotron.launch.place import FreedMemory, keep_freed_memory
from nanotron.metrics.memory import resident_bytes

torch.set_num_threads(1)
keep_freed_memory()
freed_memory, before = FreedMemory(), resident_bytes()
freed_memory.after_step()
large, small = zip(*[(torch.zeros(2**18), torch.zeros(1)) for _ in range(64)])  # a small one behind each
del large
for step in range(2, 9):
    freed_memory.after_step()
    print(resident_bytes() - before)
"""
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_without_a_launcher_a_process_is_the_whole_run() -> None:
    place = Place.from_environment({})
    assert (place.rank, place.world, place.local_rank, place.local_world) == (0, 1, 0, 1)
    assert place.num_nodes == 1


def test_torchrun_tells_rank_and_machine() -> None:
    place = Place.from_environment(TORCHRUN)
    assert (place.rank, place.world, place.local_rank, place.local_world) == (5, 8, 1, 4)
    assert place.num_nodes == 2
    assert (place.address, place.port, place.launched) == ("node-0", 29500, True)


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"WORLD_SIZE": "abc"}, ["WORLD_SIZE=abc"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({"WORLD_SIZE": "1" * 5000}, ["WORLD_SIZE=1"]),
        ({"LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0"]),
        ({"LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9"]),
        ({"RANK": "8", "LOCAL_RANK": "-1"}, ["RANK=8", "LOCAL_RANK=-1"]),
        ({"RANK": ""}, ["RANK is not set, but WORLD_SIZE=8"]),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, ["MASTER_ADDR is not set", "MASTER_PORT is not set"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT=http"]),
    ],
    ids=str,
)
def test_an_environment_that_makes_no_run_is_told_with_its_values(changes: dict[str, str], problems: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        Place.from_environment(TORCHRUN | changes)
    assert all(told.startswith(line) for told, line in zip(refused.value.problems, problems, strict=True))


@pytest.mark.parametrize(("cores", "threads"), [(8, 2), (7, 1), (2, 1)])
def test_the_cores_of_a_machine_are_shared_out_among_its_ranks_whatever_torchrun_sets(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanotron.launch.place.num_cores", lambda: cores)
    assert num_threads(None, Place.from_environment(TORCHRUN), TORCHRUN) == threads


@pytest.mark.parametrize(
    ("asked", "environment", "threads"),
    [
        (3, {"OMP_NUM_THREADS": "5"}, 3),
        (None, {"OMP_NUM_THREADS": "5"}, 5),
        (None, TORCHRUN | {"OMP_NUM_THREADS": "5"}, 5),
        (None, {"OMP_NUM_THREADS": "1"}, 1),
        (None, {}, num_cores()),
    ],
    ids=["the config wins", "a wish", "a wish under torchrun", "a wish for one", "all cores"],
)
def test_threads_are_the_configs_else_the_environments_else_all(
    asked: int | None, environment: dict[str, str], threads: int
) -> None:
    assert num_threads(asked, Place(0, 1, 0, 1), environment) == threads


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep freed memory")
def test_freed_tensors_are_not_paged_in_again() -> None:
    faults = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout.split()
    before, after = map(int, faults)
    assert before > 10 * 16_000  # ten times 64 MiB, 4 KiB a page
    assert after < 1_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to hand freed memory back")
def test_freed_memory_that_piles_up_is_handed_back_in_one_of_eight_steps(tmp_path: Path) -> None:
    (tmp_path / "holes.py").write_text(HOLES)
    *kept, handed_back = map(int, nanotron(tmp_path, "holes.py").stdout.split())
    assert len(kept) == 6
    assert min(kept) > 60 << 20
    assert handed_back < 8 << 20


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")
def test_matmuls_of_ever_new_shapes_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "shapes.py").write_text(SHAPES)

    def growth(wished: dict[str, str]) -> int:
        return int(nanotron(tmp_path, "shapes.py", environment=wished).stdout)

    assert growth({}) < growth(dict.fromkeys(names, "1024")) / 2


@pytest.mark.parametrize(("seen", "index"), [(8, 3), (1, 0)], ids=["8 of 8", "its own alone"])
def test_a_rank_takes_the_device_of_its_number_or_the_one_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, seen: int, index: int
) -> None:
    chosen = fake_accelerators(monkeypatch, seen)
    device, backend = choose_device(Place(rank=11, world=16, local_rank=3, local_world=8))
    assert (device, backend) == (torch.device("cuda", index), "nccl")
    assert chosen == [index]


def test_fewer_devices_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_accelerators(monkeypatch, 4)
    with pytest.raises(ConfigError, match="8 ranks on this machine, which has 4 cuda devices"):
        choose_device(Place(rank=3, world=8, local_rank=3, local_world=8))


def fake_accelerators(monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Let torch see so many GPUs; returns the indices that are chosen."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


def test_a_device_is_identified_by_what_its_driver_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {0: SimpleNamespace(uuid="GPU-a"), 1: SimpleNamespace()}
    module = SimpleNamespace(get_device_properties=lambda device: known[device.index])
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    devices = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")]
    assert [identity_of(device) for device in devices] == ["GPU-a", None, None]


DETERMINISTIC = """
import os, torch
from nanotron.launch.place import repeat_bits

repeat_bits(os.environ)
print(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
print(torch.backends.cuda.cudnn_sdp_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"])
"""


def test_a_deterministic_run_refuses_kernels_whose_bits_change(tmp_path: Path) -> None:
    (tmp_path / "bits.py").write_text(DETERMINISTIC)
    assert nanotron(tmp_path, "bits.py").stdout.split() == ["True", "False", "False", ":4096:8"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_grows_its_segments_unless_somebody_has_told_it_otherwise(name: str) -> None:
    environment: dict[str, str] = {}
    grow_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    told = {name: "max_split_size_mb:64"}
    grow_segments(told)
    assert told == {name: "max_split_size_mb:64"}
