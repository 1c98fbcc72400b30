"""What a step does: its collectives, the memory that its operators ask for, the functions that it calls."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import nanotron
from nanotron.parallel import gloo
from nanotron.plan.counting import Counting

KINDS = {  # operator -> (our word, which argument is the group)
    "allreduce_": ("all_reduce", 1),
    "_allgather_base_": ("all_gather", 2),
    "_reduce_scatter_base_": ("reduce_scatter", 2),
    "alltoall_base_": ("all_to_all", 2),
    "send": ("send", 1),
}


class Collective(NamedTuple):
    """A kind of collective, or "send", and the world ranks of the group that it runs in."""

    kind: str
    ranks: tuple[int, ...]


class Collectives(TorchDispatchMode):
    """Counts the calls and the bytes of every collective. Bytes are those of the whole tensor: what an all-gather ends
    with, what a reduce-scatter begins with; the sends that they are made of over gloo are not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[Collective] = Counter()
        self.bytes: Counter[Collective] = Counter()
        self._patches = ExitStack()

    def __enter__(self) -> Collectives:
        for kind, work in (("all_gather", gloo.AllGather), ("reduce_scatter", gloo.ReduceScatter)):
            self._patches.enter_context(mock.patch.object(work, "__init__", self._counting(kind, work.__init__)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)  # type: ignore[no-untyped-call]
        self._patches.close()

    def _counting(self, kind: str, begin: Any) -> Any:
        def counted(work: gloo.Transfers, one: Tensor, other: Tensor, group: dist.ProcessGroup) -> None:
            self._count(kind, group, max(_bytes(one), _bytes(other)))
            with _disable_current_modes():
                begin(work, one, other, group)

        return counted

    def _count(self, kind: str, group: dist.ProcessGroup, size: int) -> None:
        collective = Collective(kind, tuple(dist.get_process_group_ranks(group)))
        self.calls[collective] += 1
        self.bytes[collective] += size

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False keeps torch from importing its compiler when the mode is entered."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname != "recv_":
            kind, position = KINDS[func._opname]
            self._count(kind, dist.ProcessGroup.unbox(args[position]), max(map(_bytes, _tensors(args))))
        return func(*args, **(kwargs or {}))


def _tensors(args: Any) -> list[Tensor]:
    """The tensors among an operator's arguments, in lists too."""
    if isinstance(args, Tensor):
        return [args]
    return [tensor for arg in args for tensor in _tensors(arg)] if isinstance(args, (list, tuple)) else []


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class OwnWork(Counting):
    """Counts what a rank does by itself; what it sends, over gloo piece by piece, is counted by `Collectives`."""

    def _count_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        pass


class Allocations(OwnWork):
    """Counts the bytes of all storages that operators make, also of those that are gone soon."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def _holds(self, tensor: Tensor) -> bool:
        is_new = super()._holds(tensor)
        self.bytes += is_new * tensor.untyped_storage().nbytes()
        return is_new


OURS = str(Path(nanotron.__file__).parent)
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}  # functions of their own before Python 3.12


class Calls:
    """Counts the calls of functions in this thread: of ours, of C's by ours, and of all others that are Python's.

    A generator is called whenever it goes on.
    """

    def __init__(self) -> None:
        self.ours = self.by_ours = self.others = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *why: Any) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, called: Any) -> None:
        is_ours = frame.f_code.co_filename.startswith(OURS)
        if event == "call" and frame.f_code.co_name not in COMPREHENSIONS:
            self.ours += is_ours
            self.others += not is_ours
        elif event == "c_call":
            self.by_ours += is_ours
