"""An exchange inside a forward, over an axis that gradients are summed over too: their order may not depend on timing.

Which collectives a rank starts first, the exchange of the next microbatch or a gradient bucket that is complete,
depends on how long its weight gradients take. With one communicator for both, ranks would disagree.
"""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.ops.chunk import Hooks, Use
from nanotron.ops.linear import TensorParallel, linear
from nanotron.optim.buckets import Buckets
from nanotron.parallel.comm import copy_to, sum_from
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import Box, Init, ParamSpec
from nanotron.pipeline.engine import Pipeline
from nanotron.pipeline.transport import Parcel
from tests.pipeline.toy import ToyBatch, toy_batches, toy_pipeline, toy_schedule
from tests.pool import CaseFailed, Pool

HIDDEN, ROWS, TOKENS, MICROBATCHES = 8, 2, 4, 6


class ExchangingStage(nn.Module):
    """One stage: x + up(Σ over cp of tanh(down(x))); the last one's loss is the sum of squares."""

    def __init__(self, stage: int, num_stages: int, mesh: Mesh) -> None:
        super().__init__()
        self.mesh, self.is_last = mesh, stage == num_stages - 1
        self.weights = {f"layers.{stage}.{name}": weight for name, weight in stage_weights(stage).items()}
        self.specs = {
            name: ParamSpec(name, tuple(weight.shape), Init("ones"), decay=True)
            for name, weight in self.weights.items()
        }
        self.hooks = Hooks()
        self.tp = TensorParallel(Mesh(), self.hooks.weight_grads)

    def uses(self, sequence_length: int) -> list[Use]:
        return [Use("layer", tuple(self.weights))]

    def forward(self, x: Tensor | None, batch: ToyBatch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        if x is None:
            x = embedded(batch.tokens).requires_grad_()
        self.hooks.before_block("layer")
        down, up = self.weights.values()
        (hidden,) = linear(x, [down], self.tp)
        hidden = copy_to(sum_from(torch.tanh(hidden), self.mesh, "cp"), self.mesh, "cp")
        (y,) = linear(hidden, [up], self.tp)
        y = x + y
        self.hooks.after_block("layer", y)
        return y, {"lm": (y**2).sum()} if self.is_last else {}, {}


def embedded(tokens: Tensor) -> Tensor:
    return tokens[..., None].double() * torch.linspace(-1, 1, HIDDEN, dtype=torch.float64)  # [b, s] -> [b, s, d]


def stage_weights(stage: int) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(stage)
    shapes = {"down": (16, HIDDEN), "up": (HIDDEN, 16)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 4)
        for name, shape in shapes.items()
    }


def batches_of(cp_rank: int) -> list[ToyBatch]:
    generator = torch.Generator().manual_seed(7 + cp_rank)
    shape = (ROWS, TOKENS)
    return [ToyBatch(torch.randint(-3, 4, shape, generator=generator)) for _ in range(MICROBATCHES)]


def on_one_device(num_stages: int, cp: int) -> dict[str, Tensor]:
    """Every weight's gradient, all cp ranks' tokens computed together."""
    stages = [stage_weights(stage) for stage in range(num_stages)]
    for parts in zip(*(batches_of(rank) for rank in range(cp)), strict=True):
        x = torch.stack([embedded(part.tokens) for part in parts])  # [c, b, s, d]
        for weights in stages:
            hidden = torch.tanh(x @ weights["down"].t()).sum(0, keepdim=True)
            x = x + hidden @ weights["up"].t()
        (x**2).sum().backward()
    return {f"layers.{stage}.{name}": w.grad for stage, ws in enumerate(stages) for name, w in ws.items()}


