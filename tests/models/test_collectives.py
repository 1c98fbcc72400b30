"""Each collective against its dense reference: what it computes, and what its backward must be.

With w the weights of a linear loss, f one collective, x one tensor per rank:

    copy_to        every rank uses x in its own way         dL/dx   = Σ_r w_r
    sum_from       all ranks use the one sum alike          dL/dx_r = w
    gather         every rank uses the whole differently    dL/dx_r = part r of Σ_q w_q
    scatter_sum    rank r uses part r of the sum            dL/dx_r = w_0 | w_1 | …
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.parallel import comm
from nanotron.parallel.mesh import Mesh
from tests.pool import Pool

SHAPE = (4, 6, 12)  # every dim divides by 1 and 2; the last two also by 3
TWO_AXES = {"cp": 2, "tp": {"tp_kv": 1, "tp_rep": 2}}


def drawn(key: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """A tensor that every rank can draw for every other rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(key), dtype=torch.float64)


def cases(
    mesh: Mesh, axis: str, dim: int
) -> dict[str, tuple[Tensor, Callable[[Tensor], Tensor], Tensor, Tensor, Tensor]]:
    """name -> (this rank's x, the collective, its loss weights, the right output, the right gradient of x)."""
    ranks, me = mesh.ranks_along(axis), mesh.coord(axis)
    n = len(ranks)
    part = tuple(size // n if d == dim else size for d, size in enumerate(SHAPE))
    whole = [drawn(rank) for rank in ranks]
    parts = [drawn(rank, part) for rank in ranks]
    weights = [drawn(100 + rank) for rank in ranks]
    part_weights = [drawn(100 + rank, part) for rank in ranks]
    shared = drawn(1000 + ranks[0])
    return {
        "copy_to": (shared, lambda x: comm.copy_to(x, mesh, axis), weights[me], shared, sum(weights, torch.zeros(()))),
        "sum_from": (whole[me], lambda x: comm.sum_from(x, mesh, axis), shared, sum(whole, torch.zeros(())), shared),
        "gather": (
            parts[me],
            lambda x: comm.gather(x, mesh, axis, dim),
            weights[me],
            torch.cat(parts, dim),
            sum(weights, torch.zeros(())).chunk(n, dim)[me],
        ),
        "scatter_sum": (
            whole[me],
            lambda x: comm.scatter_sum(x, mesh, axis, dim),
            part_weights[me],
            sum(whole, torch.zeros(())).chunk(n, dim)[me],
            torch.cat(part_weights, dim),
        ),
    }


def largest_error(mesh: Mesh, axis: str, name: str, dim: int) -> float:
    """How far one collective's output and input gradient are from the dense reference."""
    x, collective, weight, output, grad = cases(mesh, axis, dim)[name]
    x = x.clone().requires_grad_()
    before = x.detach().clone()
    y = collective(x)
    (y * weight).sum().backward()  # type: ignore[no-untyped-call]
    assert y.shape == output.shape
    assert torch.equal(x.detach(), before), f"{name} changed its input"
    assert x.grad is not None
    return max(float((y - output).abs().max()), float((x.grad - grad).abs().max()))


def all_errors(rank: int, world: int, axes: Any, axis: str, dim: int) -> dict[str, float]:
    mesh = Mesh(axes, rank)
    if world > 1:
        mesh.create_groups()
    return {name: largest_error(mesh, axis, name, dim) for name in cases(mesh, axis, dim)}


@contextmanager
def seeded_fault(fault: str) -> Iterator[None]:
    """Make one collective wrong in the way a tired author would."""

    def part(x: Tensor, group: Any, dim: int) -> Tensor:
        return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]

    def padded(x: Tensor, group: Any, dim: int) -> Tensor:
        me = dist.get_rank(group)
        return torch.cat([x if r == me else torch.zeros_like(x) for r in range(dist.get_world_size(group))], dim)

    sound, pair = getattr(comm, fault), comm._pair
    wrong = {
        "copy_to": lambda group: lambda grad: grad,
        "sum_from": lambda group: lambda grad: comm.all_reduce(grad, group),
        "gather": lambda group: lambda grad: part(grad, group, 1),
        "scatter_sum": lambda group: lambda grad: padded(grad, group, 1),
    }[fault]

    def faulty_pair(x: Tensor, group: Any, forward: comm.Operation, backward: comm.Operation) -> Tensor:
        return pair(x, group, forward, wrong(group))

    def collective(x: Tensor, mesh: Mesh, axis: str, *dim: int) -> Tensor:
        with mock.patch.object(comm, "_pair", faulty_pair):
            return sound(x, mesh, axis, *dim)

    with mock.patch.object(comm, fault, collective):
        yield


def errors_with_fault(rank: int, world: int, fault: str) -> dict[str, float]:
    with seeded_fault(fault):
        return all_errors(rank, world, {"tp": world}, "tp", 1)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    ("axes", "axis"), [({"tp": 2}, "tp"), (TWO_AXES, "tp"), (TWO_AXES, "cp"), (TWO_AXES, "tp_rep")]
)
def test_a_collective_and_its_backward_equal_the_dense_reference(pool: Pool, axes: Any, axis: str, dim: int) -> None:
    world = Mesh(axes).world
    for errors in pool.run(world, all_errors, axes, axis, dim):
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("dim", [1, 2])
def test_three_ranks_add_and_gather_alike(pool: Pool, dim: int) -> None:
    for errors in pool.run(3, all_errors, {"tp": 3}, "tp", dim):
        assert max(errors.values()) < 1e-12, errors


