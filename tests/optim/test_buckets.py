"""Buckets: what shares one, what a reduction adds up, and in which order reductions leave."""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import nullcontext
from math import isnan
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nanotron.parallel.comm import start_reduce_scatter
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import Box, ParamSpec
from nanotron.plan.fakes import FakeMesh
from tests.optim.toy import ToyChunk, make_buckets, matrix, norm, whole

SPECS = [
    matrix("embed.weight", 50, 3),
    norm("layers.0.attn_norm.weight", 3),
    matrix("layers.0.mlp.down.weight", 3, 25),
    norm("layers.1.attn_norm.weight", 3),
    matrix("layers.1.mlp.down.weight", 3, 25),
]


def names(buckets) -> list[list[str]]:
    return [[slot.spec.name for slot in bucket.slots] for bucket in buckets.all]


def test_small_blocks_share_a_bucket_and_decay_keeps_norms_apart():
    chunk = ToyChunk(SPECS, Mesh())
    matrices = ["embed.weight", "layers.0.mlp.down.weight", "layers.1.mlp.down.weight"]
    norms = ["layers.0.attn_norm.weight", "layers.1.attn_norm.weight"]
    assert sorted(names(make_buckets(chunk, Mesh()))) == sorted([matrices, norms])


def test_a_bucket_over_the_cap_ends_at_its_block():
    chunk = ToyChunk(SPECS, Mesh())
    found = names(make_buckets(chunk, Mesh(), cap_bytes=4 * 15))
    assert ["embed.weight"] in found
    assert ["layers.0.mlp.down.weight"] in found
    assert ["layers.1.mlp.down.weight"] in found


def test_ranks_that_hold_copies_put_them_at_the_same_places():
    """A sum over three replicas or more has its own order at each place of a buffer: copies would part in bits."""
    specs = [matrix("layers.0.q.weight", 4, 3, shard=(("tp", 0),)), matrix("layers.0.down.weight", 5, 3)]
    meshes = [Mesh({"tp": 2}, rank) for rank in range(2)]
    first, second = (names(make_buckets(ToyChunk(specs, mesh), mesh)) for mesh in meshes)
    assert first == second


def test_parameters_keep_their_values_as_views_of_the_bucket():
    chunk = ToyChunk(SPECS, Mesh())
    buckets = make_buckets(chunk, Mesh())
    for bucket in buckets.all:
        for slot in bucket.slots:
            assert torch.equal(slot.weight.data, whole(slot.spec, seed=1))
        bucket.weights.zero_()
    assert all(not weight.any() for weight in chunk.weights.values())


