"""The collectives: every byte that moves between the ranks of an axis is one of these words.

                                forward           backward          when the axis has size 1
    copy_to(x, axis)            identity          all-reduce        identity
    sum_from(x, axis)           all-reduce        identity          identity
    gather(x, axis, dim)        all-gather        reduce-scatter    identity
    scatter_sum(x, axis, dim)   reduce-scatter    all-gather        identity
    exchange(x, axis, …)        all-to-all        all-to-all        identity
    exchange_rows(x, axis, …)   all-to-all        all-to-all        identity

The first four are conjugate pairs: a column-cut matmul enters by ``copy_to`` (or ``gather``) and the row-cut one after
it leaves by ``sum_from`` (or ``scatter_sum``). All reductions are sums. Below them stand the plain operations that they
are made of, without autograd; the optimizer and ``layers.linear`` use those. Transfers between pipeline stages are the
pipeline engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup, Work

from nanotron.parallel import gloo
from nanotron.parallel.mesh import Mesh

T = TypeVar("T")

# ------------------------------------------------------------------ differentiable


def copy_to(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Enter a region where each rank of ``axis`` uses x in its own way. Forward: identity; backward: all-reduce.

    x: any shape, equal on all ranks.
    """
    group = mesh.group(axis)
    return _pair(x, group, lambda x: x.view_as(x), lambda grad: all_reduce(grad, group))


