"""Predicted memory against what a run on this CPU really allocates, as the profiler's allocator events tell it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from nanotron.batch import Batch
from nanotron.config import Config
from nanotron.models.specs import StageModules
from nanotron.ops.kernels import Kernels
from nanotron.parallel.mesh import Mesh
from nanotron.pipeline.transport import Parcel, Transport
from nanotron.plan.counting import Counting
from nanotron.plan.hardware import find_cluster
from nanotron.plan.measure import ChunkCounts, Measurements, measure_chunk
from nanotron.plan.predict import Planner
from nanotron.training.step import Training
from nanotron.training.topology import has_owners, mesh_axes, parameter_specs, tied_stages
from tests.plan.configs import VOCABULARY, small
from tests.pool import Pool

ALL_EXPERTS = {"num_experts": 4, "top_k": 4, "moe_intermediate_size": 96}
"""Each token uses all of them, so that their load is as even as the planner takes it to be."""
SHARED = {"enable_shared_expert": True, "shared_expert_intermediate_size": 128, "bias_update_rate": 0.001}
MARK = 12_345_677  # bytes; no tensor of a run has this size
LAYOUTS: list[dict[str, Any]] = [
    {"dtype": "bfloat16", "dp": 2, "zero": 0, "sum_in_fp32": False},
    {"tp": 2, "sequence_parallel": True, "recompute": True, "dtype": "bfloat16"},
    {"pp": 2, "schedule": "zbv", "tied": True, "layers": 8},
    {"pp": 2, "schedule": "interleaved_1f1b", "tied": True, "layers": 8},
    {"recompute": "selective", "loss_chunk": 64},
    {"experts": ALL_EXPERTS, "recompute": "selective"},
    {"experts": ALL_EXPERTS | {"layers": [1, 2, 5]}, "layers": 6, "pp": 2, "dp": 2, "ep": 2},
    {"experts": ALL_EXPERTS | SHARED, "tp": 2, "dtype": "bfloat16"},
    {"dp": 2, "tp": 2, "optimizer": {"name": "muon"}},
    {"experts": ALL_EXPERTS, "dp": 2, "ep": 2, "dtype": "bfloat16", "optimizer": {"name": "muon"}},
    {"pp": 2, "layers": 10, "window": 20, "window_layers": [0, 1, 2, 4, 5, 6, 8, 9]},
    {"dp": 2, "zero": 2, "dtype": "bfloat16"},
    {"dp": 2, "zero": 3},
    {"dp": 2, "pp": 2, "zero": 3, "dtype": "bfloat16", "layers": 8},
]
ALONE: list[dict[str, Any]] = [{}, {"dp": 2, "layers": 7}, {"tp": 2}, {"pp": 2, "layers": 6}]
ALONE += [{"pp": 2, "schedule": "zb_h1"}]
"""What some layout above has beside something else, or a schedule very much like it."""
PLANNER = Planner(find_cluster("cpu", 8))  # measures what layouts share once
SMALLER = {"hidden": 128, "sequence": 128}  # at which activations still weigh as much as their state


class Measured(NamedTuple):
    """Bytes of one rank: before its first step, and at the worst moment of two steps."""

    state: int
    peak: int


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.nightly) for layout in ALONE)],
    ids=lambda layout: ",".join(f"{k}={v}" for k, v in layout.items()) or "one",
)
def test_predicted_memory_is_within_5_percent_of_what_a_run_allocates(pool: Pool, layout: dict[str, Any]) -> None:
    config = config_of(layout)
    size = config.parallelism
    measured = pool.run(size.world_size, run_and_measure, layout, timeout=300)
    for rank, memory in enumerate(PLANNER.memories(config)):
        state = memory.parameters + memory.gradients + memory.master_weights + memory.moments
        real = measured[rank * size.dp * size.tp + size.tp - 1]
        assert state == pytest.approx(real.state, rel=0.01), f"state of pipeline rank {rank}"
        assert memory.total == pytest.approx(real.peak, rel=0.05), f"peak of pipeline rank {rank}"
        if config.optimizer.zero_stage < 3:  # else gloo's own copies of blocks that are gathered are among them
            assert memory.total - state == pytest.approx(real.peak - real.state, rel=0.05), f"activations of {rank}"


@pytest.mark.parametrize(("kernels", "sequence"), [("accelerator", 512), ("cpu", 64), ("cpu_onednn", 64)])
def test_layers_with_and_without_a_window_are_counted_each_by_one_more_of_it(kernels: Kernels, sequence: int) -> None:
    sizes = {"hidden": 128, "sequence": sequence, "layers": 6, "micro_batch": 1}  # an accelerator's pieces are longer
    config, full = small(**sizes, window=20, window_layers=[0, 1, 3, 4]), small(**sizes)
    whole, measurements = StageModules.whole(config.model.model_config), Measurements(kernels)
    counts = measure_chunk(config, whole, kernels)
    assert measurements.chunk(config, whole) == counts
    assert work(counts) < work(measurements.chunk(full, whole))


def work(counts: ChunkCounts) -> int:
    return counts.forward["matmul"] + counts.forward["attention"]


def config_of(layout: dict[str, Any]) -> Config:
    """Its config, with as many microbatches as a pipeline is steadily at work with; two have no pipeline to fill."""
    return small(**SMALLER, accumulation=4 if "pp" in layout else 2, **layout)


def run_and_measure(rank: int, world: int, layout: dict[str, Any]) -> Measured:
    """Two steps of real training under the profiler."""
    config = config_of(layout)
    mesh = Mesh(mesh_axes(config), rank)
    tied = [stage for stages in tied_stages(config).values() for stage in stages]
    mesh.create_groups(tied_stages=tied, owners=has_owners(config))
    with frees_on_this_thread(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training = Training(config, mesh, "cpu")
        training.initialize()
        torch.empty(MARK, dtype=torch.uint8)
        shape = (config.tokens.micro_batch_size, config.tokens.sequence_length)
        batches = []
        for _ in range(config.tokens.batch_accumulation_per_replica):
            ids = torch.randint(VOCABULARY, shape)
            batches.append(Batch(ids, ids.clone(), torch.arange(shape[1]).repeat(shape[0], 1)))
        for update in (1, 2):
            training.step(update, batches).read()
        del batches
    return measured_of(profiler)


@contextmanager
def frees_on_this_thread() -> Iterator[None]:
    """Let go of sent tensors on the main thread: the profiler does not see what other threads free.

    The threads that wait for transfers hand the tensors over, and the main one drops them when it posts the next.
    """
    arrived: list[Any] = []
    watch, post = Parcel.watch, Transport._post

    def watch_and_hand_over(parcel: Parcel) -> None:
        tensor = parcel._tensor
        watch(parcel)
        arrived.append(tensor)

    def drop_and_post(*args: Any) -> None:
        arrived.clear()
        post(*args)

    Parcel.watch, Transport._post = watch_and_hand_over, drop_and_post  # type: ignore[method-assign]
    try:
        yield
    finally:
        Parcel.watch, Transport._post = watch, post  # type: ignore[method-assign]


def measured_of(profiler: profile) -> Measured:
    """Follow the allocator's events.

    gloo copies what it reduces, and frees the copy on a thread of its own, unseen: what was allocated in the steps and
    was never seen to be freed counts as freed at once.
    """
    events = sorted(allocations(profiler))
    marks = [index for index, (_, _, size) in enumerate(events) if size == MARK]
    freed_at: dict[int, int] = {}  # address -> index of its next free
    changes = [0] * (len(events) + 1)
    for index in reversed(range(len(events))):
        _, address, size = events[index]
        if size < 0:
            freed_at[address] = index
        elif size != MARK:
            unseen = index + 1 if index > marks[0] else len(events)
            changes[index] += size
            changes[freed_at.pop(address, unseen)] -= size
    totals = list(accumulate(changes))
    return Measured(totals[marks[0]], max(totals[marks[0] :]))


def allocations(profiler: profile) -> Iterator[tuple[int, int, int]]:
    """(time, address, bytes) of every allocation, negative bytes for a free."""
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            yield event.start_time_ns, fields.ptr, fields.alloc_size


@pytest.mark.parametrize(("dtype", "state", "block", "vector"), [("bfloat16", 18, 12, 6), ("float32", 16, 16, 8)])
@pytest.mark.parametrize("shards", [2, 4])
def test_stage_3_holds_its_share_of_all_and_two_blocks_of_what_is_whole(
    dtype: str, state: int, block: int, vector: int, shards: int
) -> None:
    """Bytes for each parameter of a share, each of the largest block's, each of a vector's: docs/sharding.md."""
    sizes: dict[str, Any] = {"dp": 4, "zero": 3, "dtype": dtype, "sequence": 8, "micro_batch": 1, "hidden": 256}
    config = small(**sizes)
    config = replace(config, parallelism=replace(config.parallelism, dp_shard=shards))
    specs = parameter_specs(config).values()
    vectors = sum(spec.numel for spec in specs if len(spec.shape) == 1)
    total = sum(spec.numel for spec in specs)
    layer = sum(spec.numel for spec in specs if spec.name.startswith("layers.0.") and len(spec.shape) > 1)
    largest = max(layer, *(spec.numel for spec in specs if not spec.name.startswith("layers.")))
    (memory,) = Planner(find_cluster("h100", 4)).memories(config)
    held = memory.parameters + memory.gradients + memory.master_weights + memory.moments
    assert held == pytest.approx(state * total / shards + vector * vectors, rel=0.01)
    assert memory.total <= 1.05 * (state * total / shards + block * largest + vector * vectors)
    assert memory.total > held + block / 4 * largest, "no more than one block is ever whole"


@pytest.mark.parametrize("zero", [1, 3])
def test_no_weight_is_there_twice_at_the_start(pool: Pool, zero: int) -> None:
    for alive, peak in pool.run(2, bytes_of_a_start, zero):
        assert peak <= 1.001 * alive


def bytes_of_a_start(rank: int, world: int, zero: int) -> tuple[int, int]:
    """Those that are left, and the most that there were; no moments, for which memory of that size is made last."""
    config = small(dp=2, zero=zero, optimizer={"name": "sgd"})
    mesh = Mesh(mesh_axes(config), rank)
    mesh.create_groups()
    with Counting() as counter:
        training = Training(config, mesh, "cpu")
    assert training.buckets.all
    return counter.alive, counter.peak


def test_what_is_offloaded_is_no_memory_of_the_gpu() -> None:
    config = small(dp=2, zero=3, dtype="bfloat16")
    offloaded = replace(config, optimizer=replace(config.optimizer, offload=True))
    for gpu, saves in (("h100", True), ("cpu", False)):
        planner = Planner(find_cluster(gpu, 2))
        (kept,), (elsewhere,) = planner.memories(config), planner.memories(offloaded)
        state = kept.master_weights + kept.moments
        assert kept.total - elsewhere.total == (state if saves else 0)
