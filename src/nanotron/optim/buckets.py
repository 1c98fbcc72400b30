"""Flat buckets: where weights and gradients lie in memory, and when gradients leave for the other replicas.

A bucket is one flat tensor of weights and one of gradients; every parameter is a view of the first and accumulates into
a view of the second. It is reduced over the data axes with one collective, and, with ZeRO-1, each replica then owns
1/n of it:

        layers.0                          layers.1                    norms
        q │ kv │ out │ gate_up │ down ░   q │ kv │ …             ░    attn_norm │ mlp_norm │ … ░    ░ padding to n
        └ replica 0 ┴ replica 1 ──────┘   └ replica 0 ┴ replica 1┘    └ replica 0 ┴ replica 1 ─┘

Parameters and shards begin at multiples of 128 bytes, as kernels and networks like it; what is between is always 0.

Parameters share a bucket when everything about their key is equal (``GroupKey``), and a bucket does not cross a
block unless both are small. Reductions are sums, always in this order: over the data axes, over the axes where each
rank has only a part of the gradient, over the stages that tie a parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from nanotron.ops.chunk import Chunk
from nanotron.ops.weight_grads import WeightGrads, add
from nanotron.optim.sharding import Block, Line, WholeGrads, WholeWeights
from nanotron.parallel.comm import all_reduce_, start_all_gather, start_all_reduce, start_reduce_scatter
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import Box, ParamSpec, flat_range_boxes

_NORM_ROW = 1024  # elements
ALIGNMENT = 128  # bytes


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
    optimizer: str
    weight_decay: float
    lr_scale: float
    tied: bool
    block: str = ""
    """The block whose matrices, sharded each by itself (ZeRO-2 and 3), these are."""


class Slot(NamedTuple):
    """One parameter's place in a bucket: elements [start, start + numel) of the flat tensors."""

    spec: ParamSpec
    box: Box
    start: int
    weight: nn.Parameter

    def of(self, flat: Tensor) -> Tensor:
        """The parameter's part of a flat tensor that holds its bucket."""
        return flat[self.start : self.start + self.box.numel].view(self.box.shape)


