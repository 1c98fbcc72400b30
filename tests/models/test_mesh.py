"""Which rank sits where, and that the groups join the ranks the arithmetic names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanotron.parallel.mesh import Mesh, training_axes
from tests.pool import Pool

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


def ranks_met(rank: int, world: int, axes: Any, axis: str) -> tuple[list[int], tuple[int, ...]]:
    mesh = Mesh(axes, rank)
    mesh.create_groups()
    met = torch.zeros(world, dtype=torch.int64)
    met[rank] = 1
    if mesh.group(axis) is not None:
        dist.all_reduce(met, group=mesh.group(axis))
    return met.nonzero().flatten().tolist(), mesh.ranks_along(axis)


@pytest.mark.parametrize("axis", ["dp", "tp", "tp_rep"])
def test_a_group_joins_the_ranks_along_its_axis(pool: Pool, axis: str) -> None:
    axes = training_axes(dp=1, tp=4, pp=1, num_key_value_heads=2) if axis == "tp_rep" else {"pp": 1, "dp": 2, "tp": 2}
    for met, expected in pool.run(4, ranks_met, axes, axis):
        assert tuple(met) == expected
