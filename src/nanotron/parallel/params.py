"""What a parameter is: one frozen declaration, and everything that is derived from it.

    ParamSpec   global name and shape, how it is cut, how its gradient is summed, how it starts, whether it decays
    Box         an axis-aligned part of a global tensor: a shard, a ZeRO slice, an entry of a checkpoint
    draw        initial values keyed by global name: the same weights on every layout

No torch at module level: ``nanotron check`` and the planner read these too.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nanotron.parallel.mesh import Mesh

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float32]]

MODEL_AXES = ("tp",)
"""Axes whose ranks hold different parts, or copies, of one stage's parameters."""


class Box(NamedTuple):
    """An axis-aligned part of a global tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def slices(self, within: Box | None = None) -> tuple[slice, ...]:
        """Index of this box in the global tensor, or in a tensor that holds just the box ``within``."""
        origin = within.offset if within else (0,) * len(self.shape)
        return tuple(slice(o - w, o - w + n) for o, w, n in zip(self.offset, origin, self.shape, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """The part that two boxes of one tensor share, or None."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    ends = (min(ao + an, bo + bn) for ao, an, bo, bn in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
    return Box(offset, shape) if all(n > 0 for n in shape) else None


def flat_range_boxes(shape: tuple[int, ...], lo: int, hi: int) -> list[Box]:
    """The elements [lo, hi) of a row-major tensor of ``shape``, as at most 2·ndim−1 boxes in flat order.

    shape (4, 3), [2, 10):   . . x      a rest of a row,
                             x x x      whole rows,
                             x x x
                             x . .      and a start of a row
    """
    assert 0 <= lo <= hi <= prod(shape), f"[{lo}, {hi}) is no range of a tensor of shape {shape}"
    if lo == hi:
        return []
    if len(shape) == 0:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((lo,), (hi - lo,))]
    row = prod(shape[1:])
    first, last = -(-lo // row), hi // row  # the whole rows are [first, last)
    if first > last:  # both ends lie inside one row
        return _within_row(shape, last, lo - last * row, hi - last * row)
    boxes = _within_row(shape, first - 1, lo - (first - 1) * row, row) if lo < first * row else []
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return boxes + (_within_row(shape, last, 0, hi - last * row) if last * row < hi else [])


def _within_row(shape: tuple[int, ...], index: int, lo: int, hi: int) -> list[Box]:
    return [Box((index, *box.offset), (1, *box.shape)) for box in flat_range_boxes(shape[1:], lo, hi)]


@dataclass(frozen=True)
class Init:
    """How a parameter starts."""

    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0


@dataclass(frozen=True)
class ParamSpec:
    """The one declaration of a parameter, written where the parameter is born.

    ``shard``: (mesh axis, tensor dim) pairs; a dim of L elements is cut at L·i//n, so shards may be uneven. A dim that
    is named twice is cut again within each part: experts over ep, and a rank's over tp.
    ``partial_grad``: axes that replicate the parameter while each rank computes only a part of its gradient.
    ``decay``: whether weight decay applies, and ``weight_decay`` how much, per unit of learning rate.
    ``lr_scale`` multiplies the learning rate; ``optimizer`` is the name of the rule that updates it.
    ``learns``: whether it has a gradient; one that has none is moved by a rule of its own, in float32 at least.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    decay: bool
    shard: tuple[tuple[str, int], ...] = ()
    partial_grad: tuple[str, ...] = ()
    weight_decay: float = 0.0
    lr_scale: float = 1.0
    optimizer: str = "adamW"
    learns: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_of_experts(self) -> bool:
        """Whether it is a set of experts, one beside the other on its first dim."""
        return ("ep", 0) in self.shard

    def local_box(self, mesh: Mesh) -> Box:
        """The part of the parameter that lives on this rank."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        for axis, dim in self.shard:
            length, n, i = shape[dim], mesh.size(axis), mesh.coord(axis)
            start = length * i // n
            offset[dim] += start
            shape[dim] = length * (i + 1) // n - start
        return Box(tuple(offset), tuple(shape))

    def reduce_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The parts of the data axes the gradient is summed over: those that do not cut the parameter.

        With experts cut over ep and dp = edp × ep, a router's gradient is summed over edp and ep, an expert's over edp.
        """
        return tuple(part for part in mesh.data_parts if part not in self._cut_over(mesh))

    def partial_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes over which each rank has only a part of the gradient; those of size 1 left out."""
        return tuple(axis for axis in self.partial_grad if mesh.size(axis) > 1)

    def is_owner(self, mesh: Mesh) -> bool:
        """Whether this rank holds the first of the copies that the model axes make: counted in norms, written once."""
        return all(mesh.coord(part) == 0 for part in self.copy_axes(mesh))

    def copy_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The parts of the model axes whose ranks hold copies of the same elements."""
        parts = [part for axis in MODEL_AXES for part in mesh.parts(axis) if mesh.size(part) > 1]
        return tuple(part for part in parts if part not in self._cut_over(mesh))

    def _cut_over(self, mesh: Mesh) -> set[str]:
        return {part for axis, _ in self.shard for part in mesh.parts(axis)}


TILE = (128, 512)
"""Initial values are drawn in tiles of at most (rows, columns) of the 2-D view [all but the last dim, last dim]."""


def draw(spec: ParamSpec, box: Box, seed: int, *, threads: int = 1) -> Floats:
    """The initial values of ``box``, float32: a pure function of (seed, global name, position).

    Each tile has a generator of its own, seeded by the hash of (seed, name, tile), so a rank draws only the tiles that
    its box touches, on as many threads as it likes, and any layout gets the same weights.
    """
    import numpy as np

    if spec.init.kind != "normal":
        return np.full(box.shape, 1.0 if spec.init.kind == "ones" else 0.0, dtype=np.float32)
    values = np.empty(box.shape, dtype=np.float32)

    def fill(view: Floats, row: int, col: int, top: int, left: int) -> None:
        tile = _draw_tile(spec, seed, top, left)
        rows = slice(max(row, top * TILE[0]), min(row + view.shape[0], top * TILE[0] + tile.shape[0]))
        cols = slice(max(col, left * TILE[1]), min(col + view.shape[1], left * TILE[1] + tile.shape[1]))
        view[rows.start - row : rows.stop - row, cols.start - col : cols.stop - col] = tile[
            rows.start - top * TILE[0] : rows.stop - top * TILE[0],
            cols.start - left * TILE[1] : cols.stop - left * TILE[1],
        ]

    with ThreadPoolExecutor(threads) as pool:
        filled = [
            pool.submit(fill, values[index].reshape(height, width), row, col, top, left)
            for index, row, col, height, width in _rows_of(spec.shape, box)
            for top, left in product(range(row // TILE[0], -(-(row + height) // TILE[0])), _tile_columns(col, width))
        ]
        for tile in filled:
            tile.result()
    return values


def _rows_of(shape: tuple[int, ...], box: Box) -> Iterator[tuple[tuple[int, ...], int, int, int, int]]:
    """(index into ``box``, first row, first column, rows, columns) of its 2-D pieces in the global 2-D view."""
    if len(shape) == 1:
        yield (), 0, box.offset[0], 1, box.shape[0]
        return
    for index in product(*(range(n) for n in box.shape[:-2])):
        row = 0
        for offset, i, length in zip(box.offset, index, shape, strict=False):
            row = row * length + offset + i
        yield index, row * shape[-2] + box.offset[-2], box.offset[-1], box.shape[-2], box.shape[-1]


def _tile_columns(col: int, width: int) -> range:
    return range(col // TILE[1], -(-(col + width) // TILE[1]))


def _draw_tile(spec: ParamSpec, seed: int, top: int, left: int) -> Floats:
    import numpy as np

    rows, cols = prod(spec.shape[:-1]), spec.shape[-1]
    digest = blake2b(f"{seed}/{spec.name}/{top},{left}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
    shape = (min(TILE[0], rows - top * TILE[0]), min(TILE[1], cols - left * TILE[1]))
    tile = generator.standard_normal(shape, dtype=np.float32)
    tile *= np.float32(spec.init.std)
    return tile
