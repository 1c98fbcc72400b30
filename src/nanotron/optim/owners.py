"""Whole matrices out of flat shards, and back: each matrix has an owner, a rank that sees all of it.

    rank 0 holds   a a a b b          rank 0 owns   a a a a a
    rank 1 holds   a a b b b    ──►   rank 1 owns   b b b b b    ──►   and back, to whoever holds what

What a rank holds are boxes of parameters, whatever layout or ZeRO stage made them. The boxes of all ranks are told
once; who sends what to whom is their intersection with the matrices. One all-to-all goes there, one comes back.

A parameter of more than two dims is a stack of matrices: each expert, gate and up, keys and values stand alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from nanotron.optim.buckets import Bucket
from nanotron.parallel.comm import all_gather_objects, all_to_all_rows
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import Box, ParamSpec

OWNERS = ("dp", "cp", "tp")
"""The axes of a pipeline stage: among its ranks its matrices are dealt out."""


class Matrix(NamedTuple):
    """One matrix of the model."""

    shape: tuple[int, int]
    name: str
    """Of its parameter."""
    which: tuple[int, ...]
    """Which of the parameter's matrices: in all of its dims but the last two."""


Part = tuple[Matrix, Box]
"""A box of a matrix, in its two dims."""


class Held(NamedTuple):
    """What a rank holds of matrices, in the order of its buckets."""

    gives: list[Part]
    """Over all ranks, every element once."""
    takes: list[Part]
    """All that it updates: also what others update too."""


def parts_of(views: Iterable[tuple[ParamSpec, Box, Tensor]]) -> Iterator[tuple[Part, Tensor]]:
    """Boxes of parameters, cut into those of their matrices: each a tensor of two dims."""
    for spec, box, view in views:
        for index in product(*(range(length) for length in box.shape[:-2])):
            which = tuple(first + i for first, i in zip(box.offset, index, strict=False))
            matrix = Matrix(spec.shape[-2:], spec.name, which)  # type: ignore[arg-type]
            yield (matrix, Box(box.offset[-2:], box.shape[-2:])), view[index]


def held_by(buckets: Sequence[Bucket]) -> Held:
    """What these buckets' shards hold."""
    held = Held([], [])
    for bucket in buckets:
        flat = bucket.weight_shard
        if bucket.key.counted:
            held.gives.extend(part for part, _ in parts_of(bucket.boxes(flat[bucket.norm_part], bucket.norm_shard)))
        held.takes.extend(part for part, _ in parts_of(bucket.boxes(flat, bucket.shard)))
    return held


def everyones(buckets: Sequence[Bucket], mesh: Mesh) -> list[Held]:
    """What each rank of this stage of the pipeline holds."""
    return all_gather_objects(held_by(buckets), mesh.group(*OWNERS, purpose="weights"))


def deal(matrices: Iterable[Matrix], ranks: int, cost: Callable[[tuple[int, int]], int]) -> dict[Matrix, int]:
    """The owner of each matrix: the costliest one left goes to the rank with the least to do, the same on all ranks."""
    load, owner = [0] * ranks, {}
    for matrix in sorted(matrices, key=lambda matrix: (-cost(matrix.shape), matrix)):
        owner[matrix] = min(range(ranks), key=load.__getitem__)
        load[owner[matrix]] += cost(matrix.shape)
    return owner


Wholes = dict[tuple[int, int], Tensor]
"""A rank's matrices by shape: [how many, rows, columns]."""


class Owners:
    """The way of these buckets' shards to the owners of whole matrices, and back; the same buckets on every call."""

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, cost: Callable[[tuple[int, int]], int]) -> None:
        """``cost`` of a matrix of a shape; a collective, so all ranks of a stage make theirs at once."""
        self._buckets, self._group = buckets, mesh.group(*OWNERS, purpose="weights")
        ranks = mesh.ranks_along(*OWNERS)
        me, everyone = ranks.index(mesh.rank), everyones(buckets, mesh)
        self.owner = deal({matrix for held in everyone for matrix, _ in held.gives}, len(ranks), cost)
        self._mine: dict[tuple[int, int], list[Matrix]] = {}
        for matrix, rank in self.owner.items():
            if rank == me:
                self._mine.setdefault(matrix.shape, []).append(matrix)
        self._place = {matrix: i for matrices in self._mine.values() for i, matrix in enumerate(matrices)}
        self._gives, self._takes = (self._by_owner(parts, len(ranks)) for parts in everyone[me])
        self._collects = [[part for part in held.gives if self.owner[part[0]] == me] for held in everyone]
        self._returns = [[part for part in held.takes if self.owner[part[0]] == me] for held in everyone]

    def collect(self, flats: Sequence[Tensor]) -> Wholes:
        """The matrices that this rank owns, whole; ``flats``: of each bucket its ``shard``, in one dtype."""
        views = []
        for bucket, flat in zip(self._buckets, flats, strict=True):
            if bucket.key.counted:
                views += [view for _, view in parts_of(bucket.boxes(flat[bucket.norm_part], bucket.norm_shard))]
        sent = [views[i] for indices, _ in self._gives for i in indices]
        wholes = {shape: flats[0].new_empty(len(mine), *shape) for shape, mine in self._mine.items()}
        targets = [self._view(wholes, part) for parts in self._collects for part in parts]
        self._exchange(sent, [size for _, size in self._gives], targets, [_size(parts) for parts in self._collects])
        return wholes

    def give_back(self, wholes: Wholes, flats: Sequence[Tensor]) -> None:
        """Fill the shards with what their ranks hold of the matrices, cast to their dtype."""
        views = []
        for bucket, flat in zip(self._buckets, flats, strict=True):
            views += [view for _, view in parts_of(bucket.boxes(flat, bucket.shard))]
        sent = [self._view(wholes, part) for parts in self._returns for part in parts]
        targets = [views[i] for indices, _ in self._takes for i in indices]
        self._exchange(sent, [_size(parts) for parts in self._returns], targets, [size for _, size in self._takes])

    def _exchange(self, sent: list[Tensor], to: list[int], targets: list[Tensor], of: list[int]) -> None:
        """Send ``sent``, ordered by the rank it is for and ``to[i]`` elements to rank i, and fill ``targets``."""
        dtype, device = (sent or targets)[0].dtype, (sent or targets)[0].device
        received = all_to_all_rows(
            torch.cat([torch.empty(0, dtype=dtype, device=device), *(part.reshape(-1) for part in sent)]),
            self._group,
            to,
            of,
        )
        parts = torch.split(received, [target.numel() for target in targets])
        if targets:
            torch._foreach_copy_(targets, [part.view_as(target) for part, target in zip(parts, targets, strict=True)])

    def _by_owner(self, parts: list[Part], ranks: int) -> list[tuple[list[int], int]]:
        """For each rank, which of the parts are of its matrices, and their elements."""
        found: list[list[int]] = [[] for _ in range(ranks)]
        for i, (matrix, _) in enumerate(parts):
            found[self.owner[matrix]].append(i)
        return [(indices, _size([parts[i] for i in indices])) for indices in found]

    def _view(self, wholes: Wholes, part: Part) -> Tensor:
        matrix, box = part
        return wholes[matrix.shape][self._place[matrix]][box.slices()]


def _size(parts: Iterable[Part]) -> int:
    return sum(box.numel for _, box in parts)