def test_on_an_axis_of_one_rank_every_collective_is_the_identity() -> None:
    x = drawn(0)
    mesh = Mesh()
    assert comm.copy_to(x, mesh, "tp") is x
    assert comm.sum_from(x, mesh, "tp") is x
    assert comm.gather(x, mesh, "tp", 0) is x
    assert comm.scatter_sum(x, mesh, "tp", 0) is x


@pytest.mark.parametrize("fault", ["copy_to", "sum_from", "gather", "scatter_sum"])
def test_a_wrong_backward_is_seen(pool: Pool, fault: str) -> None:
    for errors in pool.run(2, errors_with_fault, fault):
        assert errors.pop(fault) > 0.1
        assert max(errors.values()) < 1e-12, errors


def flat_buffers(rank: int, world: int) -> None:
    mesh = Mesh({"dp": world}, rank)
    mesh.create_groups()
    group = mesh.group("dp", purpose="gradients")
    length = 5
    flats = [drawn(r, (world * length,)) for r in range(world)]
    total = sum(flats, torch.zeros(()))
    mine = slice(rank * length, (rank + 1) * length)

    flat = flats[rank].clone()
    wait(comm.start_all_reduce(flat, group))
    torch.testing.assert_close(flat, total)

    flat = flats[rank].clone()
    wait(comm.start_reduce_scatter(flat[mine], flat, group))  # the shard may be its own place in the flat tensor
    torch.testing.assert_close(flat[mine], total[mine])

    flat = torch.zeros_like(total)
    flat[mine] = total[mine]
    wait(comm.start_all_gather(flat, flat[mine], group))
    assert torch.equal(flat, total)

    largest = comm.all_reduce(flats[rank], group, dist.ReduceOp.MAX)
    assert torch.equal(largest, torch.stack(flats).amax(0))


def wait(work: Any) -> None:
    assert work is not None
    work.wait()


def alone(rank: int, world: int) -> None:
    group = dist.new_group([rank], use_local_synchronization=True)
    shard, flat = torch.zeros(3), torch.arange(3.0)
    wait(comm.start_reduce_scatter(shard, flat, group))
    assert torch.equal(shard, flat)
    wait(comm.start_all_gather(flat, shard + 1, group))
    assert torch.equal(flat, shard + 1)


def test_a_group_of_one_rank_keeps_what_it_has(pool: Pool) -> None:
    pool.run(2, alone)


@pytest.mark.parametrize("world", [2, 3])
def test_flat_buffers_are_reduced_and_gathered_in_place(pool: Pool, world: int) -> None:
    pool.run(world, flat_buffers)


class Transport(TorchDispatchMode):
    """Notes what collectives are made of, and the elements of each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append((func._opname, args[0][0].numel()))
        return func(*args, **(kwargs or {}))


def transport_of_shards(rank: int, world: int) -> list[tuple[str, int]]:
    """How shards of 5 elements are summed and gathered over gloo."""
    mesh = Mesh({"dp": world}, rank)
    mesh.create_groups()
    group = mesh.group("dp", purpose="gradients")
    flat = torch.ones(world * 5)
    with Transport() as transport:
        wait(comm.start_reduce_scatter(flat[rank * 5 : rank * 5 + 5], flat, group))
        wait(comm.start_all_gather(flat, flat[rank * 5 : rank * 5 + 5], group))
    return transport.seen


def test_each_part_of_a_shard_travels_once_and_straight(pool: Pool) -> None:
    for seen in pool.run(3, transport_of_shards):
        assert sorted(seen) == [("recv_", 5)] * 4 + [("send", 5)] * 4


class Copies(TorchDispatchMode):
    """Notes every operator that makes a copy of several parts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.extend([func._opname] * (func._opname in {"cat", "clone"}))
        return func(*args, **(kwargs or {}))


def copies_of_rows(rank: int, world: int, rows: int) -> list[str]:
    """What gathering and scattering tokens [rows, 2, 3] over tp copies, besides what is sent."""
    mesh = Mesh({"tp": world}, rank)
    mesh.create_groups()
    group = mesh.group("tp")
    mine = torch.arange(rows * 6.0).view(rows, 2, 3) + 100 * rank
    whole = torch.cat([torch.arange(rows * 6.0).view(rows, 2, 3) + 100 * other for other in range(world)], dim=1)
    with Copies() as copies:
        gathered = comm.all_gather(mine, group, dim=1)
        summed = comm.reduce_scatter(whole, group, dim=1)
    assert torch.equal(gathered, whole)
    assert torch.equal(summed, world * mine)
    return copies.seen


def test_one_row_is_gathered_and_scattered_without_a_copy(pool: Pool) -> None:
    assert pool.run(2, copies_of_rows, 1) == [[]] * 2
    assert pool.run(2, copies_of_rows, 2) == [["cat", "cat"]] * 2
