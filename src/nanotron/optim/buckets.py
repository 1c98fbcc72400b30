"""Flat buckets: where weights and gradients lie in memory, and when gradients leave for the other replicas.

A bucket is one flat tensor of weights and one of gradients; every parameter is a view of the first and accumulates into
a view of the second. It is reduced over the data axes with one collective, and, with ZeRO-1, each replica then owns
1/n of it:

        layers.0                          layers.1                    norms
        q │ kv │ out │ gate_up │ down ░   q │ kv │ …             ░    attn_norm │ mlp_norm │ … ░    ░ padding to n
        └ replica 0 ┴ replica 1 ──────┘   └ replica 0 ┴ replica 1┘    └ replica 0 ┴ replica 1 ─┘

Parameters share a bucket when everything about their key is equal (``GroupKey``), and a bucket does not cross a
block unless both are small. Reductions are sums, always in this order: over the stages that tie a parameter, over the
axes where each rank has only a part of the gradient, over the data axes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from nanotron.ops.chunk import Chunk
from nanotron.ops.weight_grads import WeightGrads
from nanotron.parallel.comm import all_reduce_, start_all_gather, start_all_reduce, start_reduce_scatter
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import Box, ParamSpec, flat_range_boxes

_NORM_ROW = 1024  # elements


class GroupKey(NamedTuple):
    """What must be equal for two parameters to share a bucket."""

    chunk: int
    dtype: torch.dtype
    reduce_axes: tuple[str, ...]
    partial_axes: tuple[str, ...]
    copy_axes: tuple[str, ...]
    """Ranks that hold copies must group them alike: sums of other replicas' gradients then have equal bits."""
    counted: bool
    """This rank's copy is the one that norms count and checkpoints keep."""
    decay: bool
    lr_scale: float
    tied: bool


class Slot(NamedTuple):
    """One parameter's place in a bucket: elements [start, start + numel) of the flat tensors."""

    spec: ParamSpec
    box: Box
    start: int
    weight: nn.Parameter


@dataclass(eq=False)
class Bucket:
    """Parameters of one key, flat. ``shard`` is the range that this replica updates."""

    key: GroupKey
    slots: list[Slot]
    weights: Tensor
    grads: Tensor
    shard: slice
    norm_shard: slice
    """The range whose squared norm this replica contributes: 1/n of the bucket at every ZeRO stage."""
    replicas: int
    """Ranks that hold the same parameters for different tokens: gradients are summed over them."""
    replica: int
    """Which of them this rank is, from 0."""
    gradient_group: ProcessGroup | None
    weight_group: ProcessGroup | None
    missing: int = 0
    """How many contributions must still come before the gradients are complete."""
    works: list[Work] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for the collectives in flight on this bucket."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def boxes(self, flat: Tensor, part: slice) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
        """``flat``, which holds the bucket's range ``part``, as boxes of global tensors: (spec, box, view)."""
        for slot in self.slots:
            lo, hi = max(slot.start, part.start), min(slot.start + slot.box.numel, part.stop)
            position = lo - part.start
            for box in flat_range_boxes(slot.box.shape, lo - slot.start, hi - slot.start) if lo < hi else ():
                offset = tuple(outer + inner for outer, inner in zip(slot.box.offset, box.offset, strict=True))
                yield slot.spec, Box(offset, box.shape), flat[position : position + box.numel].view(box.shape)
                position += box.numel


