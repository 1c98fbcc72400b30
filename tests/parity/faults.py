"""Mistakes put into the code on purpose: each is one that someone has made, and each must be caught, by name."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from nanotron import comm, layers
from nanotron.optim import buckets
from tests.parity.cases import Case
from tests.parity.run import Trained, train


def _in_backward(wrong: Any, right: Any) -> Any:
    """A collective that does the wrong thing when a backward function calls it, and the right thing elsewhere."""

    def either(x: Tensor, *args: Any, **options: Any) -> Any:
        return (wrong if sys._getframe(1).f_code.co_name == "backward" else right)(x, *args, **options)

    return either


def _nothing(x: Tensor, group: Any) -> Tensor:
    return x


def _own_part(x: Tensor, group: Any, dim: int) -> Tensor:
    """This rank's part of its own addend, the others' forgotten."""
    return x if group is None else x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def _average(flat: Tensor, group: Any) -> Any:
    """The mean over replicas instead of the sum."""
    return None if group is None else dist.all_reduce(flat.div_(dist.get_world_size(group)), group=group, async_op=True)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "input gradients not summed over tp": (layers, "all_reduce_", _in_backward(_nothing, comm.all_reduce_)),
    "gathered input's gradient not summed": (layers, "reduce_scatter", _in_backward(_own_part, comm.reduce_scatter)),
    "partial and tied gradients not summed": (buckets, "all_reduce_", _nothing),
    "replicas averaged": (buckets, "start_all_reduce", _average),
}


def train_with_fault(rank: int, world: int, case: Case, name: str) -> Trained:
    """`train`, with one mistake in the code."""
    place, collective, wrong = FAULTS[name]
    with mock.patch.object(place, collective, wrong):
        return train(rank, world, case)
