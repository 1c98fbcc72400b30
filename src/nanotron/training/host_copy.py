"""A few numbers on their way from a device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Begins to copy a tensor to the host. Whoever reads it waits for what the device had to do so far, not for more.

    A plain read would join the end of the device's queue, and wait for the next step too once that has been queued.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._arrived = tensor.to("cpu", non_blocking=True), None
        if tensor.device.type != "cpu":
            self._arrived = torch.Event(tensor.device)
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers, all in one list."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._tensor.view(-1).tolist()
        return numbers
