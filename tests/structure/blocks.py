"""What one more block adds to a chunk's forward and backward, counted on real tensors and on the planner's fakes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from nanotron.batch import Batch
from nanotron.config import Config
from nanotron.data.context import ContextCut
from nanotron.models.specs import StageModules
from nanotron.ops.kernels import Kernels
from nanotron.parallel.mesh import Mesh
from nanotron.plan.counting import Counting
from nanotron.plan.measure import ChunkCounts, measure_chunk
from nanotron.training.build import build_buckets, build_chunks, chunk_options
from nanotron.training.topology import mesh_axes
from tests.structure.counters import OwnWork

SIZES: dict[str, Any] = {"hidden": 64, "micro_batch": 2, "sequence": 64}
"""Of all tests of blocks that do not ask about sizes, so that what the planner says of a layout is asked once."""


class PerBlock(NamedTuple):
    """Bytes that live from forward to backward, and kernels launched."""

    kept: int
    forward: int
    backward: int


def real_block(rank: int, world: int, config: Config, kernels: Kernels, layers: int = 1) -> PerBlock:
    """What the last of ``layers`` + 1 layers adds, as this rank runs it."""
    mesh = Mesh(mesh_axes(config), rank)
    if world > 1:
        mesh.create_groups()
    _real(config, mesh, kernels, layers)  # what is made once and kept, such as attention's mask, is there now
    return _added(*(_real(config, mesh, kernels, count) for count in (layers, layers + 1)))


def _real(config: Config, mesh: Mesh, kernels: Kernels, layers: int) -> PerBlock:
    tokens = config.tokens
    cut = ContextCut(mesh, config.parallelism.cp_mode)
    _, spans = cut.of((tokens.micro_batch_size, tokens.sequence_length), None)
    shape = tokens.micro_batch_size, tokens.sequence_length // mesh.size("cp")
    with OwnWork() as counter:
        options = replace(chunk_options(config, "cpu"), kernels=kernels)
        (chunk,) = build_chunks(config, mesh, [StageModules(range(layers), embed=True, head=False)], options)
        chunk.initialize(seed=1)
        buckets = build_buckets(config, mesh, [chunk])
        buckets.start(1, shape[1])
        ids = torch.zeros(shape, dtype=torch.int64)
        before = counter.alive
        with counter.section() as forward:
            y, _, _ = chunk(None, Batch(ids, ids, torch.arange(shape[1]).expand(shape), spans))
        kept = settled(counter, mesh) - before
        grad = torch.ones_like(y)
        with counter.section() as backward:
            torch.autograd.backward([y], [grad])
    return PerBlock(kept, forward["kernels"], backward["kernels"])


def settled(counter: Counting, mesh: Mesh) -> int:
    """Bytes alive when the threads that carried collectives have let go of them: none for a while."""
    alive, quiet = counter.alive, 0
    while mesh.world > 1 and quiet < 10:
        time.sleep(0.01)
        alive, quiet = counter.alive, quiet + 1 if counter.alive == alive else 0
    return alive


def planned_block(config: Config, kernels: Kernels, layers: int = 1) -> PerBlock:
    """The same as the planner says it."""
    low, high = (planned(config, count, kernels) for count in (layers, layers + 1))
    return _added(
        *(
            PerBlock(counts.kept, counts.forward["kernels"], counts.backward["kernels"] + counts.weights["kernels"])
            for counts in (low, high)
        )
    )


_known: dict[tuple[str, int, Kernels], ChunkCounts] = {}


def planned(config: Config, layers: int, kernels: Kernels) -> ChunkCounts:
    """What the planner says of so many layers, asked once: it takes half a second."""
    key = repr(config), layers, kernels
    if key not in _known:
        _known[key] = measure_chunk(config, StageModules(range(layers), embed=False, head=False), kernels)
    return _known[key]


def _added(low: PerBlock, high: PerBlock) -> PerBlock:
    return PerBlock(*(b - a for a, b in zip(low, high, strict=True)))
