"""Gathering and summing shards over gloo: each part is sent from where it lies to where it goes.

Gloo's own all-gather copies what has arrived, and its reduce-scatter is an all-reduce of a copy: twice the bytes. As
with any collective, the ranks of a group begin these in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work


class Transfers(Work):
    """What is on its way between this rank and each other one of a group."""

    def __init__(self, sent: Sequence[Tensor], received: Sequence[Tensor], group: ProcessGroup) -> None:
        """Begin to send ``sent[i]`` to rank i and to receive ``received[i]`` from it; nothing to this rank itself."""
        super().__init__()
        self._works: list[Work] = []
        for distance in range(1, len(sent)):
            other = (group.rank() + distance) % len(sent)
            self._works += [group.recv([received[other]], other, 0), group.send([sent[other]], other, 0)]

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        return True


class AllGather(Transfers):
    """Fills ``flat`` with the ranks' shards; this rank's may be its place in ``flat``."""

    def __init__(self, flat: Tensor, shard: Tensor, group: ProcessGroup) -> None:
        parts = flat.chunk(group.size())
        super().__init__([shard] * group.size(), parts, group)
        parts[group.rank()].copy_(shard)


class ReduceScatter(Transfers):
    """Puts this rank's equal part of the sum of ``flat`` into ``shard``, which may be its place in ``flat``."""

    def __init__(self, shard: Tensor, flat: Tensor, group: ProcessGroup) -> None:
        parts = flat.chunk(group.size())
        self._mine, self._shard = parts[group.rank()], shard
        self._others = flat.new_empty((group.size() - 1, len(shard))).unbind()
        super().__init__(parts, [*self._others[: group.rank()], shard, *self._others[group.rank() :]], group)

    def wait(self, timeout: timedelta | None = None) -> bool:
        super().wait()
        total = self._mine if self._others else self._shard.copy_(self._mine)
        for other in self._others:
            total = torch.add(total, other, out=self._shard)
        return True
