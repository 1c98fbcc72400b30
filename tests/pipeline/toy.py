"""A model small enough to see through, cut into pipeline stages, and its gradients computed without any pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanotron.ops.chunk import Hooks
from nanotron.ops.linear import TensorParallel, linear
from nanotron.parallel.mesh import Mesh
from nanotron.pipeline.engine import Pipeline
from nanotron.pipeline.schedules import Schedule, get_schedule

HIDDEN, ROWS, TOKENS = 8, 2, 4


class ToyBatch(NamedTuple):
    """One microbatch: tokens [b, s] are numbers to be embedded."""

    tokens: Tensor


class ToyStage(nn.Module):
    """One stage: embeds when it is the first, x + up(tanh(down(x))), and a token-sum loss when it is the last."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        shapes = {"down": (16, HIDDEN), "up": (HIDDEN, 16)} | ({"embed": (HIDDEN, 1)} if self.is_first else {})
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))
        self.scale = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))  # its gradient is never deferred
        self.hooks = Hooks()
        self.buffers = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        for name, buffer in self.buffers.items():
            self.hooks.weight_grads.bind(self.get_parameter(name), buffer.detach)
        self.tp = TensorParallel(Mesh(), self.hooks.weight_grads)

    def forward(self, x: Tensor | None, batch: ToyBatch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        if x is None:
            (x,) = linear(batch.tokens[..., None].double(), [self.get_parameter("embed")], self.tp)
        (hidden,) = linear(x * self.scale, [self.get_parameter("down")], self.tp)
        (y,) = linear(torch.tanh(hidden), [self.get_parameter("up")], self.tp)
        y = x + y
        losses = {"lm": (y**2).sum(), "z": y.sum()} if self.is_last else {}
        return y, losses, {}

    def gradients(self) -> dict[str, Tensor]:
        """What the last batches added up, by parameter."""
        return {name: self.buffers.get(name, weight.grad) for name, weight in self.named_parameters()}


def toy_batches(count: int) -> list[ToyBatch]:
    """The same microbatches everywhere."""
    generator = torch.Generator().manual_seed(1234)
    return [ToyBatch(torch.randint(-3, 4, (ROWS, TOKENS), generator=generator)) for _ in range(count)]


def toy_schedule(name: str, ranks: int) -> Schedule:
    """A built-in schedule, with two chunks per rank where it has several."""
    return get_schedule(name, ranks, 2)


def toy_pipeline(schedule: Schedule, mesh: Mesh) -> Pipeline:
    """This rank's part of the toy model."""
    stages = [schedule.placement(mesh.coord("pp"), chunk) for chunk in range(schedule.num_chunks)]
    chunks = [ToyStage(stage, schedule.num_stages) for stage in stages]
    return Pipeline(chunks, schedule, mesh, hidden_size=HIDDEN, dtype=torch.float64, device="cpu")


def without_pipeline(
    num_stages: int, batches: Sequence[ToyBatch], scale: float
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Losses and every stage's gradients, by plain autograd through the whole model."""
    stages = [ToyStage(stage, num_stages) for stage in range(num_stages)]
    sums: dict[str, Tensor] = {}
    for batch in batches:
        x, losses = None, {}
        for stage in stages:
            x, losses, _ = stage(x, batch)
        (torch.stack(list(losses.values())).sum() * scale).backward()
        sums = {name: sums.get(name, torch.zeros(())) + loss.detach() for name, loss in losses.items()}
    return sums, [stage.gradients() for stage in stages]