class Buckets:
    """All buckets of one rank, in the order in which their reductions start; every peer has the same order."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        mesh: Mesh,
        *,
        grad_dtype: Callable[[torch.dtype], torch.dtype],
        zero_stage: int,
        tied_stages: dict[str, tuple[int, ...]],
        cap_bytes: int,
    ) -> None:
        """``tied_stages``: global name -> the pipeline coordinates that hold a copy, for names on several of them."""
        self._mesh, self._zero_stage, self._tied_stages = mesh, zero_stage, tied_stages
        self._chunks = chunks
        self._by_weight: dict[Tensor, Bucket] = {}
        self.all: list[Bucket] = []
        for key, names in self._split(chunks, cap_bytes):
            self.all.append(self._build(key, chunks[key.chunk], names, grad_dtype(key.dtype)))
        self.all.reverse()  # backward meets the last layers first
        for index, chunk in enumerate(chunks):
            self._attach(chunk, index)
        in_forward = [self._by_weight[weight] for chunk in chunks for weight in _learning(chunk).values()]
        self._by_first_use = list(dict.fromkeys(in_forward))
        self._next = 0

    # ------------------------------------------------------------------ building

    def _split(self, chunks: Sequence[Chunk], cap_bytes: int) -> Iterator[tuple[GroupKey, list[str]]]:
        """Group the chunks' parameters into buckets: equal key, whole blocks, up to ``cap_bytes``."""
        placed: set[Tensor] = set()
        for index, chunk in enumerate(chunks):
            open_buckets: dict[GroupKey, list[str]] = {}
            for key, names, new_bytes in self._blocks(index, chunk, placed):
                held = open_buckets.setdefault(key, [])
                if held and sum(_bytes(chunk.weights[name]) for name in held) + new_bytes > cap_bytes:
                    yield key, held
                    open_buckets[key] = held = []
                held += names
            yield from open_buckets.items()

    def _blocks(self, index: int, chunk: Chunk, placed: set[Tensor]) -> Iterator[tuple[GroupKey, list[str], int]]:
        """(key, names, bytes) of the parameters of each block that are treated alike."""
        blocks: dict[tuple[str, GroupKey], list[str]] = {}
        for name, weight in _learning(chunk).items():
            if weight not in placed:  # a tied weight that an earlier chunk of this rank has already placed
                placed.add(weight)
                blocks.setdefault((_block(name), self._treatment(index, chunk.specs[name], weight)), []).append(name)
        for (_, key), names in blocks.items():
            yield key, names, sum(_bytes(chunk.weights[name]) for name in names)

    def _treatment(self, chunk: int, spec: ParamSpec, weight: Tensor) -> GroupKey:
        stages = self._tied_stages.get(spec.name, ())
        first_holder = not stages or self._mesh.coord("pp") == min(stages)
        return GroupKey(
            chunk=chunk,
            dtype=weight.dtype,
            reduce_axes=spec.reduce_axes(self._mesh),
            partial_axes=spec.partial_axes(self._mesh),
            copy_axes=spec.copy_axes(self._mesh),
            counted=spec.is_owner(self._mesh) and first_holder,
            decay=spec.decay,
            lr_scale=spec.lr_scale,
            tied=bool(stages),
        )

    def _build(self, key: GroupKey, chunk: Chunk, names: list[str], grad_dtype: torch.dtype) -> Bucket:
        slots, start = [], 0
        for name in names:
            box = chunk.specs[name].local_box(self._mesh)
            slots.append(Slot(chunk.specs[name], box, start, chunk.weights[name]))
            start += box.numel
        peers = self._mesh.ranks_along(*key.reduce_axes)
        replicas, replica = len(peers), peers.index(self._mesh.rank)
        length = -(-start // replicas)  # of a shard, the last ones padded
        weights = torch.zeros(length * replicas, dtype=key.dtype, device=slots[0].weight.device)
        grads = torch.zeros_like(weights, dtype=grad_dtype)
        share = slice(replica * length, (replica + 1) * length)
        bucket = Bucket(
            key=key,
            slots=slots,
            weights=weights,
            grads=grads,
            shard=share if self._zero_stage else slice(0, len(weights)),
            norm_shard=share,
            replicas=replicas,
            replica=replica,
            gradient_group=self._mesh.group(*key.reduce_axes, purpose="gradients"),
            weight_group=self._mesh.group(*key.reduce_axes, purpose="weights"),
        )
        for slot in slots:
            place = slice(slot.start, slot.start + slot.box.numel)
            weights[place].copy_(slot.weight.detach().view(-1))
            slot.weight.data = weights[place].view(slot.box.shape)
            self._by_weight[slot.weight] = bucket
        return bucket

    def _attach(self, chunk: Chunk, index: int) -> None:
        """Have every parameter of the chunk accumulate into its place in the flat gradients, and be whole when used."""
        weight_grads = chunk.hooks.weight_grads
        used_by: dict[str, list[Bucket]] = {}  # block -> where its weights lie

        def before_block(block: str) -> None:
            for bucket in used_by[block]:
                bucket.wait()

        chunk.hooks.before_block = before_block
        for name, weight in _learning(chunk).items():
            bucket = self._by_weight[weight]
            slot = next(slot for slot in bucket.slots if slot.weight is weight)
            grads = bucket.grads[slot.start : slot.start + slot.box.numel].view(slot.box.shape)
            weight_grads.bind(weight, grads, self._ready)
            used_by.setdefault(_block(name), []).append(bucket)
            if bucket.key.chunk == index:  # once, also for a tied weight that two chunks share
                take = _take_autograd_grad(weakref.proxy(weight_grads))  # cycles through a tensor's hook are for ever
                weight.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ each step

    def start(self, microbatches: int, sequence_length: int) -> None:
        """Begin a step of this many microbatches with zero gradients."""
        self._next = 0
        for bucket in self.all:
            bucket.grads.zero_()
            bucket.missing = 0
        for chunk in self._chunks:
            for name, weight in _learning(chunk).items():
                self._by_weight[weight].missing += microbatches * chunk.uses(name, sequence_length)

    def _ready(self, weight: Tensor) -> None:
        """Count one contribution; start the reduction of every bucket that is complete and next in line."""
        self._by_weight[weight].missing -= 1
        while self._next < len(self.all) and self.all[self._next].missing == 0:
            bucket = self.all[self._next]
            if not (bucket.key.tied or bucket.key.partial_axes):  # those wait for other stages, or axes
                self._start_reduction(bucket)
            self._next += 1

    def finish(self) -> None:
        """Complete all reductions: then each replica's ``shard`` of every bucket holds the global gradient sum."""
        for bucket in self.all:
            assert bucket.missing == 0, f"{bucket.slots[0].spec.name}…: {bucket.missing} gradients never came"
        late = [bucket for bucket in self.all if bucket.key.tied or bucket.key.partial_axes]
        for bucket in late:
            if bucket.key.tied:
                stages = self._tied_stages[bucket.slots[0].spec.name]
                all_reduce_(bucket.grads, self._mesh.tied_group(stages))
            for axis in bucket.key.partial_axes:
                all_reduce_(bucket.grads, self._mesh.group(axis, purpose="gradients"))
            self._start_reduction(bucket)
        for bucket in self.all:
            bucket.wait()

    def _start_reduction(self, bucket: Bucket) -> None:
        if self._zero_stage:
            work = start_reduce_scatter(bucket.grads[bucket.shard], bucket.grads, bucket.gradient_group)
        else:
            work = start_all_reduce(bucket.grads, bucket.gradient_group)
        if work is not None:
            bucket.works.append(work)

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared global gradient norm, a float64 number; sum it over the world."""
        total = torch.zeros((), dtype=torch.float64, device=self.all[0].grads.device)
        for bucket in self.all:
            if bucket.key.counted:
                total += squared_norm(bucket.grads[bucket.norm_shard])
        return total

    def start_gather(self) -> None:
        """Begin to send each replica's updated shard of the weights to the others (ZeRO), first used first.

        A chunk's forward waits for each block's when it comes to it.
        """
        for bucket in self._by_first_use:
            if self._zero_stage:
                work = start_all_gather(bucket.weights, bucket.weights[bucket.shard], bucket.weight_group)
                bucket.works += [work] if work is not None else []

    def wait_gather(self) -> None:
        """Wait until every weight is whole again; call it before anything but a forward reads them."""
        for bucket in self.all:
            bucket.wait()


def _take_autograd_grad(weight_grads: WeightGrads) -> Callable[[Tensor], None]:
    """A hook for weights whose gradient autograd computes (norms): move it into the flat buffer."""

    def take(weight: Tensor) -> None:
        if weight.grad is None:  # autograd passes by weights whose layer has accumulated their gradient itself
            return
        grad, weight.grad = weight.grad, None
        weight_grads.add_now(weight, partial(_add, grad=grad))

    return take


def _add(buffer: Tensor, grad: Tensor) -> None:
    buffer += grad


def squared_norm(flat: Tensor) -> Tensor:
    """Σ g² in float64. Short rows in float32 first: one float32 sum of a whole bucket is wrong in the fifth digit."""
    precision = torch.promote_types(flat.dtype, torch.float32)
    whole = len(flat) // _NORM_ROW * _NORM_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _NORM_ROW), dim=1, dtype=precision)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=precision)
    return torch.cat([rows, rest[None]]).double().square().sum()


def _learning(chunk: Chunk) -> dict[str, nn.Parameter]:
    """The chunk's weights that have a gradient."""
    return {name: weight for name, weight in chunk.weights.items() if weight.requires_grad}


def _block(name: str) -> str:
    """The block a parameter belongs to: ``layers.3``, or its own name outside the layers."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else name


def _bytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()