def gradients(
    rank: int, world: int, schedule_name: str, haste: str, one_communicator: bool, zero_stage: int = 0
) -> list[tuple[str, Box, Tensor]]:
    """This rank's parts of the reduced gradients.

    ``haste``: whether what a rank waits for seems to be there, so that it leaves pending weight gradients for later:
    "random", or "unequal", never on the first cp rank and always on the other.
    """
    mesh = Mesh({"pp": world // 2, "dp": 1, "cp": 2, "tp": 1}, rank)
    create_groups(mesh, one_communicator=one_communicator)
    schedule = toy_schedule(schedule_name, world // 2)
    stages = [schedule.placement(mesh.coord("pp"), chunk) for chunk in range(schedule.num_chunks)]
    chunks = [ExchangingStage(stage, schedule.num_stages, mesh) for stage in stages]
    buckets = Buckets(chunks, mesh, grad_dtype=lambda dtype: dtype, zero_stage=zero_stage, tied_stages={}, cap_bytes=1)
    fills_waits = zero_stage < 2
    pipeline = Pipeline(
        chunks, schedule, mesh, hidden_size=HIDDEN, dtype=torch.float64, device="cpu", fills_waits=fills_waits
    )
    buckets.start(MICROBATCHES, TOKENS)
    dice = random.Random(rank)
    is_here = {
        "random": lambda parcel: dice.random() < 0.5,
        "unequal": lambda parcel: mesh.coord("cp") == 1,
    }
    with mock.patch.object(Parcel, "is_done", is_here[haste]):
        pipeline.run(batches_of(mesh.coord("cp")), 1.0)
    buckets.finish()
    return [
        (spec.name, box, part.clone())
        for bucket in buckets.all
        for spec, box, part in bucket.boxes(bucket.grad_shard, bucket.shard)
    ]


def create_groups(mesh: Mesh, *, one_communicator: bool) -> None:
    """The mesh's groups; or, the mistake, one communicator for all that joins the same ranks."""
    mesh.create_groups()
    if one_communicator:
        for (purpose, ranks), group in list(mesh._groups.items()):
            if purpose == "gradients" and ("compute", ranks) in mesh._groups:
                mesh._groups["compute", ranks] = group


def directions(rank: int, world: int, name: str) -> dict[str, set[str]]:
    """What this rank does in the communicator of each transfer."""
    mesh = Mesh({"pp": world}, rank)
    mesh.create_groups()
    found: dict[str, set[str]] = {}

    class Transfers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                group = dist.ProcessGroup.unbox(args[1])
                found.setdefault(f"{group.group_name} of {group.size()}", set()).add(func._opname)
            return func(*args, **(kwargs or {}))

    pipeline = toy_pipeline(toy_schedule(name, world), mesh)
    with Transfers():
        pipeline.run(toy_batches(world), 1.0)
    return found


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv"])
def test_what_comes_and_what_goes_between_two_ranks_share_no_communicator(pool: Pool, name: str) -> None:
    found = pool.run(3, directions, name)
    assert all(group.endswith(" of 2") for ranks in found for group in ranks)
    every = {group for ranks in found for group in ranks}
    for kind in ("send", "recv_"):
        assert {group for ranks in found for group in ranks if ranks[group] == {kind}} == every


@pytest.mark.parametrize("haste", ["random", "unequal"])
@pytest.mark.parametrize(("schedule", "stage"), [("zb_h1", 0), ("zbv", 0), ("zb_h1", 3), ("zbv", 2)])
def test_delayed_weight_gradients_do_not_reorder_an_exchange_inside_the_forward(
    pool: Pool, schedule: str, stage: int, haste: str
) -> None:
    found = pool.run(6, gradients, schedule, haste, False, stage)
    expected = on_one_device(6 if schedule == "zbv" else 3, cp=2)
    for grads in found:
        for name, box, grad in grads:
            torch.testing.assert_close(grad, expected[name][box.slices()], rtol=1e-9, atol=1e-9)


def test_with_one_communicator_for_both_the_numbers_would_be_wrong() -> None:
    """The mistake that the purposes of communicators prevent; in a pool of its own, for its ranks may hang."""
    expected, pool = on_one_device(6, cp=2), Pool()
    try:
        found = pool.run(6, gradients, "zbv", "unequal", True, timeout=5)
    except CaseFailed:
        return
    finally:
        pool.close()
    assert any(not torch.allclose(grad, expected[name]) for grads in found for name, _, grad in grads)
