"""Runs one chunk's forward, backward and weight gradients, and one update, on meta tensors, and notes what they take.

b rows   s tokens of a row   t tensor-parallel ranks   d hidden size

Layers of one kind are alike, so a chunk is run with `FEW` of each kind and with one more, and every number is extended
along the line through the two: so much for each further layer of the kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from nanotron.batch import Batch
from nanotron.data.context import ContextCut
from nanotron.models.decoder import ChunkOptions, DecoderChunk
from nanotron.models.families import layer_kinds
from nanotron.models.specs import StageModules, loss_names
from nanotron.ops.fused import eager
from nanotron.ops.kernels import Kernels
from nanotron.optim.buckets import ALIGNMENT, Bucket, Buckets
from nanotron.optim.optimizer import Optimizer
from nanotron.optim.sharding import AT_ONCE
from nanotron.parallel.mesh import Mesh
from nanotron.plan.counting import Counting, Traffic, Work
from nanotron.plan.fakes import META, FakeMesh, counting, known_specs, on_accelerator
from nanotron.plan.layouts import changed
from nanotron.training.balance import ExpertBalance
from nanotron.training.build import build_buckets, build_chunks, build_optimizer, chunk_options, grad_dtype
from nanotron.training.control import ControlWord
from nanotron.training.step import begin_to_count_targets
from nanotron.training.topology import mesh_axes, tied_stages

if TYPE_CHECKING:
    from nanotron.config import Config

FEW = 2
Kind = tuple[str, "int | None"]
"""What decides a layer's cost: its kind and its window."""
Counts = TypeVar("Counts", "ChunkCounts", "StateCounts")
Measure = Callable[["Config", StageModules, Kernels], "ChunkCounts"]


@dataclass(frozen=True)
class ChunkCounts:
    """One microbatch in one chunk. Sizes in bytes; a peak counts from before the microbatch had anything here."""

    message: int
    """The activations of one microbatch between two stages."""
    forward_peak: int
    kept: int
    """From F to B: the input and what autograd saved."""
    sent: int
    """The output, as far as it is not part of ``kept``."""
    backward_peak: int
    """In B, ``kept`` and the output's gradient included."""
    stash: int
    """From B to W: what the weight gradients still need."""
    weights_peak: int
    fused_peak: int
    """In a B that computes weight gradients on its way."""
    forward: Work
    backward: Work
    weights: Work
    first: Work
    """What the first forward of a step sends besides (ZeRO-3), for it finds no block whole."""


@dataclass(frozen=True)
class StateCounts:
    """What a rank holds between steps, in bytes, and what the end of a step does."""

    parameters: int
    gradients: int
    master_weights: int
    moments: int
    other: int
    update_peak: int
    """On top of all that, while the optimizer runs."""
    update: Work
    """Count of the targets; reductions over replicas, ties and partial axes; control word, optimizer, gather."""

    @property
    def total(self) -> int:
        """Bytes between steps."""
        return self.parameters + self.gradients + self.master_weights + self.moments + self.other


