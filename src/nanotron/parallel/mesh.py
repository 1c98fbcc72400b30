"""Which rank sits where: the arithmetic of the device mesh, and the process groups along its axes.

    world rank = row-major index over the axes, slow to fast: pp, dp, cp, tp

                      dp 0              dp 1
                   tp 0   tp 1       tp 0   tp 1
        pp 0        0      1          2      3
        pp 1        4      5          6      7

tp is fastest: its ranks talk most, so they are neighbours on one machine. An axis may be a product of sub-axes
(``{"tp": {"tp_kv": 2, "tp_rep": 2}}``): then both the product and its parts have a size, a coordinate and groups.
The arithmetic needs no torch; ``create_groups`` does.

Every purpose has communicators of its own, also where two purposes join the same ranks. Collectives of one communicator
must start in one order on all its ranks, and each purpose keeps that order by itself: what a forward computes, in
program order; gradients, bucket by bucket, at moments that depend on timing. In one communicator they would interleave
differently on different ranks. Between two stages each direction has one, so that what comes never waits for what goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AxisSizes = Mapping[str, "int | Mapping[str, int]"]

Purpose = Literal["compute", "gradients", "weights", "rows", "control", "transfers"]
"""What a communicator is for: collectives inside a forward or backward (of tensors, sequences, experts), gradients,
updated weights, rows of a stream, the few numbers that steer a step, and transfers from one stage to another."""

URGENT = ("compute", "transfers")
"""What somebody waits for at once: on GPUs it goes before what may travel beside a computation."""

DATA_AXES = ("dp", "cp")
"""Axes whose ranks see different tokens: gradients are summed over them."""

COPIES = "dp_copies"
"""The part of dp over which hybrid sharding keeps copies of every shard."""


def training_axes(
    *, dp: int, tp: int, pp: int, num_key_value_heads: int, cp: int = 1, ep: int = 1, dp_shard: int | None = None
) -> dict[str, int | dict[str, int]]:
    """The axes of a training run. With more tp ranks than key/value heads, tp_rep ranks share each head.

    ep replicas, neighbours along dp, share one set of experts: dp = edp · ep, with edp copies of the set.
    dp_shard replicas, neighbours too, share the shards of every matrix: dp = dp_copies · dp_shard (hybrid sharding).
    Legal when num_key_value_heads % tp == 0 (tp_rep = 1) or tp % num_key_value_heads == 0 (checked with the config).
    """
    tp_kv, shards = min(tp, num_key_value_heads), dp_shard or dp
    parts = {"edp": shards // ep, "ep": ep} if ep > 1 else {"dp_shard": shards}
    copies = {COPIES: dp // shards} if shards < dp else {}
    replicas: int | dict[str, int] = {**copies, **parts} if ep > 1 or copies else dp
    return {"pp": pp, "dp": replicas, "cp": cp, "tp": {"tp_kv": tp_kv, "tp_rep": tp // tp_kv}}


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
        self._ranks_along: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._groups: dict[tuple[Purpose, tuple[int, ...]], ProcessGroup] = {}

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
        if axes not in self._ranks_along:  # every layer asks, in every microbatch
            free = {part for axis in axes for part in self.parts(axis)}
            ranges = [range(size) if part in free else [self._coords[part]] for part, size in self._sizes.items()]
            self._ranks_along[axes] = tuple(self._ravel(coords) for coords in product(*ranges))
        return self._ranks_along[axes]

    def layout(self) -> dict[str, int]:
        """The axes' sizes, as files of a run tell them; with that of ep, a part of dp, where experts are shared."""
        axes = ("pp", "dp", *["ep"] * (self.size("ep") > 1), "cp", "tp")
        shards = {"dp_shard": self.size("dp") // self.size(COPIES)} if self.size(COPIES) > 1 else {}
        return {axis: self.size(axis) for axis in axes} | shards

    @property
    def num_replicas(self) -> int:
        """Ranks that each read rows of their own: the data-parallel replicas of the model."""
        return self.size("dp")

    @property
    def replica(self) -> int:
        """Which of the replicas this rank belongs to, from 0."""
        return self.coord("dp")

    @property
    def data_parts(self) -> tuple[str, ...]:
        """The parts of the data axes that have more than one rank: ("dp",), ("edp", "ep", "cp"), …"""
        parts = [part for axis in DATA_AXES for part in self.parts(axis)]
        return tuple(part for part in parts if self.size(part) > 1)

    @staticmethod
    def shards_and_copies(axes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of the parts that a gradient is summed over, those that matrices are sharded over, and the one of copies."""
        return tuple(part for part in axes if part != COPIES), tuple(part for part in axes if part == COPIES)

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

    # ------------------------------------------------------------ process groups

    def create_groups(
        self,
        reductions: Iterable[Sequence[str]] = (),
        tied_stages: Sequence[int] = (),
        timeout: timedelta | None = None,
        *,
        edges: Iterable[tuple[int, int]] | None = None,
        rows: bool = False,
        owners: bool = False,
    ) -> None:
        """Create every communicator this mesh will use, on all ranks in the same order.

        One call per kind of group: among the group's own ranks alone, or, where the backend can (NCCL), one split of
        the whole world into all groups of that kind.
        ``reductions``: products of data parts that some gradients are summed over, besides all of them.
        ``tied_stages``: pipeline coordinates that hold copies of one parameter; their ranks sum its gradient.
        ``edges``: pipeline coordinates that send to each other; None: neighbours, and the first and the last.
        ``rows``: whether the ranks of a replica pass rows of a stream on, ``group("pp", "cp", "tp", purpose="rows")``.
        ``owners``: whether the ranks of a stage own matrices of it, ``group("dp", "cp", "tp", purpose="weights")``.
        ``timeout`` of every collective in these groups (torch's default when None).
        Call it once, after ``init_process_group``. Groups of one rank are never created; the whole world's control
        group is the default one.
        """
        wholes = {self.data_parts, *map(tuple, reductions)}
        sums = sorted({part for axes in wholes for part in (axes, *self.shards_and_copies(axes))} - {()})
        wanted: list[tuple[Purpose, Sequence[str]]] = [("compute", (axis,)) for axis in ("tp", "cp", "ep")]
        wanted += [("control", self.data_parts)]
        wanted += [("gradients", axes) for axes in (*sums, ("tp",), ("tp_rep",))]
        wanted += [("weights", axes) for axes in sums if axes in wholes or axes != (COPIES,)]
        wanted += [("weights", ("dp", "cp", "tp"))] if owners else []
        wanted += [("rows", ("pp", "cp", "tp"))] if rows else []
        for purpose, axes in wanted:
            self._create(purpose, lambda mesh, axes=axes: mesh.ranks_along(*axes), timeout)  # type: ignore[misc]
        stages = range(self.size("pp"))
        for ends in _apart(edges if edges is not None else zip(stages, (*stages[1:], 0), strict=True)):
            for back in (False, True):
                self._create("transfers", partial(Mesh._edge, ends=ends, back=back), timeout)
        if tied_stages:  # last, for others have no such group
            self._create("gradients", lambda mesh: mesh._tied_ranks(tied_stages), timeout)

    def group(self, *axes: str, purpose: Purpose = "compute") -> ProcessGroup | None:
        """The communicator of ``ranks_along(*axes)`` for a purpose, or None when that is this rank alone.

        Raises KeyError if it was never created.
        """
        return self._group(purpose, self.ranks_along(*axes))

    def world_group(self) -> ProcessGroup | None:
        """The communicator of all ranks, for control; None for one rank."""
        return self._group("control", range(self.world))

    def tied_group(self, stages: Sequence[int]) -> ProcessGroup | None:
        """The communicator of the ranks that hold this rank's shard of a parameter tied over these stages."""
        return self._group("gradients", self._tied_ranks(stages))

    def edge_group(self, source: int, target: int) -> ProcessGroup:
        """The communicator of what pipeline coordinate ``source`` sends to ``target``; this rank's is one of them."""
        return self._groups["transfers", (self.rank_at(pp=source), self.rank_at(pp=target))]

    def _group(self, purpose: Purpose, ranks: Sequence[int]) -> ProcessGroup | None:
        if len(ranks) == 1:
            return None
        if purpose == "control" and len(ranks) == self.world:
            from torch.distributed import group

            return group.WORLD
        return self._groups[purpose, tuple(ranks)]

    def _tied_ranks(self, stages: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.rank_at(pp=stage) for stage in sorted(set(stages)))

    def _edge(self, ends: Mapping[int, tuple[int, int]], *, back: bool) -> tuple[int, ...]:
        """Who sends and who receives on this rank's edge, of those by pipeline coordinate; alone where it has none."""
        stage = self.coord("pp")
        ranks = tuple(self.rank_at(pp=end) for end in ends.get(stage, (stage,)))
        return ranks[::-1] if back else ranks

    def _create(self, purpose: Purpose, ranks_of: Callable[[Mesh], tuple[int, ...]], timeout: timedelta | None) -> None:
        """Create this rank's group of those that ``ranks_of`` gives each rank; some are of no rank of some stages.

        torch calls a group by its ranks and by how many its ranks have created before: all have to have as many. So who
        has no edge, when others have one, is a group alone.
        """
        import torch.distributed as dist

        ranks = ranks_of(self)
        whole = purpose == "control" and len(ranks) == self.world
        if purpose != "transfers" and (len(ranks) == 1 or whole or (purpose, ranks) in self._groups):
            return
        group, options = None, options_of(purpose)
        backend = "gloo" if purpose == "rows" else None  # hosts read them, and none waits for its device
        if backend is None and _can_split():
            held: dict[int, tuple[int, ...]] = {}  # rank -> its group
            for rank in range(self.world):
                if rank not in held:
                    held |= dict.fromkeys(found := ranks_of(self.seen_by(rank)), found)
            parts = list(map(sorted, dict.fromkeys(held.values())))
            group = dist.split_group(split_ranks=parts, timeout=timeout, pg_options=options)
        elif self.rank in ranks:
            group = dist.new_group(
                list(ranks), timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=True
            )
        if group is not None:
            self._groups[purpose, ranks] = group


def _can_split() -> bool:
    """Whether the default group can be split, in one call of the whole world: NCCL's on its device, gloo's not."""
    from torch.distributed import group

    world = group.WORLD
    device = world.bound_device_id if world is not None else None
    return world is not None and device is not None and bool(world._get_backend(device).supports_splitting)


def options_of(purpose: Purpose) -> Any:
    """What NCCL makes a communicator with: streams of high priority for what is urgent; else None, its defaults."""
    import torch.distributed as dist

    if purpose not in URGENT or dist.get_backend() != "nccl":
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def _apart(edges: Iterable[tuple[int, int]]) -> list[dict[int, tuple[int, int]]]:
    """Edges in few sets, in each of which an end has one at most: end -> edge, lower end first."""
    sets: list[dict[int, tuple[int, int]]] = []
    for edge in sorted({(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]}):
        if all(ends.keys() & edge for ends in sets):
            sets.append({})
        next(ends for ends in sets if not ends.keys() & edge).update(dict.fromkeys(edge, edge))
    return sets


def _unravel(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    coords = []
    for size in reversed(sizes):
        index, coord = divmod(index, size)
        coords.append(coord)
    return tuple(reversed(coords))
