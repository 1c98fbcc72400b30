"""Which rank sits where: the arithmetic of the device mesh, and the process groups along its axes.

    world rank = row-major index over the axes, slow to fast: pp, dp, cp, tp

                      dp 0              dp 1
                   tp 0   tp 1       tp 0   tp 1
        pp 0        0      1          2      3
        pp 1        4      5          6      7

tp is fastest: its ranks talk most, so they are neighbours on one machine. An axis may be a product of sub-axes
(``{"tp": {"tp_kv": 2, "tp_rep": 2}}``): then both the product and its parts have a size, a coordinate and groups.
The arithmetic needs no torch; ``create_groups`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import product
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AxisSizes = Mapping[str, "int | Mapping[str, int]"]


def training_axes(*, dp: int, tp: int, pp: int, num_key_value_heads: int) -> dict[str, int | dict[str, int]]:
    """The axes of a training run. With more tp ranks than key/value heads, tp_rep ranks share each head.

    Legal when num_key_value_heads % tp == 0 (tp_rep = 1) or tp % num_key_value_heads == 0 (checked with the config).
    """
    tp_kv = min(tp, num_key_value_heads)
    return {"pp": pp, "dp": dp, "cp": 1, "tp": {"tp_kv": tp_kv, "tp_rep": tp // tp_kv}}


class Mesh:
    """The coordinates of one rank among ``world`` ranks; ``Mesh()`` is one device and needs no process group.

    An axis that was never named has size 1, so code can ask for any axis of the field.
    """

    def __init__(self, axes: AxisSizes | None = None, rank: int = 0) -> None:
        self._parts: dict[str, tuple[str, ...]] = {}
        self._sizes: dict[str, int] = {}
        for axis, size in (axes or {}).items():
            parts = dict(size) if isinstance(size, Mapping) else {axis: size}
            self._parts[axis] = tuple(parts)
            self._sizes |= parts
        assert all(size >= 1 for size in self._sizes.values()), f"every axis needs a size of at least 1: {axes}"
        self.rank = rank
        self.world = prod(self._sizes.values())
        assert 0 <= rank < self.world, f"rank {rank} is outside a mesh of {self.world} ranks"
        self._coords = dict(zip(self._sizes, _unravel(rank, tuple(self._sizes.values())), strict=True))
        self._lines: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._p2p_groups: dict[str, ProcessGroup] = {}
        self._timeout: timedelta | None = None

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={self.size(axis)}" for axis in self._parts)
        return f"Mesh({sizes}; rank {self.rank} of {self.world})"

    # ---------------------------------------------------------------- arithmetic

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis`` (the product, for an axis made of sub-axes)."""
        return prod(self._sizes.get(part, 1) for part in self.parts(axis))

    def coord(self, axis: str) -> int:
        """This rank's index along ``axis``, from 0."""
        coord = 0
        for part in self.parts(axis):
            coord = coord * self._sizes.get(part, 1) + self._coords.get(part, 0)
        return coord

    def ranks_along(self, *axes: str) -> tuple[int, ...]:
        """The ranks that share all of this rank's coordinates but those along ``axes``, in order of coordinate."""
        if axes not in self._lines:  # every layer asks, in every microbatch
            free = {part for axis in axes for part in self.parts(axis)}
            ranges = [range(size) if part in free else [self._coords[part]] for part, size in self._sizes.items()]
            self._lines[axes] = tuple(self._ravel(coords) for coords in product(*ranges))
        return self._lines[axes]

    def rank_at(self, **coords: int) -> int:
        """The rank at this rank's coordinates with those along some axes replaced: ``mesh.rank_at(pp=0)``."""
        replaced = dict(self._coords)
        for axis, coord in coords.items():
            parts = self.parts(axis)
            sizes = tuple(self._sizes.get(part, 1) for part in parts)
            assert 0 <= coord < prod(sizes), f"{axis}={coord} is outside {self!r}"
            replaced |= dict(zip(parts, _unravel(coord, sizes), strict=True))
        return self._ravel([replaced[part] for part in self._sizes])

    def parts(self, axis: str) -> tuple[str, ...]:
        """The sub-axes that ``axis`` is a product of, slow to fast; the axis itself when it is not a product."""
        return self._parts.get(axis, (axis,))

    def _ravel(self, coords: Sequence[int]) -> int:
        rank = 0
        for coord, size in zip(coords, self._sizes.values(), strict=True):
            rank = rank * size + coord
        return rank

    def seen_by(self, rank: int) -> Mesh:
        """The arithmetic of this mesh at another rank; it has no groups."""
        axes: AxisSizes = {axis: {part: self._sizes[part] for part in parts} for axis, parts in self._parts.items()}
        return Mesh(axes, rank)

    def _others(self) -> list[Mesh]:
        """This mesh as each rank sees it, in order of rank."""
        return [self.seen_by(rank) for rank in range(self.world)]

    # ------------------------------------------------------------ process groups

    def create_groups(
        self, tied_stages: Sequence[int] = (), timeout: timedelta | None = None, *, replicas: bool = False
    ) -> None:
        """Create every communicator this mesh will use; collective over all ranks, always in the same order.

        ``tied_stages``: pipeline coordinates that hold copies of one parameter; their ranks get a group of their own.
        ``replicas``: whether the ranks of each replica need a group, ``group("pp", "cp", "tp")``.
        ``timeout`` of every collective in these groups (torch's default when None).
        Call it once, after ``init_process_group``. Groups of one rank are never created.
        """
        self._timeout = timeout
        products: list[tuple[str, ...]] = [("tp",), ("tp_rep",), ("dp",)]
        products += [("pp", "cp", "tp")] if replicas else []
        rank_sets = {other.ranks_along(*axes) for axes in products for other in self._others()}
        if len(set(tied_stages)) > 1:
            rank_sets |= {self._tied_ranks(other, tied_stages) for other in self._others()}
        for ranks in sorted(rank_sets):
            self._create(ranks)
        for pipeline in sorted({other.ranks_along("pp") for other in self._others()}):
            for direction in ("forward", "backward"):
                self._create_p2p(pipeline, direction)

    def group(self, *axes: str) -> ProcessGroup | None:
        """The communicator of ``ranks_along(*axes)``, or None when that is this rank alone."""
        return self.group_of(self.ranks_along(*axes))

    def group_of(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """The communicator of exactly these ranks, or None for one rank. Raises KeyError if it was never created."""
        if len(ranks) == 1:
            return None
        if len(ranks) == self.world:
            from torch.distributed import group

            return group.WORLD
        return self._groups[tuple(ranks)]

    def p2p_group(self, direction: str) -> ProcessGroup | None:
        """This pipeline's communicator for ``"forward"`` (activations) or ``"backward"`` (gradients) transfers.

        They are apart so that an activation and a gradient between one pair of ranks never wait for each other.
        """
        return self._p2p_groups.get(direction)

    def tied_group(self, stages: Sequence[int]) -> ProcessGroup | None:
        """The communicator of the ranks that hold this rank's shard of a parameter tied over these stages."""
        return self.group_of(self._tied_ranks(self, stages))

    @staticmethod
    def _tied_ranks(mesh: Mesh, stages: Sequence[int]) -> tuple[int, ...]:
        return tuple(mesh.rank_at(pp=stage) for stage in sorted(set(stages)))

    def _create(self, ranks: tuple[int, ...]) -> None:
        import torch.distributed as dist

        if 1 < len(ranks) < self.world:
            group = dist.new_group(list(ranks), timeout=self._timeout)
            if self.rank in ranks:
                self._groups[ranks] = group

    def _create_p2p(self, ranks: tuple[int, ...], direction: str) -> None:
        import torch.distributed as dist

        if len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=self._timeout)
            if self.rank in ranks:
                self._p2p_groups[direction] = group


def _unravel(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    coords = []
    for size in reversed(sizes):
        index, coord = divmod(index, size)
        coords.append(coord)
    return tuple(reversed(coords))
