"""Moves activations and gradients between the ranks of one pipeline, in the order that its program prescribes.

From one rank to another all travels in one process group, in the order in which it is computed, and back in another,
so that neither direction waits for the other. Nothing but the tensor itself is sent: all shapes are known beforehand.
Neither sending nor receiving stops the rank; it waits where it needs a tensor (`Parcel.take`).
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from nanotron.parallel.mesh import Mesh
from nanotron.pipeline.communication import Exchange, Transfer
from nanotron.pipeline.timeline import Message

if TYPE_CHECKING:
    from torch.distributed import Work


class Parcel:
    """One tensor under way: the receiver may ask whether it is here; the sender lets go of it once it has left."""

    def __init__(self, tensor: Tensor, work: Work | None, *, sent: bool) -> None:
        self._tensor: Tensor | None = tensor
        self._work = work
        self._sent = sent
        self._done: Event | None = None  # set by the thread that watches it, if one does
        self._error: Exception | None = None

    def is_done(self) -> bool:
        """Whether the transfer is over."""
        if self._done is not None:
            return self._done.is_set()
        return self._work is None or self._work.is_completed()

    def take(self) -> Tensor:
        """The received tensor, after waiting for it; on a GPU the stream waits, not the host."""
        self.finish()
        assert self._tensor is not None, "what was sent is gone"
        return self._tensor

    def finish(self) -> None:
        """Wait until the transfer is over; raises what went wrong with it."""
        if self._done is not None:
            self._done.wait()
        elif self._work is not None:
            self._work.wait()
        if self._error is not None:
            raise self._error

    def watch_in(self, queue: SimpleQueue[Parcel | None]) -> None:
        """Leave the waiting to a thread that serves this queue."""
        self._done = Event()
        queue.put(self)

    def watch(self) -> None:
        """Wait in such a thread."""
        assert self._done is not None
        assert self._work is not None
        try:
            self._work.wait()
        except Exception as error:
            self._error = error
        self._work = None  # it holds the tensor too
        if self._sent:
            self._tensor = None
        self._done.set()


class Transport:
    """The transfers of one batch; `finish` ends it.

    gloo cannot say whether a transfer is over without waiting for it, so there a thread per lane (peer, sent or
    received) waits instead: transfers of one lane finish in order.
    """

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._mesh, self._shape, self._dtype, self._device = mesh, shape, dtype, device
        self.can_ask = mesh.size("pp") > 1 and dist.get_backend() == "gloo"
        """Whether the host can do something else until a tensor arrives (with a GPU it does not wait at all)."""
        self._lanes: dict[tuple[int, bool], tuple[Thread, SimpleQueue[Parcel | None]]] = {}
        self._arriving: dict[Message, Parcel] = {}
        self._leaving: list[Parcel] = []

    def post(self, exchange: Exchange, outgoing: Callable[[Message], Tensor]) -> None:
        """Start the transfers of an exchange; `outgoing` gives the tensor of a message that is sent."""
        for transfer in exchange.transfers:  # on both ends in this order
            self._post(transfer, exchange.peer, outgoing)
        for parcel in [parcel for parcel in self._leaving if parcel.is_done()]:
            parcel.finish()  # raises what went wrong
            self._leaving.remove(parcel)

    def receive(self, message: Message) -> Parcel:
        """The parcel of a message whose receive has been posted."""
        return self._arriving.pop(message)

    def finish(self) -> None:
        """Wait until everything sent has left, and end the threads."""
        for parcel in self._leaving:
            parcel.finish()
        for thread, queue in self._lanes.values():
            queue.put(None)
            thread.join()
        self._leaving, self._lanes = [], {}

    def _post(self, transfer: Transfer, peer: int, outgoing: Callable[[Message], Tensor]) -> None:
        leaves = transfer.target == peer
        tensor = outgoing(transfer.message).contiguous() if leaves else self._buffer()
        assert (tensor.shape, tensor.dtype) == (self._shape, self._dtype), "every message has one shape and dtype"
        start = dist.isend if leaves else dist.irecv
        group = self._mesh.edge_group(transfer.source, transfer.target)
        parcel = Parcel(tensor, start(tensor, self._mesh.rank_at(pp=peer), group=group), sent=leaves)
        if self.can_ask:
            parcel.watch_in(self._lane(peer, leaves))
        if leaves:
            self._leaving.append(parcel)
        else:
            self._arriving[transfer.message] = parcel

    def _buffer(self) -> Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def _lane(self, peer: int, sent: bool) -> SimpleQueue[Parcel | None]:
        key = (peer, sent)
        if key not in self._lanes:
            queue: SimpleQueue[Parcel | None] = SimpleQueue()
            thread = Thread(target=_serve, args=(queue,), daemon=True, name=f"pipeline transfers {key}")
            thread.start()
            self._lanes[key] = (thread, queue)
        return self._lanes[key][1]


def _serve(queue: SimpleQueue[Parcel | None]) -> None:
    while (parcel := queue.get()) is not None:
        parcel.watch()
        del parcel  # or its tensor would live until the next one comes