@pytest.mark.parametrize(("dtype", "grad_dtype"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_parameters_and_shards_begin_at_multiples_of_128_bytes(zero_stage, dtype, grad_dtype):
    for rank in range(4):
        mesh = FakeMesh({"dp": {"dp_copies": 2, "dp_shard": 2}}, rank)
        chunk = ToyChunk(SPECS, mesh, dtype)
        for bucket in make_buckets(chunk, mesh, zero_stage=zero_stage, grad_dtype=lambda dtype: grad_dtype).all:
            starts = [slot.start for slot in bucket.slots]
            ends = [slot.start + slot.box.numel for slot in bucket.slots]
            assert all(end <= start for end, start in zip(ends, [*starts[1:], bucket.numel], strict=True))
            for start in (*starts, bucket.shard.start, bucket.norm_shard.start, bucket.numel):
                assert start * dtype.itemsize % 128 == start * grad_dtype.itemsize % 128 == 0
            used = sum(slot.box.numel for slot in bucket.slots)
            assert bucket.numel <= used + (len(starts) + mesh.size("dp")) * 128 // dtype.itemsize


def test_a_chunk_that_nobody_uses_any_more_is_gone_with_its_buckets():
    """And with them the process groups that they hold, each of which has threads."""
    chunk = ToyChunk(SPECS, Mesh())
    gone = [weakref.ref(chunk), weakref.ref(make_buckets(chunk, Mesh()))]
    del chunk
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_reductions_start_in_one_order_whatever_order_gradients_come_in(monkeypatch):
    chunk = ToyChunk(SPECS, Mesh())
    buckets = make_buckets(chunk, Mesh(), cap_bytes=1)
    started = []
    monkeypatch.setattr(buckets, "_start_reduction", lambda bucket: started.append(bucket.slots[0].spec.name))
    buckets.start(microbatches=1, sequence_length=8)
    for name in chunk.weights:  # first layer first, the opposite of a backward
        chunk.contribute(name, torch.ones(SPECS[0].shape if name == "embed.weight" else chunk.specs[name].shape))
    assert started == [bucket.slots[0].spec.name for bucket in buckets.all]


def test_a_gradient_that_never_came_is_noticed():
    chunk = ToyChunk(SPECS, Mesh())
    buckets = make_buckets(chunk, Mesh())
    buckets.start(microbatches=2, sequence_length=8)
    for name, spec in chunk.specs.items():
        chunk.contribute(name, torch.ones(spec.shape))
    with pytest.raises(AssertionError, match="never came"):
        buckets.finish()


def spoil_gradients(buckets) -> None:
    """Leave something of the last step that nobody may read."""
    for bucket in buckets.all:
        (bucket.grad_shard if bucket.grads is None else bucket.grads).fill_(torch.nan)


def reduce_on_rank(rank: int, world: int, zero_stage: int) -> list[tuple[str, Box, torch.Tensor]]:
    mesh = Mesh({"dp": world}, rank)
    mesh.create_groups()
    chunk = ToyChunk(SPECS, mesh)
    buckets = make_buckets(chunk, mesh, zero_stage=zero_stage)
    spoil_gradients(buckets)
    buckets.start(microbatches=2, sequence_length=8)
    for microbatch in range(2):
        for name, spec in reversed(chunk.specs.items()):
            chunk.contribute(name, whole(spec, seed=100 * rank + microbatch))
    buckets.finish()
    norm_squared = buckets.squared_norm()
    dist.all_reduce(norm_squared)
    boxes = [
        (spec.name, box, view.clone())
        for bucket in buckets.all
        for spec, box, view in bucket.boxes(bucket.grad_shard, bucket.shard)
    ]
    return [*boxes, ("norm", Box((), ()), norm_squared)]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_shards_of_the_summed_gradient_cover_every_parameter(pool, world, zero_stage):
    expected = {
        spec.name: sum(whole(spec, seed=100 * rank + micro) for rank in range(world) for micro in range(2))
        for spec in SPECS
    }
    results = pool.run(world, reduce_on_rank, zero_stage)
    covered = {name: torch.zeros_like(total) for name, total in expected.items()}
    for pieces in results:
        for name, box, grad in pieces[:-1]:
            torch.testing.assert_close(grad, expected[name][box.slices()])
            covered[name][box.slices()] += 1
    copies = 1 if zero_stage else world
    assert all((count == copies).all() for count in covered.values())
    norm_squared = sum(total.double().square().sum() for total in expected.values())
    assert float(results[0][-1][2]) == pytest.approx(float(norm_squared), rel=1e-6)


def reduce_in_any_order(rank: int, world: int, axes: dict[str, int | dict[str, int]], stage: int) -> tuple[Any, ...]:
    """What this rank sends, in order, and the largest error; the gradients of three microbatches come mixed."""
    mesh = Mesh(axes, rank)
    mesh.create_groups()
    chunk = ToyChunk([*SPECS, matrix("layers.1.mlp.up.weight", 60, 3)], mesh)
    buckets = make_buckets(chunk, mesh, zero_stage=stage)
    sent: list[int] = []

    def start(shard: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> Any:
        sent.append(len(flat))
        return start_reduce_scatter(shard, flat, group)

    contributions = [(name, seed) for name in chunk.weights for seed in range(3)]
    random.Random(rank).shuffle(contributions)
    spoil_gradients(buckets)
    buckets.start(microbatches=3, sequence_length=8)
    torch.use_deterministic_algorithms(True)  # which fills new tensors with nan
    with mock.patch("nanotron.optim.sharding.start_reduce_scatter", start):
        for name, seed in contributions:
            chunk.contribute(name, whole(chunk.specs[name], seed=100 * rank + seed))
        buckets.finish()
    torch.use_deterministic_algorithms(False)  # the process serves other tests too
    total = {
        name: sum(whole(spec, seed=100 * each + seed) for each in range(world) for seed in range(3))
        for name, spec in chunk.specs.items()
    }
    errors = [
        (view - total[spec.name][box.slices()]).abs().max()
        for bucket in buckets.all
        for spec, box, view in bucket.boxes(bucket.grad_shard, bucket.shard)
    ]
    return sent, max(map(float, errors), key=lambda error: (isnan(error), error))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("axes", [{"dp": 3}, {"dp": {"dp_copies": 2, "dp_shard": 2}}], ids=str)
def test_blocks_leave_in_one_order_whatever_order_gradients_come_in(pool, axes, stage):
    """Two ranks that sent the same blocks in another order would add up what does not belong together."""
    embed, first, second = (192, 96, 288) if axes == {"dp": 3} else (256, 128, 384)  # padded to whole 128 bytes
    for sent, error in pool.run(3 if axes == {"dp": 3} else 4, reduce_in_any_order, axes, stage):
        assert sent == [second, first, embed] * 3
        assert error < 1e-5


def absent_weights(rank: int, world: int) -> list[tuple[str, set[str]]]:
    """Through a forward, a backward and an update: (where, what is not there); what computes is there, and right."""
    mesh = Mesh({"dp": world}, rank)
    mesh.create_groups()
    chunk = ToyChunk(SPECS, mesh)
    buckets = make_buckets(chunk, mesh, zero_stage=3)
    matrices, seen = {name: w for name, w in chunk.weights.items() if w.dim() > 1}, []

    def look(block: str) -> None:
        for name, weight in matrices.items():
            if block and name.startswith(block):
                torch.testing.assert_close(weight.data, whole(chunk.specs[name], seed=1), rtol=0, atol=0)
        seen.append((block, {name for name, weight in matrices.items() if weight.isnan().all()}))

    x = torch.ones(1, requires_grad=True)
    for block in ("embed.weight", "layers.0", "layers.1"):
        chunk.hooks.before_block(block)
        look(block)
        if block != "embed.weight":
            x = x * 1.0
            chunk.hooks.after_block(block, x)
            x.register_hook(lambda grad, block=block: look(block))
    x.backward()
    buckets.start_gather()
    look("")
    return seen


def test_weights_are_whole_while_their_block_computes_and_not_a_number_when_they_are_gone(pool):
    embed, *layers = (spec.name for spec in SPECS if len(spec.shape) > 1)
    passed = [("embed.weight", {layers[1]}), ("layers.0", {embed}), ("layers.1", {embed})]
    for seen in pool.run(2, absent_weights):
        assert seen == [*passed, ("layers.1", {embed}), ("layers.0", {embed}), ("", {embed, *layers})]


def weights_under_way(rank: int, world: int) -> list[tuple[str, list[str]]]:
    """(block about to be used, first names of the buckets still waited for) through the forward after an update."""
    mesh = Mesh({"dp": world}, rank)
    mesh.create_groups()
    chunk = ToyChunk(SPECS, mesh)
    buckets = make_buckets(chunk, mesh, cap_bytes=1)
    buckets.start_gather()
    seen = []
    for block in ("embed.weight", "layers.0", "layers.1"):
        chunk.hooks.before_block(block)
        seen.append((block, [bucket.slots[0].spec.name for bucket in buckets.all if bucket.works]))
    return seen


def test_a_forward_waits_for_no_weights_but_its_next_blocks(pool):
    for seen in pool.run(2, weights_under_way):
        layers = [(norm.name, down.name) for norm, down in (SPECS[1:3], SPECS[3:5])]
        assert [block for block, _ in seen] == ["embed.weight", "layers.0", "layers.1"]
        assert [set(names) for _, names in seen] == [{*layers[0], *layers[1]}, set(layers[1]), set()]


def gathers_on_rank(rank: int, world: int) -> list[int]:
    """The sizes of the gathered buckets, in the order in which they leave."""
    mesh = Mesh({"dp": world}, rank)
    mesh.create_groups()
    buckets = make_buckets(ToyChunk(SPECS, mesh), mesh, cap_bytes=4 * 15)
    sizes = []
    with mock.patch("nanotron.optim.buckets.start_all_gather", lambda flat, shard, group: sizes.append(len(flat))):
        buckets.start_gather()
    return sizes


def test_weights_that_the_forward_meets_first_are_sent_first(pool):
    embed, norms, down = 192, 64, 128  # elements, padded to 2 replicas of whole 128 bytes
    assert pool.run(2, gathers_on_rank) == [[embed, norms, down, down]] * 2


EXPERTS = matrix("layers.0.experts.weight", 4, 6, shard=(("ep", 0),))
ROUTER = matrix("layers.0.router.weight", 4, 6)


def sums_with_experts(rank: int, world: int, zero_stage: int, everyone: bool) -> list[tuple[str, Box, torch.Tensor]]:
    """The reduced gradients of this rank's shards; ``everyone``: the mistake of summing all of them over all of dp."""
    mesh = Mesh({"dp": {"edp": 2, "ep": 2}}, rank)
    over_all = mock.patch.object(ParamSpec, "reduce_axes", lambda spec, mesh: mesh.data_parts)
    with over_all if everyone else nullcontext():
        mesh.create_groups([("edp",)])
        chunk = ToyChunk([EXPERTS, ROUTER], mesh)
        buckets = make_buckets(chunk, mesh, zero_stage=zero_stage)
        buckets.start(microbatches=1, sequence_length=8)
        for name, spec in reversed(chunk.specs.items()):
            chunk.contribute(name, whole(spec, seed=rank)[spec.local_box(mesh).slices()])
        buckets.finish()
    return [
        (spec.name, box, view.clone())
        for bucket in buckets.all
        for spec, box, view in bucket.boxes(bucket.grad_shard, bucket.shard)
    ]


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_gradient_is_summed_over_the_parts_of_dp_that_do_not_cut_its_parameter(pool, zero_stage):
    """dp = edp × ep: a router's over all four ranks; an expert's over the two that hold it, 0 and 2 or 1 and 3."""

    def differences(everyone: bool) -> dict[str, float]:
        worst = {EXPERTS.name: 0.0, ROUTER.name: 0.0}
        for rank, parts in enumerate(pool.run(4, sums_with_experts, zero_stage, everyone)):
            for name, box, grad in parts:
                spec, holders = (EXPERTS, (rank % 2, rank % 2 + 2)) if name == EXPERTS.name else (ROUTER, range(4))
                expected = sum(whole(spec, seed=holder) for holder in holders)[box.slices()]
                worst[name] = max(worst[name], float((grad - expected).abs().max()))
        return worst

    assert max(differences(everyone=False).values()) < 1e-5
    assert differences(everyone=True)[EXPERTS.name] > 0.1
