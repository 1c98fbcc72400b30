"""Which rank sits where, and that the groups join the ranks the arithmetic names."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nanotron.parallel.mesh import Mesh, Purpose, training_axes
from tests.pool import Pool

NEW_GROUP = dist.new_group
THREE_D: dict[str, Any] = {"pp": 2, "dp": 2, "cp": 1, "tp": 2}


def test_tp_is_fastest_and_pp_slowest() -> None:
    mesh = Mesh(THREE_D, rank=5)
    assert (mesh.world, mesh.coord("pp"), mesh.coord("dp"), mesh.coord("tp")) == (8, 1, 0, 1)
    assert mesh.ranks_along("tp") == (4, 5)
    assert mesh.ranks_along("dp") == (5, 7)
    assert mesh.ranks_along("pp") == (1, 5)
    assert mesh.ranks_along("dp", "tp") == (4, 5, 6, 7)
    assert mesh.rank_at(pp=0, dp=1) == 3


def test_every_rank_is_where_its_coordinates_say() -> None:
    axes = training_axes(dp=2, tp=4, pp=3, num_key_value_heads=2)
    for rank in range(24):
        mesh = Mesh(axes, rank)
        assert mesh.rank_at(**{axis: mesh.coord(axis) for axis in ("pp", "dp", "tp")}) == rank
        assert mesh.coord("tp") == mesh.coord("tp_kv") * mesh.size("tp_rep") + mesh.coord("tp_rep")


def test_one_device_and_unnamed_axes_have_size_one() -> None:
    mesh = Mesh()
    assert (mesh.world, mesh.size("dp"), mesh.coord("ep"), mesh.ranks_along("dp", "tp")) == (1, 1, 0, (0,))
    assert mesh.group("tp") is None


def ranks_met(rank: int, world: int, axes: Any, axis: str, purpose: Purpose) -> tuple[list[int], tuple[int, ...]]:
    mesh = Mesh(axes, rank)
    mesh.create_groups()
    met = torch.zeros(world, dtype=torch.int64)
    met[rank] = 1
    if mesh.group(axis, purpose=purpose) is not None:
        dist.all_reduce(met, group=mesh.group(axis, purpose=purpose))
    return met.nonzero().flatten().tolist(), mesh.ranks_along(axis)


@pytest.mark.parametrize(
    ("axis", "purpose"), [("dp", "gradients"), ("dp", "weights"), ("tp", "compute"), ("tp_rep", "gradients")]
)
def test_a_group_joins_the_ranks_along_its_axis(pool: Pool, axis: str, purpose: Purpose) -> None:
    axes = training_axes(dp=1, tp=4, pp=1, num_key_value_heads=2) if axis == "tp_rep" else {"pp": 1, "dp": 2, "tp": 2}
    for met, expected in pool.run(4, ranks_met, axes, axis, purpose):
        assert tuple(met) == expected


def communicators(rank: int, world: int, axes: Any) -> tuple[int, int, int]:
    """How many groups this rank takes part in creating, how many it can ask for, and how many of those differ."""
    mesh, created = Mesh(axes, rank), []

    def counted(*args: Any, **options: Any) -> Any:
        created.append(args)
        return NEW_GROUP(*args, **options)

    with mock.patch.object(dist, "new_group", counted):
        mesh.create_groups([mesh.data_parts[:1]], rows=True)
    asked = [mesh.group("tp", purpose=purpose) for purpose in ("compute", "gradients")]
    asked += [mesh.group("dp", purpose=purpose) for purpose in ("gradients", "weights", "control")]
    asked += [mesh.world_group(), *(mesh.edge_group(*edge) for edge in ((0, 1), (1, 0)) if mesh.size("pp") > 1)]
    groups = [group for group in asked if group is not None]
    return len(created), len(groups), len(set(map(id, groups)))


@pytest.mark.parametrize("axes", [{"dp": {"edp": 2, "ep": 2}, "tp": 1}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}])
def test_purposes_share_no_communicator_and_each_rank_creates_only_its_own(pool: Pool, axes: Any) -> None:
    """As many as there are purposes and axes, whatever the world."""
    for created, groups, distinct in pool.run(4, communicators, axes):
        whole_world = "dp" in axes and isinstance(axes["dp"], dict)  # then control over dp is control over all
        assert distinct == groups - whole_world
        assert created <= 8


def test_the_data_parts_are_those_of_the_data_axes_with_ranks() -> None:
    assert Mesh().data_parts == ()
    assert Mesh(THREE_D).data_parts == ("dp",)
    mesh = Mesh({"dp": {"edp": 2, "eshard": 1, "ep": 2}, "cp": 3, "tp": 2}, rank=23)
    assert mesh.data_parts == ("edp", "ep", "cp")
    assert (mesh.num_replicas, mesh.replica) == (4, 3)
