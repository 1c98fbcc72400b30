"""Kernels that a step launches: a fixed number for each block and each bucket, whatever their size."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from nanotron.batch import Batch
from nanotron.ops.kernels import Kernels
from nanotron.parallel.mesh import Mesh
from nanotron.plan.counting import Counting
from nanotron.training.step import Training
from nanotron.training.topology import mesh_axes
from tests.plan.configs import small
from tests.pool import Pool
from tests.structure.blocks import SIZES, planned_block, real_block

ONE = SIZES
TP = {**ONE, "tp": 2}
SEQUENCE_PARALLEL = {**TP, "sequence_parallel": True}
RECOMPUTE = {**ONE, "recompute": True}
SELECTIVE = {**ONE, "recompute": "selective"}

# layout; forward and backward of a block in float32, with an accelerator's kernels and with a CPU's
KERNELS = [
    (ONE, (26, 41), (49, 91)),
    (TP, (26, 41), (49, 91)),
    (SEQUENCE_PARALLEL, (30, 47), (53, 97)),
    (RECOMPUTE, (26, 66), (49, 139)),
    (SELECTIVE, (26, 61), (49, 134)),
]
ATTENTION = 32, (5, 11)  # of those of a CPU are for every so many tokens of a row; here there are 64 tokens
TEMPORARIES = 5  # one for each weight's gradient, added to the float32 sum: in bfloat16, and by oneDNN
ON_A_CPU: list[tuple[Kernels, int]] = [("cpu", 0), ("cpu_onednn", TEMPORARIES)]


@pytest.mark.parametrize(("kernels", "temporaries"), ON_A_CPU)
@pytest.mark.parametrize(("layout", "accelerator", "cpu"), KERNELS, ids=["one", "tp", "sp", "recompute", "selective"])
def test_a_block_launches_this_many_kernels(
    layout: dict[str, Any], accelerator: tuple[int, int], cpu: tuple[int, int], kernels: Kernels, temporaries: int
) -> None:
    assert planned_block(small(**layout), "accelerator")[1:] == accelerator
    assert planned_block(small(**layout), kernels)[1:] == (cpu[0], cpu[1] + temporaries)
    half = planned_block(small(**layout, dtype="bfloat16"), "accelerator")
    assert half[1:] == (accelerator[0], accelerator[1] + TEMPORARIES)


@pytest.mark.parametrize(("kernels", "temporaries"), ON_A_CPU)
@pytest.mark.parametrize(
    ("layout", "cpu"),
    [(ONE, KERNELS[0][2]), (RECOMPUTE, KERNELS[3][2]), (SELECTIVE, KERNELS[4][2])],
    ids=["one", "recompute", "selective"],
)
def test_a_real_block_launches_as_many(
    layout: dict[str, Any], cpu: tuple[int, int], kernels: Kernels, temporaries: int
) -> None:
    assert real_block(0, 1, small(**layout), kernels)[1:] == (cpu[0], cpu[1] + temporaries)


def test_a_real_block_launches_as_many_with_tensor_parallelism(pool: Pool) -> None:
    forward, backward = KERNELS[1][2]
    for kernels, temporaries in ON_A_CPU:
        for block in pool.run(2, real_block, small(**TP), kernels):
            assert block[1:] == (forward, backward + temporaries)


@pytest.mark.parametrize("change", [{"micro_batch": 5}, {"sequence": 160}, {"hidden": 256}], ids=str)
def test_kernels_depend_on_no_size_but_a_cpus_on_the_sequence(change: dict[str, int]) -> None:
    tokens, per_part = ATTENTION
    kernels: Kernels
    for kernels in get_args(Kernels):
        there, here = (planned_block(small(**sizes), kernels) for sizes in (ONE | change, ONE))
        more_parts = 0 if kernels == "accelerator" else ((ONE | change)["sequence"] - ONE["sequence"]) // tokens
        assert there[1:] == tuple(count + more_parts * each for count, each in zip(here[1:], per_part, strict=True))


@pytest.mark.parametrize("kernels", get_args(Kernels))
def test_every_block_launches_as_many_as_the_others(kernels: Kernels) -> None:
    config = small(**ONE)
    counts = {planned_block(config, kernels, layers=layers) for layers in (1, 3)}
    assert len(counts) == 1


ONCE, PER_BUCKET = 37, 7  # of a step without its forward and backward: float32, AdamW, clipping, 4 microbatches


@pytest.mark.parametrize(("layers", "cap_mb", "buckets"), [(2, 25, 2), (6, 25, 2), (8, 1, 11)])
def test_the_rest_of_a_step_launches_a_constant_number_of_kernels_per_bucket(
    layers: int, cap_mb: int, buckets: int
) -> None:
    config = small(**ONE, layers=layers)
    config.model.ddp_bucket_cap_mb = cap_mb
    ids = torch.zeros(2, 64, dtype=torch.int64)
    batches = [Batch(ids, ids, torch.arange(64).expand(2, 64))] * config.tokens.batch_accumulation_per_replica
    with Counting() as counter:
        training = Training(config, Mesh(mesh_axes(config)), "cpu")
        training.step(1, batches)
        run = training.pipeline.run

        def counted_apart(*args: Any) -> Any:
            with counter.section():
                return run(*args)

        training.pipeline.run = counted_apart  # type: ignore[method-assign]
        with counter.section() as outside:
            training.step(2, batches)
    assert len(training.buckets.all) == buckets
    assert outside["kernels"] == ONCE + PER_BUCKET * buckets
