"""A chunk of a few parameters, for tests that care about where gradients go and not about a model."""

from __future__ import annotations

import torch
from torch import nn

from nanotron.ops.chunk import Hooks, Use
from nanotron.ops.weight_grads import add
from nanotron.optim.buckets import Buckets
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import Init, ParamSpec


class ToyChunk:
    """Parameters without a model: a test adds to their gradients itself."""

    def __init__(self, specs: list[ParamSpec], mesh: Mesh, dtype: torch.dtype = torch.float32) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.weights = {
            spec.name: nn.Parameter(whole(spec, seed=1)[spec.local_box(mesh).slices()].to(dtype)) for spec in specs
        }
        self.hooks = Hooks()

    def uses(self, sequence_length: int) -> list[Use]:
        blocks: dict[str, list[str]] = {}
        for name in self.weights:
            blocks.setdefault(".".join(name.split(".")[:2]) if name.startswith("layers.") else name, []).append(name)
        return [Use(block, tuple(names), rereads=block != "embed.weight") for block, names in blocks.items()]

    def contribute(self, name: str, grad: torch.Tensor) -> None:
        """What a layer's backward does with one microbatch's gradient of a weight."""
        self.hooks.weight_grads.add(self.weights[name], lambda buffer, first: add(buffer, grad, first))


def whole(spec: ParamSpec, seed: int) -> torch.Tensor:
    """A random tensor of the parameter's global shape, keyed by its name."""
    generator = torch.Generator().manual_seed(seed + sum(spec.name.encode()))
    return torch.randn(spec.shape, generator=generator)


def matrix(name: str, *shape: int, **facts) -> ParamSpec:
    return ParamSpec(name, shape, Init("normal", 1.0), **{"decay": True, "weight_decay": 0.1, **facts})


def norm(name: str, size: int, **facts) -> ParamSpec:
    return ParamSpec(name, (size,), Init("ones"), decay=False, weight_decay=0.1, **facts)


def make_buckets(chunk: ToyChunk, mesh: Mesh, **options) -> Buckets:
    settings = {"grad_dtype": lambda dtype: torch.float32, "zero_stage": 1, "tied_stages": {}, "cap_bytes": 1 << 20}
    return Buckets([chunk], mesh, **{**settings, **options})
