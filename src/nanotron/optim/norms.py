"""How large each parameter, its gradient and its update are: sums of squares per global name, equal on every layout.

Each replica adds up the part of a bucket whose norm it contributes, of the copy that norms count, so a sum over the
world counts every element of every parameter once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanotron.optim.buckets import Bucket, squared_norm
from nanotron.optim.optimizer import Optimizer

WEIGHT, GRAD, UPDATE = range(3)


class StepSquares:
    """This rank's addends of one step, ``squares`` [3, parameters] float64: weights before, gradients, the update.

    Make it when the gradients are complete, call ``after_update`` when the weights have changed. In between it keeps a
    copy of the weights that this replica updates, in update precision.
    """

    def __init__(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._columns = {name: column for column, name in enumerate(names)}
        self._masters = list(optimizer.masters())
        device = optimizer.updates.device
        self.squares = torch.zeros(3, len(names), dtype=torch.float64, device=device)
        self._before = [master.clone() for _, master in self._masters]
        for bucket, master in self._masters:
            self._add(WEIGHT, bucket, master)
            self._add(GRAD, bucket, bucket.grad_shard[bucket.norm_part])

    def after_update(self) -> None:
        """Add the update's squares, and forget the copy."""
        for (bucket, master), before in zip(self._masters, self._before, strict=True):
            self._add(UPDATE, bucket, before.sub_(master))
        self._before.clear()

    def _add(self, row: int, bucket: Bucket, flat: Tensor) -> None:
        """``flat`` holds the bucket's ``norm_shard``."""
        part = bucket.norm_shard
        for slot in bucket.slots:
            lo, hi = max(slot.start, part.start), min(slot.start + slot.box.numel, part.stop)
            if lo < hi:
                column = self._columns[slot.spec.name]
                self.squares[row, column] += squared_norm(flat[lo - part.start : hi - part.start])