def sum_from(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Leave such a region: add up what each rank computed. Forward: all-reduce; backward: identity.

    x: any shape, one addend per rank; the result is equal on all ranks.
    """
    group = mesh.group(axis)
    return _pair(x, group, lambda x: all_reduce(x, group), lambda grad: grad)


def gather(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """Concatenate the ranks' equal parts along ``dim``. Forward: all-gather; backward: reduce-scatter."""
    group = mesh.group(axis)
    return _pair(x, group, lambda x: all_gather(x, group, dim), lambda grad: reduce_scatter(grad, group, dim))


def scatter_sum(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """Add up the ranks' addends and keep this rank's part along ``dim``. Forward: reduce-scatter; backward: all-gather.

    The size of ``dim`` divides by the axis.
    """
    group = mesh.group(axis)
    return _pair(x, group, lambda x: reduce_scatter(x, group, dim), lambda grad: all_gather(grad, group, dim))


def exchange(x: Tensor, mesh: Mesh, axis: str, *, split: int, join: int) -> Tensor:
    """Cut dim ``split`` over the ranks, and join along dim ``join`` what they cut. Forward: all-to-all; backward: back.

    x [.., n·l, .., m, ..] -> [.., l, .., n·m, ..] with n ranks; the size of ``split`` divides by n.
    """
    group = mesh.group(axis)
    return _pair(x, group, lambda x: all_to_all(x, group, split, join), lambda y: all_to_all(y, group, join, split))


def exchange_rows(x: Tensor, mesh: Mesh, axis: str, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send ``sent[i]`` rows of x to rank i, and get ``received[i]`` from it. Forward: all-to-all; backward: back.

    x [Σ sent, ..], its rows in the order of the ranks they go to -> [Σ received, ..], in the order of those they are
    from. The numbers may differ, and be 0.
    """
    group = mesh.group(axis)
    return _pair(
        x,
        group,
        lambda x: all_to_all_rows(x, group, sent, received),
        lambda grad: all_to_all_rows(grad, group, received, sent),
    )


Operation = Callable[[Tensor], Tensor]


def _pair(x: Tensor, group: ProcessGroup | None, forward: Operation, backward: Operation) -> Tensor:
    """``forward(x)``, whose gradient is ``backward`` of its own; x itself when group is None."""
    return x if group is None else with_transpose(x, forward, backward)


def with_transpose(x: Tensor, forward: Operation, backward: Operation) -> Tensor:
    """``forward(x)``, a linear operation, whose gradient is ``backward`` of its own; nothing is kept for it."""
    result: Tensor = _Pair.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _Pair(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Operation, backward: Operation) -> Tensor:
        ctx.transpose = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grad), None, None


# -------------------------------------------------------------- without autograd


def all_reduce(x: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The sum (or other ``op``) of x over the group, as a new tensor; x itself when group is None."""
    return x if group is None else all_reduce_(x.clone(memory_format=torch.contiguous_format), group, op)


def all_reduce_(x: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Replace x by its sum (or other ``op``) over the group; nothing when group is None."""
    if group is not None:
        dist.all_reduce(x, op=op, group=group)
    return x


def all_gather(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """The ranks' tensors, which have one shape, concatenated along ``dim``; x itself when group is None."""
    return begin_all_gather(x, group, dim)()


def reduce_scatter(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """This rank's part along ``dim`` of the sum of x over the group; x itself when group is None."""
    return begin_reduce_scatter(x, group, dim)()


def all_to_all(x: Tensor, group: ProcessGroup | None, split: int, join: int) -> Tensor:
    """Send part i of dim ``split`` to rank i, and concatenate what the ranks sent along dim ``join``.

    x itself when group is None.
    """
    if group is None:
        return x
    n = dist.get_world_size(group)
    assert x.shape[split] % n == 0, f"dim {split} of {tuple(x.shape)} does not divide by {n} ranks"
    parts = torch.stack(x.chunk(n, split))  # [n, .., l, .., m, ..]
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), join)


def all_to_all_rows(x: Tensor, group: ProcessGroup | None, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send ``sent[i]`` rows of x to rank i and get ``received[i]`` from it: [Σ sent, ..] -> [Σ received, ..].

    x itself when group is None.
    """
    if group is None:
        return x
    rows = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(rows, x.contiguous(), list(received), list(sent), group=group)
    return rows


def all_gather_objects(x: T, group: ProcessGroup | None) -> list[T]:
    """Every rank's x, in order, pickled on its way: for what is told once, before training. [x] when group is None."""
    if group is None:
        return [x]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, x, group=group)
    return found


# --------------------------------------------------------- begun now, awaited later

AsyncHandle = Callable[[], Tensor]
"""Waits for a collective under way and returns its result; call it once."""


def begin_all_reduce_(x: Tensor, group: ProcessGroup | None) -> AsyncHandle:
    """Begin ``all_reduce_``; x must be left alone until it has arrived."""
    return _handle(start_all_reduce(x, group), lambda: x)


def begin_all_gather(x: Tensor, group: ProcessGroup | None, dim: int) -> AsyncHandle:
    """Begin ``all_gather``."""
    if group is None:
        return lambda: x
    parts = x.new_empty((dist.get_world_size(group), *x.shape))
    work = start_all_gather(parts.view(-1), x.contiguous().view(-1), group)
    # n × [.., l, ..] -> [.., n·l, ..]; of one row they lie in their order already
    if x.shape[:dim].numel() == 1:
        return _handle(work, lambda: parts.view(*x.shape[:dim], len(parts) * x.shape[dim], *x.shape[dim + 1 :]))
    return _handle(work, lambda: torch.cat(parts.unbind(), dim))


def begin_reduce_scatter(x: Tensor, group: ProcessGroup | None, dim: int) -> AsyncHandle:
    """Begin ``reduce_scatter``."""
    if group is None:
        return lambda: x
    n = dist.get_world_size(group)
    assert x.shape[dim] % n == 0, f"dim {dim} of {tuple(x.shape)} does not divide by {n} ranks"
    one_row = x.shape[:dim].numel() == 1  # then rank r's part is the r-th contiguous block
    parts = x.contiguous() if one_row else torch.cat(x.chunk(n, dim))
    mine = x.new_empty((*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :]))
    work = start_reduce_scatter(mine.view(-1), parts.view(-1), group)
    return _handle(work, lambda: mine)


def _handle(work: Work | None, result: Callable[[], Tensor]) -> AsyncHandle:
    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return result()

    return wait


# ---------------------------------------------- in the background, on flat buffers


def start_all_reduce(flat: Tensor, group: ProcessGroup | None) -> Work | None:
    """Begin to replace ``flat`` by its sum over the group; wait on the result before reading it."""
    return None if group is None else dist.all_reduce(flat, group=group, async_op=True)


def start_reduce_scatter(shard: Tensor, flat: Tensor, group: ProcessGroup | None) -> Work | None:
    """Begin to put this rank's equal part of the sum of ``flat`` into ``shard``, which may be its place in ``flat``."""
    if group is None:
        return None
    if group.name() == "gloo":
        return gloo.ReduceScatter(shard, flat, group)
    work: Work | None = dist.reduce_scatter_single(shard, flat, group=group, async_op=True)
    return work


def start_all_gather(flat: Tensor, shard: Tensor, group: ProcessGroup | None) -> Work | None:
    """Begin to fill ``flat`` with the ranks' shards; this rank's may be its place in ``flat``."""
    if group is None:
        return None
    if group.name() == "gloo":
        return gloo.AllGather(flat, shard, group)
    work: Work | None = dist.all_gather_single(flat, shard, group=group, async_op=True)
    return work
