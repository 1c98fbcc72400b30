"""Counts what code does while it runs on meta tensors: bytes alive, operations, collectives.

The code is the trainer's own and really runs; only its tensors have no data. Whatever the planner says about memory
and traffic was seen here, so there are no formulas that could drift away from the code.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
}
_MATMULS = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": 2,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
}
"""Matmuls of [s, e] by [e, s] size that each kernel makes: the backward computes the scores again."""


class Traffic(NamedTuple):
    """A key of `Work`: calls and bytes of one kind of collective along one axis."""

    kind: str
    axis: str
    """Of the mesh, or several as "edp+ep"; or "tied", the stages that hold a tied weight; or "world", all ranks."""
    what: str
    """"calls", or "bytes" of the whole tensor: what an all-gather ends with, what a reduce-scatter begins with."""


Work = Counter["str | Traffic"]
"""What code did: "matmul", "fp8" (matmuls too) and "attention" in FLOPs, "moved" in bytes read and written by all other
kernels, "kernels" launched, and `Traffic`."""


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count everything that runs inside, forward or backward.

    ``alive`` bytes are those of the storages that somebody still holds; a view costs nothing.
    """

    def __init__(self, *, imagined: bool = False) -> None:
        """``imagined``: take tensors on "meta" to have memory."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.imagined = imagined
        self.alive = self.peak = 0
        self.work: Work = Counter()
        self._storages: dict[int, tuple[int, tuple[int, ...], weakref.ref[UntypedStorage] | None]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is nothing to skip, and to import it takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._count_collective(func, args)
        elif func.namespace in ("aten", "mkldnn"):
            self._count_operator(func, args, kwargs or {}, result)
        return result

    @contextmanager
    def section(self) -> Iterator[Work]:
        """Yield a count of its own for what runs inside; ``peak`` starts anew from what is alive."""
        outer, self.work = self.work, Counter()
        self.peak = self.alive
        try:
            yield self.work
        finally:
            self.work = outer

    def add(self, work: Work, peak: int) -> None:
        """Count what has been counted apart, and as many bytes as there were at its worst moment."""
        self.work.update(work)
        self.peak = max(self.peak, peak)

    @contextmanager
    def times(self, count: int) -> Iterator[None]:
        """Count what runs inside as if it ran ``count`` times, one after the other."""
        outer, self.work = self.work, Counter()
        try:
            yield
        finally:
            outer.update({key: count * number for key, number in self.work.items()})
            self.work = outer

    def overlook(self, tensor: Tensor) -> None:
        """Take a tensor that somebody holds all the time, and its views, to have no memory."""
        self._storages[tensor.untyped_storage()._cdata] = (0, (), None)

    def shapes_alive(self) -> Iterable[tuple[int, ...]]:
        """The shape with which each living storage was made."""
        return [shape for _, shape, _ in self._storages.values()]

    def _count_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._opname
        tensors = tensors_in(args)
        groups = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject)]
        axis = ProcessGroup.unbox(groups[0]).group_name
        self.communicated(COLLECTIVES[name], axis, max(_bytes(tensor) for tensor in tensors))

    def communicated(self, kind: str, axis: str, num_bytes: int) -> None:
        """Count one collective or transfer."""
        self.work[Traffic(kind, axis, "calls")] += 1
        self.work[Traffic(kind, axis, "bytes")] += num_bytes

    def _count_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        outputs = tensors_in(result)
        fresh = [self._holds(tensor) for tensor in outputs]
        if not (any(fresh) or func._schema.is_mutable) or func._opname.startswith(("empty", "new_empty")):
            return  # a view, or memory without values: no kernel runs
        self.work["kernels"] += 1
        inputs = tensors_in(args)
        name = func._opname
        if name in _MATMULS:
            a, b = inputs[-2:]
            self.work["matmul"] += 2 * a.numel() * b.shape[-1]
        elif name == "_grouped_mm":  # the rows of all experts; what follows them is where each one's end
            self.work["matmul"] += 2 * inputs[0].numel() * inputs[1].shape[-1]
        elif name == "_scaled_mm_v2":
            self.work["fp8"] += 2 * inputs[0].numel() * inputs[1].shape[-1]
        elif name == "_linear_pointwise":  # x · wᵀ
            x, w = inputs[:2]
            self.work["matmul"] += 2 * x.numel() * w.shape[0]
        elif name in _ATTENTION:
            query, key = inputs[:2] if name.endswith("cpu") else inputs[1:3]
            masked = "attn_mask" in kwargs or any(arg is True for arg in args)  # the one flag: is_causal
            # keys of the first query and of the last: ·2, halved
            seen = 2 * key.shape[-2] - (query.shape[-2] if masked else 0)
            self.work["attention"] += _ATTENTION[name] * query.numel() * seen
        else:
            self.work["moved"] += sum(map(_bytes, inputs)) + sum(map(_bytes, outputs))

    def _holds(self, tensor: Tensor) -> bool:
        """Note a storage that was not alive before; tell whether it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return False
        nbytes = storage.nbytes() if self.imagined or not tensor.is_meta else 0
        self._storages[key] = (nbytes, tuple(tensor.shape), weakref.KeyedRef(storage, self._frees, key))
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)
        return True

    def _frees(self, storage: weakref.KeyedRef[int, UntypedStorage]) -> None:
        self.alive -= self._storages.pop(storage.key)[0]


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors of an operator's arguments, or results."""
    if isinstance(x, Tensor):
        return [x]
    return [tensor for part in x for tensor in tensors_in(part)] if isinstance(x, list | tuple) else []


def _bytes(tensor: Tensor) -> int:
    """Bytes that a kernel must read: a broadcast tensor only has those of its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