@dataclass(eq=False)
class Bucket:
    """Parameters of one key, flat; ``numel`` elements, padding included."""

    key: GroupKey
    slots: list[Slot]
    numel: int
    weights: Tensor | None
    """All of them; None where each rank keeps its shard (ZeRO-3)."""
    grads: Tensor | None
    """All of them; None where each rank keeps its shard (ZeRO-2 and 3)."""
    weight_shard: Tensor
    grad_shard: Tensor
    shard: slice
    """The range that this rank updates."""
    norm_shard: slice
    """The range whose squared norm this replica contributes: 1/n of the bucket at every ZeRO stage."""
    replicas: int
    """Ranks that hold the same parameters for different tokens: gradients are summed over them."""
    replica: int
    """Which of them this rank is, from 0."""
    writes: bool
    """Of the ranks that have the same shard, this is the one whose a checkpoint keeps."""
    gradient_group: ProcessGroup | None
    """The ranks that have the shards, for gradients."""
    weight_group: ProcessGroup | None
    """The same, for weights."""
    copies: tuple[str, ...]
    """The axes whose ranks have the same shard for different tokens."""
    copies_group: ProcessGroup | None
    """These ranks."""
    missing: int = 0
    """How many contributions must still come before the gradients are complete."""
    works: list[Work] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for the collectives in flight on this bucket."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def clear(self, grads: Tensor, summed: Container[Tensor]) -> None:
        """Zero what no gradient was written to: what lies between the weights, and weights that are not in ``summed``.

        ``grads`` holds the whole bucket.
        """
        end = 0
        for slot in self.slots:
            if slot.weight in summed:
                if end < slot.start:
                    grads[end : slot.start].zero_()
                end = slot.start + slot.box.numel
        if end < self.numel:
            grads[end:].zero_()

    @property
    def norm_part(self) -> slice:
        """``norm_shard`` within the shard."""
        return slice(self.norm_shard.start - self.shard.start, self.norm_shard.stop - self.shard.start)

    def boxes(self, flat: Tensor, part: slice, only: Slot | None = None) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
        """``flat``, which holds the bucket's range ``part``, as boxes of global tensors: (spec, box, view).

        ``only``: of this slot.
        """
        for slot in [only] if only else self.slots:
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
        self._summed = set[Tensor]()  # weights whose place in the gradients has had one
        self.all: list[Bucket] = []
        for key, names in self._split(chunks, cap_bytes):
            self.all.append(self._build(key, chunks[key.chunk], names, grad_dtype(key.dtype)))
        self.all.reverse()  # backward meets the last layers first
        self._whole_grads, self._whole_weights = self._sharded()
        for index, chunk in enumerate(chunks):
            self._attach(chunk, index)
        in_forward = [self._by_weight[weight] for chunk in chunks for weight in _learning(chunk).values()]
        self._by_first_use = [bucket for bucket in dict.fromkeys(in_forward) if bucket.weights is not None]
        self._with_grads = [bucket for bucket in self.all if bucket.grads is not None]
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
        for use in chunk.uses(1):
            for name in use.names:
                weight = chunk.weights[name]
                if weight not in placed:  # a tied weight that another block, or an earlier chunk, has already placed
                    placed.add(weight)
                    key = self._treatment(index, use.block, chunk.specs[name], weight)
                    blocks.setdefault((use.block, key), []).append(name)
        for (_, key), names in blocks.items():
            yield key, names, sum(_bytes(chunk.weights[name]) for name in names)

    def _treatment(self, chunk: int, block: str, spec: ParamSpec, weight: Tensor) -> GroupKey:
        stages = self._tied_stages.get(spec.name, ())
        first_holder = not stages or self._mesh.coord("pp") == min(stages)
        axes = spec.reduce_axes(self._mesh)
        shards, _ = self._mesh.shards_and_copies(axes)
        matrix = len(spec.shape) > 1 and not spec.name.endswith(".bias")
        shared = len(self._mesh.ranks_along(*shards)) > 1 and not stages  # two stages have parts of a tied gradient
        sharded = self._zero_stage >= 2 and matrix and shared
        return GroupKey(
            chunk=chunk,
            dtype=weight.dtype,
            reduce_axes=axes,
            partial_axes=spec.partial_axes(self._mesh),
            copy_axes=spec.copy_axes(self._mesh),
            counted=spec.is_owner(self._mesh) and first_holder,
            optimizer=spec.optimizer,
            weight_decay=spec.weight_decay if spec.decay else 0.0,
            lr_scale=spec.lr_scale,
            tied=bool(stages),
            block=block if sharded else "",
        )

    def _build(self, key: GroupKey, chunk: Chunk, names: list[str], grad_dtype: torch.dtype) -> Bucket:
        slots, start, step = [], 0, ALIGNMENT // min(key.dtype.itemsize, grad_dtype.itemsize)
        for name in names:
            box = chunk.specs[name].local_box(self._mesh)
            slots.append(Slot(chunk.specs[name], box, start, chunk.weights[name]))
            start += _rounded_up(box.numel, step)
        axes, copies = (key.reduce_axes, ()) if self._zero_stage else ((), key.reduce_axes)
        if key.block:
            axes, copies = self._mesh.shards_and_copies(key.reduce_axes)
        shards, owners = self._mesh.ranks_along(*axes), self._mesh.ranks_along(*copies)
        replicas, shard, copy = len(shards) * len(owners), shards.index(self._mesh.rank), owners.index(self._mesh.rank)
        length = _rounded_up(-(-start // replicas), step)  # of what a replica counts, the last ones padded
        held = length * len(owners)
        like = slots[0].weight.new_zeros(())  # of a device
        whole_weights, whole_grads = not (key.block and self._zero_stage == 3), not key.block
        weights = like.new_zeros(length * replicas if whole_weights else held)
        grads = like.new_zeros(length * replicas if whole_grads else held, dtype=grad_dtype)
        mine, first = slice(shard * held, (shard + 1) * held), shard * held + copy * length
        bucket = Bucket(
            key=key,
            slots=slots,
            numel=length * replicas,
            weights=weights if whole_weights else None,
            grads=grads if whole_grads else None,
            weight_shard=weights[mine] if whole_weights else weights,
            grad_shard=grads[mine] if whole_grads else grads,
            shard=mine,
            norm_shard=slice(first, first + length),
            replicas=replicas,
            replica=shard * len(owners) + copy,
            writes=key.counted and copy == 0,
            gradient_group=self._mesh.group(*axes, purpose="gradients"),
            weight_group=self._mesh.group(*axes, purpose="weights"),
            copies=copies,
            copies_group=self._mesh.group(*copies, purpose="gradients"),
        )
        for slot in slots:
            self._by_weight[slot.weight] = bucket
            if whole_weights:
                slot.of(weights).copy_(slot.weight.detach())
                slot.weight.data = slot.of(weights)
            else:
                for _, box, part in bucket.boxes(bucket.weight_shard, mine, slot):
                    part.copy_(slot.weight.detach()[box.slices(within=slot.box)])
        return bucket

    def _sharded(self) -> tuple[WholeGrads | None, WholeWeights | None]:
        """Who gives blocks whole gradients and weights, where ranks keep shards of them."""
        blocks: dict[str, Block] = {}
        for bucket in self.all:
            if bucket.key.block:
                blocks.setdefault(bucket.key.block, Block()).buckets.append(bucket)
        self._block_of = {bucket: block for block in blocks.values() for bucket in block.buckets}
        if not blocks:
            return None, None
        lines = [Line(chunk, self._blocks_of(chunk, _learning(chunk))) for chunk in self._chunks]
        everything = list(blocks.values())
        return WholeGrads(everything, lines, self._summed), WholeWeights(everything) if self._zero_stage == 3 else None

    def _blocks_of(self, chunk: Chunk, names: Iterable[str]) -> dict[str, Block]:
        """Those of the weights of these names that are sharded by block."""
        buckets = {name: self._by_weight[chunk.weights[name]] for name in names}
        return {name: self._block_of[bucket] for name, bucket in buckets.items() if bucket in self._block_of}

    def _attach(self, chunk: Chunk, index: int) -> None:
        """Have every parameter of the chunk accumulate into its place in the flat gradients, and be whole when used."""
        grads, uses = chunk.hooks.weight_grads, chunk.uses(1)
        used_by = {use.block: {self._by_weight[chunk.weights[name]] for name in use.names} for use in uses}

        def before_block(block: str) -> None:
            for bucket in used_by[block]:
                bucket.wait()
            if self._whole_grads and block == uses[-1].block:
                self._whole_grads.settle()

        chunk.hooks.before_block = before_block
        if self._whole_weights:
            self._gather_around(chunk, self._whole_weights)
        for weight in _learning(chunk).values():
            bucket = self._by_weight[weight]
            slot = next(slot for slot in bucket.slots if slot.weight is weight)
            self._bind(grads, weight, slot, bucket, index)
            if bucket.key.chunk == index:  # once, also for a tied weight that two chunks share
                take = _take_autograd_grad(weakref.proxy(grads))  # cycles through a tensor's hook are for ever
                weight.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def _bind(self, weight_grads: WeightGrads, weight: Tensor, slot: Slot, bucket: Bucket, chunk: int) -> None:
        if bucket.grads is not None:
            view = slot.of(bucket.grads)
            weight_grads.bind(weight, lambda: view, partial(self._ready, bucket), partial(self._is_first, weight))
            return
        whole, block = self._whole_grads, self._block_of[bucket]
        assert whole is not None
        weight_grads.bind(
            weight,
            lambda: slot.of(dict(block.parts(whole.of(block)))[bucket]),
            partial(whole.contributed, chunk, block),
            partial(self._is_first, weight),
        )

    def _gather_around(self, chunk: Chunk, whole: WholeWeights) -> None:
        """Have each block's weights whole while it computes, forward and backward, and the next one's on their way."""
        wait, uses = chunk.hooks.before_block, chunk.uses(1)
        found = [(use.block, block) for use in uses for block in self._blocks_of(chunk, use.names).values()]
        blocks, rereads = dict(found), {use.block for use in uses if use.rereads}
        forward = dict(zip(blocks, [*list(blocks)[1:], None], strict=True))
        backward = {after: block if block in rereads else None for block, after in forward.items()}

        def use(name: str, following: str | None) -> None:
            whole.use(blocks[name], blocks[following] if following else None)

        def before_block(name: str) -> None:
            wait(name)
            if name in blocks:
                use(name, forward[name])

        def after_block(name: str, *outputs: Tensor) -> None:
            for output in outputs if name in blocks else ():
                if output.requires_grad:
                    output.register_hook(lambda grad: use(name, backward.get(name)))  # type: ignore[no-untyped-call]

        chunk.hooks.before_block, chunk.hooks.after_block = before_block, after_block

    # ------------------------------------------------------------------ each step

    def start(self, microbatches: int, sequence_length: int) -> None:
        """Begin a step of this many microbatches without gradients: the first of each weight's writes over the last."""
        self._next = 0
        self._summed.clear()
        for bucket in self.all:
            bucket.missing = 0
        if self._whole_grads:
            self._whole_grads.start(microbatches, sequence_length)
        for chunk in self._chunks:
            for use in chunk.uses(sequence_length):
                for name in use.names:
                    self._by_weight[chunk.weights[name]].missing += microbatches * use.contributions

    def _is_first(self, weight: Tensor) -> bool:
        """Whether a weight's gradient is the first in its place; the next one is not."""
        first = weight not in self._summed
        self._summed.add(weight)
        return first

    def _ready(self, bucket: Bucket) -> None:
        """Count one contribution; start the reduction of every bucket that is complete and next in line."""
        bucket.missing -= 1
        if not self._whole_grads:  # else blocks leave meanwhile, from the same ranks: one order needs one line
            self._start_complete()

    def _start_complete(self) -> None:
        while self._next < len(self._with_grads) and self._with_grads[self._next].missing == 0:
            self._start_reduction(self._with_grads[self._next])
            self._next += 1

    def finish(self) -> None:
        """Complete all reductions: then ``grad_shard`` of every bucket holds its part of the global gradient sum."""
        if self._whole_grads:
            self._whole_grads.finish()
            self._start_complete()
        for bucket in self._with_grads:
            assert bucket.missing == 0, f"{bucket.slots[0].spec.name}…: {bucket.missing} gradients never came"
        for bucket in self.all:
            bucket.wait()
            if self._zero_stage:
                all_reduce_(bucket.grad_shard, bucket.copies_group)
            for axis in bucket.key.partial_axes:
                all_reduce_(bucket.grad_shard, self._mesh.group(axis, purpose="gradients"))
            if bucket.key.tied:
                all_reduce_(bucket.grad_shard, self._mesh.tied_group(self._tied_stages[bucket.slots[0].spec.name]))

    def _start_reduction(self, bucket: Bucket) -> None:
        assert bucket.grads is not None
        bucket.clear(bucket.grads, self._summed)
        if self._zero_stage:
            work = start_reduce_scatter(bucket.grad_shard, bucket.grads, bucket.gradient_group)
        else:
            work = start_all_reduce(bucket.grads, bucket.copies_group)
        if work is not None:
            bucket.works.append(work)

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared global gradient norm, a float64 number; sum it over the world."""
        total = torch.zeros((), dtype=torch.float64, device=self.all[0].grad_shard.device)
        for bucket in self.all:
            if bucket.key.counted:
                total += squared_norm(bucket.grad_shard[bucket.norm_part])
        return total

    def start_gather(self) -> None:
        """Begin to send each replica's updated shard of the weights to the others (ZeRO), first used first.

        A chunk's forward waits for each block's when it comes to it; those that are whole only then are gathered then.
        """
        if self._whole_weights:
            self._whole_weights.forget()
        for bucket in self._by_first_use if self._zero_stage else ():
            assert bucket.weights is not None
            work = start_all_gather(bucket.weights, bucket.weight_shard, bucket.weight_group)
            bucket.works += [work] if work is not None else []

    def wait_gather(self) -> None:
        """Wait until every weight is whole that stays so; call it before anything but a forward reads them."""
        for bucket in self.all:
            bucket.wait()

    def weights(self) -> Iterator[tuple[ParamSpec, Box, Tensor, bool]]:
        """All weights that this rank keeps, as (spec, box, view, whether a checkpoint keeps this rank's)."""
        self.wait_gather()
        for bucket in self.all:
            if bucket.weights is None:
                for spec, box, view in bucket.boxes(bucket.weight_shard, bucket.shard):
                    yield spec, box, view, bucket.writes
        slots = [(bucket, slot) for bucket in self.all if bucket.weights is not None for slot in bucket.slots]
        for index, (bucket, slot) in enumerate(slots):
            mine = index % bucket.replicas == bucket.replica  # replicas share the writing
            yield slot.spec, slot.box, slot.weight.data, bucket.key.counted and mine


def _take_autograd_grad(weight_grads: WeightGrads) -> Callable[[Tensor], None]:
    """A hook for weights whose gradient autograd computes (norms): move it into the flat buffer."""

    def take(weight: Tensor) -> None:
        if weight.grad is None:  # autograd passes by weights whose layer has accumulated their gradient itself
            return
        grad, weight.grad = weight.grad, None
        weight_grads.add_now(weight, lambda buffer, first: add(buffer, grad, first))

    return take


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


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _bytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()