class Measurements:
    """What has been measured so far: layouts that run the same chunk, or hold the same state, share it."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._chunks: dict[tuple[Any, ...], ChunkCounts] = {}
        self._states: dict[tuple[Any, ...], StateCounts] = {}
        self._divisors: dict[tuple[Any, ...], int] = {}

    def chunk(self, config: Config, modules: StageModules, *, only_bytes: bool = False) -> ChunkCounts:
        """One microbatch in a chunk; on the tp rank with the most rows of the vocabulary.

        ``only_bytes``: what moves may be that of another number of replicas.
        """
        return self._along_layers(config, modules, only_bytes)

    def least(self, config: Config, modules: StageModules) -> tuple[Work, Work, Work]:
        """The least work of a microbatch's F, B and W in a chunk: that of its ends, and that of one layer of each kind.

        Of what blocks send (ZeRO-2 and 3), the bytes of the layers' matrices that do not stay whole.
        """
        none = replace(self._middle(config), backward=Work())  # it hands its gradient on, as a copy
        counts = none
        if modules.embed or modules.head:
            counts = self._chunk(config, modules._replace(layers=()), measure_deferring)
        gathers, sums, stage = Work(), Work(), config.optimizer.zero_stage
        for kind, layers in Counter(_kinds(config, modules)).items():
            counts = extended(counts, none, self._middle(config, kind), layers)
            for axes, numel in self._matrices(config, kind).items() if leaves_each_microbatch(config) else ():
                dtype: torch.dtype = getattr(torch, config.model.dtype)
                absent = max(0, layers - AT_ONCE) if stage == 3 else 0
                gathers[Traffic("all_gather", axes, "bytes")] += absent * numel * dtype.itemsize
                sums[Traffic("reduce_scatter", axes, "bytes")] += layers * numel * grad_dtype(config, dtype).itemsize
        routers = len(set(modules.layers).intersection(config.model.model_config.sparse_layers))
        added = Work({"kernels": 2 * routers, "moved": 24 * routers})  # a chunk adds up all routers' losses at once
        return counts.forward - added + gathers, counts.backward - added + gathers, counts.weights + sums

    def _matrices(self, config: Config, kind: Kind) -> dict[str, int]:
        """Numbers in a layer's matrices on one rank, by the axes that they are sharded over."""
        layer = layer_kinds(config.model.model_config).index(kind)
        mesh, found = FakeMesh(mesh_axes(config), config.parallelism.tp - 1), Counter[str]()
        for name, spec in known_specs(config).items():
            if name.startswith(f"layers.{layer}.") and len(spec.shape) > 1:
                shards, _ = mesh.shards_and_copies(spec.reduce_axes(mesh))
                found["+".join(shards)] += spec.local_box(mesh).numel if shards else 0
        return found

    def kept_by_layers(self, config: Config, modules: StageModules) -> int:
        """The least bytes that a chunk's layers keep of a microbatch from F to B, each one's input among them."""
        none = self._middle(config)
        shared = none.kept if config.parallelism.recompute_offload else none.kept - none.message
        kinds = Counter(_kinds(config, modules)).items()
        return sum(layers * (self._middle(config, kind).kept - shared) for kind, layers in kinds)

    def _middle(self, config: Config, *kinds: Kind) -> ChunkCounts:
        """A chunk without the model's ends, of one layer of each of these kinds."""
        layers = [layer_kinds(config.model.model_config).index(kind) for kind in kinds]
        return self._chunk(config, StageModules(layers, embed=False, head=False), measure_deferring)

    def _along_layers(self, config: Config, modules: StageModules, only_bytes: bool) -> ChunkCounts:
        """The chunk's numbers, measured with ``FEW`` layers of a kind and with one more."""
        counts = Counter(_kinds(config, modules))
        few = Counter({kind: min(count, FEW) for kind, count in counts.items()})

        def measured(layers: Counter[Kind]) -> ChunkCounts:
            return self._chunk(config, _last(config, modules, layers), measure_chunk, only_bytes)

        low = found = measured(few)
        for kind, more in (counts - few).items():
            found = extended(found, low, measured(few + Counter([kind])), more)
        return found

    def state(
        self, config: Config, rank: int, stages: Sequence[StageModules], *, every_layer: bool = False
    ) -> StateCounts:
        """What a rank holds, and its update; along lines through few layers, or with every layer built."""
        if every_layer:
            return self._state(config, rank, stages)
        counts = [Counter(_kinds(config, modules)) for modules in stages]
        few = [Counter(dict.fromkeys(count, 1)) for count in counts]

        def measure(layers: Sequence[Counter[Kind]]) -> StateCounts:
            chunks = [_last(config, modules, count) for modules, count in zip(stages, layers, strict=True)]
            return self._state(config, rank, chunks)

        low = found = measure(few)
        for kind, more in (_sum(counts) - _sum(few)).items():
            most = max(counts, key=lambda count: count[kind])
            one_more = [layers + Counter([kind] * (count is most)) for layers, count in zip(few, counts, strict=True)]
            found = extended(found, low, measure(one_more), more)
        return found

    def _chunk(self, config: Config, held: StageModules, measure: Measure, only_bytes: bool = False) -> ChunkCounts:
        layout, tokens = config.parallelism, config.tokens
        key: tuple[Any, ...] = (
            measure,
            (repr(config.model), _kinds(config, held), held[1:], config.optimizer.accumulate_grad_in_fp32),
            (layout.tp, layout.tp_mode, layout.tp_recompute_allgather),
            (tokens.micro_batch_size, tokens.sequence_length, layout.context_parallel_size),
        )
        if held.layers:
            key += layout.recompute_layer, layout.recompute_offload, layout.expert_parallel_size, layout.cp_mode
        if key not in self._chunks:
            self._chunks[key] = measure(config, held, self._kernels)
        if measure is not measure_chunk or not leaves_each_microbatch(config):
            return self._chunks[key]
        shards = layout.dp_shard or layout.dp  # their copies meet at a step's end only
        padded = None if only_bytes and self._divides_evenly(config) else (layout.dp, shards)
        shared = (*key, config.optimizer.zero_stage, shards > 1, layout.dp > shards, padded)
        if shared not in self._chunks:
            self._chunks[shared] = measure_shared_chunk(config, held, self._kernels, self._chunks[key])
        return self._chunks[shared]

    def _divides_evenly(self, config: Config) -> bool:
        """Whether replicas share every matrix without padding: then a chunk has as many bytes alive for any number."""
        layout = config.parallelism
        key = repr(config.model), layout.tp, layout.expert_parallel_size
        if key not in self._divisors:
            mesh = FakeMesh({"ep": layout.expert_parallel_size, "tp": layout.tp}, layout.tp - 1)
            specs = [spec for spec in known_specs(config).values() if len(spec.shape) > 1]
            self._divisors[key] = gcd(*(spec.local_box(mesh).numel for spec in specs))
        return self._divisors[key] % (ALIGNMENT * layout.dp * layout.context_parallel_size) == 0

    def _state(self, config: Config, rank: int, held: Sequence[StageModules]) -> StateCounts:
        layout = config.parallelism
        key = (
            (repr(config.model), tuple((_kinds(config, modules), modules[1:]) for modules in held)),
            (repr(config.optimizer), config.tokens.sequence_length),
            (
                layout.dp,
                layout.dp_shard,
                layout.expert_parallel_size,
                layout.context_parallel_size,
                layout.tp,
                layout.tp_mode,
                bool(tied_stages(config)),
                config.model.ddp_bucket_cap_mb,
            ),
        )
        if key not in self._states:
            counts = measure_state(config, rank, held)
            if config.optimizer.offload and self._kernels == "accelerator":  # in host memory
                counts = replace(counts, master_weights=0, moments=0)
            self._states[key] = counts
        return self._states[key]


