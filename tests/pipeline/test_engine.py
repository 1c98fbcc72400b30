"""The engine on real processes, against the same model computed at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanotron.parallel.mesh import Mesh
from nanotron.pipeline.schedules import SCHEDULE_NAMES, schedule_problems
from tests.pipeline.toy import toy_batches, toy_pipeline, toy_schedule, without_pipeline
from tests.pool import Pool

SCALE = 0.125


def run_stage(rank: int, world: int, name: str, microbatches: int, batches: int = 1) -> dict[str, Any]:
    mesh = Mesh({"pp": world}, rank)
    mesh.create_groups()
    schedule = toy_schedule(name, world)
    pipeline = toy_pipeline(schedule, mesh)
    for _ in range(batches):
        losses = pipeline.run(toy_batches(microbatches), SCALE)
    gradients = {schedule.placement(rank, i): chunk.gradients() for i, chunk in enumerate(pipeline.chunks)}
    before = [chunk.gradients() for chunk in pipeline.chunks]
    evaluated = pipeline.evaluate(toy_batches(microbatches + 1))
    assert all(torch.equal(a[k], b.gradients()[k]) for a, b in zip(before, pipeline.chunks, strict=True) for k in a)
    return {"losses": losses, "gradients": gradients, "evaluated": evaluated, "action": pipeline.current_action}


CASES = [
    (name, world, microbatches)
    for name in SCHEDULE_NAMES
    for world, microbatches in [(1, 3), (2, 4), (3, 2), (3, 6), (2, 5)]
    if not schedule_problems(name, world, 2 if toy_schedule(name, world).num_chunks == 2 else 1, microbatches)
]


@pytest.mark.parametrize(("name", "world", "microbatches"), CASES)
def test_losses_and_gradients_are_those_of_one_process_bit_for_bit(
    pool: Pool, name: str, world: int, microbatches: int
) -> None:
    results = pool.run(world, run_stage, name, microbatches)
    num_stages = toy_schedule(name, world).num_stages
    losses, gradients = without_pipeline(num_stages, toy_batches(microbatches), SCALE)
    found = {stage: values for result in results for stage, values in result["gradients"].items()}
    assert sorted(found) == list(range(num_stages))
    for stage, expected in enumerate(gradients):
        for parameter, gradient in expected.items():
            assert torch.equal(found[stage][parameter], gradient), f"stage {stage}: {parameter}"
    holder, _ = toy_schedule(name, world).holders[num_stages - 1]
    assert results[holder]["losses"] == losses
    assert all(result["losses"] == {} for rank, result in enumerate(results) if rank != holder)
    assert all(result["action"] == "idle" for result in results)
    evaluated, _ = without_pipeline(num_stages, toy_batches(microbatches + 1), SCALE)
    assert results[holder]["evaluated"] == evaluated
