"""Pieces as a run of some layout would hand them over, over known global tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

import torch

from nanotron.checkpoint.format import StateShard
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import Box, Init, ParamSpec, flat_range_boxes

MOMENTS = ("exp_avg", "exp_avg_sq")


def spec(name: str, shape: tuple[int, ...], shard: tuple[tuple[str, int], ...] = ()) -> ParamSpec:
    return ParamSpec(name, shape, Init("normal", 1.0), decay=True, shard=shard)


def globals_of(
    specs: list[ParamSpec], kinds: tuple[str, ...], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """A distinct value in every element of every tensor of every kind."""
    tensors, count = {}, 0
    for kind, parameter in product(kinds, specs):
        values = torch.arange(count, count + parameter.numel, dtype=torch.float64)
        tensors[f"{kind}/{parameter.name}"] = values.view(parameter.shape).to(dtype)
        count += parameter.numel
    return tensors


def pieces_of(
    specs: list[ParamSpec],
    mesh: Mesh,
    tensors: Mapping[str, torch.Tensor] | None,
    *,
    zero: bool | int,
    kinds: tuple[str, ...],
) -> list[StateShard]:
    """What one rank holds: local shards, whole or, of what the ZeRO stage cuts, its part; zeros without ``tensors``."""
    pieces = []
    for kind, parameter in product(kinds, specs):
        local = parameter.local_box(mesh)
        sharded = zero == 3 or (zero and kind != "weight")
        writes = parameter.is_owner(mesh) and (sharded or mesh.coord("dp") == 0)
        for box in zero_boxes(local, mesh) if sharded else [local]:
            held = torch.zeros(box.shape) if tensors is None else tensors[f"{kind}/{parameter.name}"][box.slices()]
            pieces.append(StateShard(kind, parameter.name, parameter.shape, box, held, writes))
    return pieces


def zero_boxes(local: Box, mesh: Mesh) -> Iterator[Box]:
    """This dp rank's equal part of the flattened local shard, as boxes of the global tensor."""
    ranks, rank = mesh.size("dp"), mesh.coord("dp")
    part = math.ceil(local.numel / ranks)
    lo, hi = min(rank * part, local.numel), min((rank + 1) * part, local.numel)
    for box in flat_range_boxes(local.shape, lo, hi):
        yield Box(tuple(a + b for a, b in zip(local.offset, box.offset, strict=True)), box.shape)


def wrong_pieces(pieces: list[StateShard], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the pieces that do not hold their part of the global tensors, bit for bit."""
    return [
        f"{piece.kind}/{piece.name}{tuple(piece.box)}"
        for piece in pieces
        if not torch.equal(
            piece.tensor, tensors[f"{piece.kind}/{piece.name}"][piece.box.slices()].to(piece.tensor.dtype)
        )
    ]