def _kinds(config: Config, modules: StageModules) -> tuple[Kind, ...]:
    """The kinds of a chunk's layers, in their order."""
    kinds = layer_kinds(config.model.model_config)
    return tuple(kinds[layer] for layer in modules.layers)


def _last(config: Config, modules: StageModules, counts: Counter[Kind]) -> StageModules:
    """The chunk with so many of its layers of each kind: its last ones, for backward begins where most is kept."""
    kinds = _kinds(config, modules)
    by_kind = {
        kind: [layer for layer, its in zip(modules.layers, kinds, strict=True) if its == kind] for kind in counts
    }
    return modules._replace(layers=sorted(layer for kind, count in counts.items() for layer in by_kind[kind][-count:]))


def _sum(counts: Sequence[Counter[Kind]]) -> Counter[Kind]:
    return sum(counts, Counter[Kind]())


def extended(found: Counts, few: Counts, one_more: Counts, layers: int) -> Counts:
    """``found`` and what ``layers`` further ones add: each the difference between ``few`` and ``one_more``."""
    values: dict[str, Any] = {}
    for field in fields(found):
        start, low, high = (getattr(counts, field.name) for counts in (found, few, one_more))
        if isinstance(low, dict):
            keys = start | low | high
            values[field.name] = Work({key: start[key] + layers * (high[key] - low[key]) for key in keys})
        else:
            values[field.name] = start + layers * (high - low)
    return type(found)(**values)


def measure_chunk(config: Config, held: StageModules, kernels: Kernels) -> ChunkCounts:
    """Run F, B and W, then F and a B that includes W, of one microbatch in one chunk."""
    apart, at_once = _measure(config, held, kernels, (True, False))
    return replace(apart, fused_peak=at_once.backward_peak)


def measure_deferring(config: Config, held: StageModules, kernels: Kernels) -> ChunkCounts:
    """Run F, B and W only, which is all of the work; ``fused_peak`` is B's."""
    (apart,) = _measure(config, held, kernels, (True,))
    return apart


def _measure(config: Config, held: StageModules, kernels: Kernels, defer: Sequence[bool]) -> list[ChunkCounts]:
    """One microbatch in one chunk, again and again."""
    axes, ep = mesh_axes(config), config.parallelism.expert_parallel_size
    with counting() as counter:
        mesh = FakeMesh({"ep": ep, "cp": axes["cp"], "tp": axes["tp"]}, config.parallelism.tp - 1)
        (chunk,) = build_chunks(config, mesh, [held], _options(config, kernels))
        # Buckets leave once in a step, not in every microbatch: no replicas here.
        alone = FakeMesh({"ep": ep, "tp": axes["tp"]}, mesh.coord("tp"))
        buckets = build_buckets(config, alone, [chunk])
        batch, rest = fake_batch(config), counter.alive
        return [_run(counter, config, chunk, buckets, batch, defer=wanted, rest=rest) for wanted in defer]


