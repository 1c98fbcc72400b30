"""Mistakes put into the code on purpose: each is one that someone has made, and each must be caught, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from nanotron.models import experts
from nanotron.ops import linear as layers
from nanotron.optim import buckets
from nanotron.parallel import comm
from nanotron.parallel.comm import AsyncHandle
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import ParamSpec
from nanotron.training.balance import ExpertBalance
from tests.parity.cases import Case
from tests.parity.run import Trained, train


def _nothing(x: Tensor, group: Any) -> Tensor:
    return x


def _nothing_begun(x: Tensor, group: Any) -> AsyncHandle:
    return lambda: x


def _own_part_begun(x: Tensor, group: Any, dim: int) -> AsyncHandle:
    """This rank's part of its own addend, the others' forgotten."""
    return lambda: x if group is None else x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def _average(flat: Tensor, group: Any) -> Any:
    """The mean over replicas instead of the sum."""
    return None if group is None else dist.all_reduce(flat.div_(dist.get_world_size(group)), group=group, async_op=True)


def _whole_but_in_routers(spec: ParamSpec, mesh: Mesh) -> tuple[str, ...]:
    """A router's gradient is partial too, where each rank routes its own tokens."""
    return () if ".router." in spec.name else tuple(axis for axis in spec.partial_grad if mesh.size(axis) > 1)


def _over_all_replicas(spec: ParamSpec, mesh: Mesh) -> tuple[str, ...]:
    """Also over ep, whose ranks hold different experts."""
    return mesh.data_parts


def _returned_as_sent(x: Tensor, mesh: Mesh, axis: str, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Gradients travel in the numbers in which rows did, not in which they came."""
    group, count = mesh.group(axis), sum(sent)

    def resized(rows: Tensor) -> Tensor:
        return torch.cat([rows, rows.new_zeros(count, *rows.shape[1:])])[:count]

    def forward(x: Tensor) -> Tensor:
        return comm.all_to_all_rows(x, group, sent, received)

    return comm._pair(x, group, forward, lambda grad: resized(forward(resized(grad))))


def _every_choice(chosen: Tensor, here: int, mesh: Mesh) -> Tensor:
    """A token travels to a rank once for each of its experts there."""
    return chosen // (here * mesh.size("tp"))


def _counted_by_every_rank(balance: ExpertBalance, found: Any) -> dict[str, Tensor]:
    balance._counts = True
    return VECTORS(balance, found)


VECTORS = ExpertBalance.vectors
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "input gradients not summed over tp": (layers, "begin_all_reduce_", _nothing_begun),
    "gathered input's gradient not summed": (layers, "begin_reduce_scatter", _own_part_begun),
    "partial and tied gradients not summed": (buckets, "all_reduce_", _nothing),
    "replicas averaged": (buckets, "start_all_reduce", _average),
    "router gradients not summed over tp": (ParamSpec, "partial_axes", _whole_but_in_routers),
    "weights of tp's other experts without gradient": (layers.TensorParallel, "entered", lambda tp, x: x),
    "expert gradients summed over all replicas": (ParamSpec, "reduce_axes", _over_all_replicas),
    "counts of a row not summed": (experts, "all_reduce_", _nothing),
    "gradients of rows returned in the numbers sent": (experts, "exchange_rows", _returned_as_sent),
    "tokens sent once for each of their experts": (experts, "ranks_of", _every_choice),
    "tokens counted by every tp rank": (ExpertBalance, "vectors", _counted_by_every_rank),
}


def train_with_fault(rank: int, world: int, case: Case, name: str) -> Trained:
    """`train`, with one mistake in the code."""
    place, collective, wrong = FAULTS[name]
    with mock.patch.object(place, collective, wrong):
        return train(rank, world, case, check_copies=False)  # which would stop it before anything is named
