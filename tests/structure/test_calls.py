"""What a step costs its host, counted: calls of functions, and bytes that are asked for; so much for each of its parts.

A loop over weights or rows in Python, a tensor too many, a wrapper: each changes a number here. A change that means it
writes the new number down; one that does not has found out what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from nanotron.batch import Batch
from nanotron.parallel.mesh import Mesh
from nanotron.training.step import Training
from nanotron.training.topology import mesh_axes
from tests.plan.configs import small
from tests.pool import Pool
from tests.structure.blocks import SIZES
from tests.structure.counters import Allocations, Calls


class Counts(NamedTuple):
    """Calls of our functions, of C's by ours, of others that are in Python."""

    ours: int
    by_ours: int
    others: int


def started(
    layers: int, microbatches: int, *, rank: int = 0, cap_mb: int = 25, **layout: Any
) -> tuple[Training, list[Batch]]:
    """A run that has made two steps, after which all is there that is made once, and the batches of its steps."""
    config = small(**SIZES, layers=layers, accumulation=microbatches, **layout)
    config.model.ddp_bucket_cap_mb = cap_mb
    mesh = Mesh(mesh_axes(config), rank)
    mesh.create_groups([mesh.data_parts])
    training = Training(config, mesh, "cpu", kernels="cpu")
    training.initialize()
    ids = torch.zeros(2, 64, dtype=torch.int64)
    batches = [Batch(ids, ids, torch.arange(64).expand(2, 64))] * microbatches
    for update in (1, 2):
        training.step(update, batches).read()
    return training, batches


def calls_of_a_step(training: Training, batches: list[Batch]) -> Counts:
    with Calls() as calls:
        word = training.step(3, batches)
    word.read()
    return Counts(calls.ours, calls.by_ours, calls.others)


ONCE, PER_BUCKET, PER_LAYER = (76, 77), (11, 15), (7, 42)  # calls of our functions, and of C's by ours
PER_MICROBATCH, PER_LAYER_OF_MICROBATCH = (143, 96), (269, 170)


@pytest.mark.parametrize(("layers", "microbatches", "cap_mb", "buckets"), [(1, 1, 25, 2), (2, 3, 25, 2), (8, 2, 1, 11)])
def test_a_step_calls_so_many_functions_for_each_of_its_parts(
    layers: int, microbatches: int, cap_mb: int, buckets: int
) -> None:
    training, batches = started(layers, microbatches, cap_mb=cap_mb)
    assert len(training.buckets.all) == buckets
    times = 1, buckets, layers, microbatches, layers * microbatches
    parts = ONCE, PER_BUCKET, PER_LAYER, PER_MICROBATCH, PER_LAYER_OF_MICROBATCH
    expected = [sum(n * part[i] for n, part in zip(times, parts, strict=True)) for i in (0, 1)]
    assert list(calls_of_a_step(training, batches)[:2]) == expected


OTHERS = 130  # torch's and the standard library's functions: 110 with torch 2.13; other versions may have some more
PER_ALL_REDUCE = 5  # of them; a layer makes 4


@pytest.mark.parametrize(
    ("layout", "ours", "by_ours", "others"),
    [
        ({}, 269, 170, OTHERS),
        ({"dp": 2}, 269, 170, OTHERS),
        ({"tp": 2}, 269, 172, OTHERS + 4 * PER_ALL_REDUCE),
    ],
    ids=["one", "dp", "tp"],
)
def test_one_more_layer_adds_so_many_calls_to_each_microbatch(
    pool: Pool, layout: dict[str, Any], ours: int, by_ours: int, others: int
) -> None:
    world = layout.get("dp", 1) * layout.get("tp", 1)
    for grown in zip(*(pool.run(world, calls_of_a_rank, *sizes, layout) for sizes in SMALL_TO_LARGE), strict=True):
        found = Counts(*map(growth, zip(*grown, strict=True)))
        assert (found.ours, found.by_ours) == (ours, by_ours)
        assert found.others <= others


def calls_of_a_rank(rank: int, world: int, layers: int, microbatches: int, layout: dict[str, Any]) -> Counts:
    return calls_of_a_step(*started(layers, microbatches, rank=rank, **layout))


SMALL_TO_LARGE = list(product((2, 3), (1, 2)))  # layers and microbatches


def growth(counts: Sequence[int]) -> int:
    """What a third layer adds to the second microbatch, from what steps of these sizes have."""
    few, few_twice, many, many_twice = counts
    return many_twice - many - (few_twice - few)


ALLOCATED = {"float32": 6_797_824, "bfloat16": 4_508_416}  # one [b, s, d] has 32,768 bytes, or half as many


@pytest.mark.parametrize("dtype", ALLOCATED)
def test_one_more_layer_asks_for_so_many_bytes_in_each_microbatch(dtype: str) -> None:
    assert growth([allocated(*sizes, dtype) for sizes in SMALL_TO_LARGE]) == ALLOCATED[dtype]


def allocated(layers: int, microbatches: int, dtype: str) -> int:
    training, batches = started(layers, microbatches, dtype=dtype)
    with Allocations() as allocations:
        training.step(3, batches)
    return allocations.bytes