def leaves_each_microbatch(config: Config) -> bool:
    """Whether gradients, and at stage 3 weights, are whole by block only: then every microbatch sends them."""
    return config.optimizer.zero_stage >= 2 and config.parallelism.sharing_ranks > 1


def measure_shared_chunk(config: Config, held: StageModules, kernels: Kernels, alone: ChunkCounts) -> ChunkCounts:
    """The same of a chunk whose matrices ranks share (ZeRO-2 and 3): what is sent, and peaks with whole blocks in them.

    ``alone``: of a chunk that has all to itself, for what a microbatch leaves behind is the same. The second microbatch
    counts: the first of a step finds no block whole.
    """
    with counting() as counter:
        mesh = FakeMesh(mesh_axes(config), config.parallelism.tp - 1)
        (chunk,) = build_chunks(config, mesh, [held], _options(config, kernels))
        buckets = build_buckets(config, mesh, [chunk])
        batch, rest = fake_batch(config), counter.alive
        first, apart, at_once = (
            _run(counter, config, chunk, buckets, batch, defer=defer, rest=rest) for defer in (True, True, False)
        )
    peaks = {name: getattr(apart, name) for name in ("forward_peak", "backward_peak", "weights_peak")}
    works = {name: getattr(apart, name) for name in ("forward", "backward", "weights")}
    more = Work({key: count for key, count in (first.forward - apart.forward).items() if isinstance(key, Traffic)})
    return replace(alone, **peaks, **works, fused_peak=at_once.backward_peak, first=more)


def _options(config: Config, kernels: Kernels) -> ChunkOptions:
    """As the run's, with these kernels; what torch.compile makes of meta tensors is not counted, but for fp8."""
    options = replace(chunk_options(config, META), kernels=kernels, fuse=eager)
    if kernels != "accelerator":
        return options
    fuse = partial(on_accelerator, compiled=config.model.compile is not False)
    return replace(options, fuse=fuse, fp8=options.fp8 and "scaled_mm")


def _run(
    counter: Counting, config: Config, chunk: DecoderChunk, buckets: Buckets, batch: Batch, *, defer: bool, rest: int
) -> ChunkCounts:
    """One microbatch through a chunk, holding and dropping tensors where the pipeline's engine does.

    Unless weight gradients are put off (``defer``), B computes them on its way, and W does nothing. ``rest``: bytes
    that are alive when no microbatch is under way and no block whole.
    """
    buckets.start(1, _length(config))
    message = _message(config)
    message_bytes = message.numel() * message.element_size()
    x = None if chunk.embed is not None else message.requires_grad_()
    del message
    with counter.section() as forward:
        y, losses, _ = chunk(x, batch)
        loss = torch.stack(list(losses.values())).sum() if losses else None
        output = None if chunk.head is not None else get_gradient_edge(y)
        handed = None if chunk.head is not None else y.detach()
    forward_peak, held = counter.peak - rest, 0
    del y, losses
    held = counter.alive - rest
    del handed
    kept = counter.alive - rest
    _assert_no_scores(counter, config)
    grad = None if output is None else _message(config)
    starts = [(root, start) for root, start in ((output, grad), (loss, None)) if root is not None]
    with counter.section() as backward, chunk.hooks.weight_grads.deferring(defer):
        torch.autograd.backward(*zip(*starts, strict=True))  # type: ignore[arg-type]
    backward_peak = counter.peak - rest
    del x, output, loss, grad, starts
    stash, jobs = counter.alive - rest, chunk.hooks.weight_grads.take()
    with counter.section() as weights:
        while jobs:
            jobs.pop(0)()
    return ChunkCounts(
        message=message_bytes,
        forward_peak=forward_peak,
        kept=kept,
        sent=held - kept,
        backward_peak=backward_peak,
        stash=stash,
        weights_peak=counter.peak - rest,
        fused_peak=backward_peak,
        forward=forward,
        backward=backward,
        weights=weights,
        first=Work(),
    )


