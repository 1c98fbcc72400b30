"""Mistakes put into the code on purpose: each is one that someone has made, and each must be caught, by name."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from nanotron.ops import linear as layers
from nanotron.optim import buckets
from nanotron.parallel.comm import AsyncHandle
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


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "input gradients not summed over tp": (layers, "begin_all_reduce_", _nothing_begun),
    "gathered input's gradient not summed": (layers, "begin_reduce_scatter", _own_part_begun),
    "partial and tied gradients not summed": (buckets, "all_reduce_", _nothing),
    "replicas averaged": (buckets, "start_all_reduce", _average),
}


def train_with_fault(rank: int, world: int, case: Case, name: str) -> Trained:
    """`train`, with one mistake in the code."""
    place, collective, wrong = FAULTS[name]
    with mock.patch.object(place, collective, wrong):
        return train(rank, world, case)