def _assert_no_scores(counter: Counting, config: Config) -> None:
    """Nothing of size s × s per head may be kept for backward: memory must grow with s, not with its square."""
    rows, s = config.tokens.micro_batch_size, _length(config)
    if s == config.model.model_config.head_dim:
        return  # then every head's vectors have that shape
    for shape in counter.shapes_alive():
        assert shape[-2:] != (s, s) or shape[:-2] in ((), (rows,)), f"a tensor of shape {shape} is kept for backward"


def _message(config: Config) -> Tensor:
    """Activations between stages: [b, s, d], or [b, s/t, d] under sequence parallelism; s is of this rank's tokens."""
    layout = config.parallelism
    s = _length(config) // (layout.tp if layout.sequence_parallel else 1)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    shape = config.tokens.micro_batch_size, s, config.model.model_config.hidden_size
    return torch.empty(shape, dtype=dtype, device=META)


def _length(config: Config) -> int:
    """Tokens of each row that a rank holds."""
    return config.tokens.sequence_length // config.parallelism.context_parallel_size


def fake_batch(config: Config) -> Batch:
    """A microbatch of whole documents; context-parallel ranks have equal work, so it is the first one's."""
    layout, rows = config.parallelism, config.tokens.micro_batch_size
    mesh = Mesh({"cp": layout.context_parallel_size})
    _, spans = ContextCut(mesh, layout.cp_mode).of((rows, config.tokens.sequence_length), None)
    tokens, labels, positions = (torch.zeros(rows, _length(config), dtype=torch.int64, device=META) for _ in range(3))
    return Batch(tokens, labels, positions, spans)


def measure_state(config: Config, rank: int, held: Sequence[StageModules]) -> StateCounts:
    """Build a rank's chunks, buckets and optimizer, and run the end of a step; as if nothing were kept on the host."""
    config = changed(config, {"optimizer.offload": False})
    with counting() as counter:
        mesh = FakeMesh(mesh_axes(config), rank)
        chunks = build_chunks(config, mesh, held, chunk_options(config, META))
        buckets = build_buckets(config, mesh, chunks)
        optimizer, balance = build_optimizer(config, buckets, mesh), ExpertBalance(config, mesh, chunks)
        parameters, gradients = (sum(map(_nbytes, kept)) for kept in zip(*map(_kept, buckets.all), strict=True))
        state = Counter[str]()
        for entry in optimizer.state():
            state[entry.kind] += _nbytes(entry.tensor)
        before = counter.alive
        with counter.section() as leaving:
            _contribute(config, chunks, buckets)
        with counter.section() as update:
            _update(config, mesh, chunks, buckets, optimizer, balance)
        update_peak = counter.peak - before
        if not leaves_each_microbatch(config):  # else it is counted with every microbatch
            update += leaving
    return StateCounts(
        parameters=parameters,
        gradients=gradients,
        master_weights=state["master"],
        moments=sum(state.values()) - state["master"],
        other=before - parameters - gradients - sum(state.values()),
        update_peak=update_peak,
        update=update,
    )


def _contribute(config: Config, chunks: Sequence[DecoderChunk], buckets: Buckets) -> None:
    """Say that all gradients of a microbatch have come: buckets leave that are complete."""
    length = _length(config)
    buckets.start(1, length)
    for chunk in reversed(chunks):
        for use in reversed(chunk.uses(length)):
            for name in use.names * use.contributions:
                chunk.hooks.weight_grads.add_now(chunk.weights[name], lambda buffer, first: None)


def _update(
    config: Config,
    mesh: FakeMesh,
    chunks: Sequence[DecoderChunk],
    buckets: Buckets,
    optimizer: Optimizer,
    balance: ExpertBalance,
) -> None:
    """What `Training.step` does besides forward and backward, the last of which has begun to reduce its gradients."""
    num_targets = begin_to_count_targets([fake_batch(config)], mesh)()
    buckets.finish()
    names, vectors = loss_names(config.model.model_config), balance.vectors({})
    word = ControlWord(buckets.squared_norm(), {}, names, vectors, save=False, stop=False)
    word.reduce(mesh, num_targets)
    optimizer.step(1e-3, word.grad_scale(config.optimizer.clip_grad), word.found_inf())
    balance.move_biases(word)
    buckets.start_gather()
    buckets.wait_gather()


def _kept(bucket: Bucket) -> tuple[Tensor, Tensor]:
    """The weights and gradients that a bucket keeps: all, or its shard."""
    weights = bucket.weight_shard if bucket.weights is None else bucket.weights
    return weights, bucket.grad_shard if bucket.grads is None else bucket.grads


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
