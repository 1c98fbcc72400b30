"""Runs one chunk's forward, backward and weight gradients, and one update, on fake tensors, and notes what they take.

b rows   s tokens of a row   t tensor-parallel ranks   d hidden size

Layers are alike, so a chunk is run with `FEW` of them and with one more, and every number is extended along the line
through the two: so much for each further layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from nanotron.batch import Batch
from nanotron.models.decoder import Llama
from nanotron.models.specs import loss_names
from nanotron.optim.buckets import Buckets
from nanotron.optim.optimizer import Optimizer
from nanotron.plan.counting import Counting, Work
from nanotron.plan.fakes import FakeMesh, counting
from nanotron.training.control import ControlWord
from nanotron.training.step import (
    Held,
    begin_to_count_targets,
    build_buckets,
    build_chunks,
    build_optimizer,
)
from nanotron.training.topology import mesh_axes, tied_stages

if TYPE_CHECKING:
    from nanotron.config import Config

FEW = 2
Counts = TypeVar("Counts", "ChunkCounts", "StateCounts")


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

    def __init__(self, *, accelerator: bool) -> None:
        self.accelerator = accelerator
        self._chunks: dict[tuple[Any, ...], ChunkCounts] = {}
        self._states: dict[tuple[Any, ...], StateCounts] = {}

    def chunk(self, config: Config, *, layers: int, embed: bool, head: bool) -> ChunkCounts:
        """One microbatch in a chunk of this many layers; on the tp rank with the most rows of the vocabulary."""
        few = min(layers, FEW)
        low = self._chunk(config, Held((0, few), embed, head))
        return (
            low if layers == few else extended(low, self._chunk(config, Held((0, few + 1), embed, head)), layers - few)
        )

    def state(self, config: Config, rank: int, held: Sequence[Held], *, every_layer: bool = False) -> StateCounts:
        """What a rank holds, and its update; along the line through few layers, or with every layer built."""
        if every_layer:
            whole, first = [], 0  # layers are named from 0 on: ranks that hold as many share the measurement
            for (lo, hi), embed, head in held:
                whole.append(Held((first, first + hi - lo), embed, head))
                first += hi - lo
            return self._state(config, rank, whole)
        more = sum(hi - lo for (lo, hi), _, _ in held) - len(held)
        few = [part._replace(layers=(index, index + 1)) for index, part in enumerate(held)]
        low = self._state(config, rank, few)
        few[-1] = few[-1]._replace(layers=(len(few) - 1, len(few) + 1))
        return low if more == 0 else extended(low, self._state(config, rank, few), more)

    def _chunk(self, config: Config, held: Held) -> ChunkCounts:
        layout, tokens = config.parallelism, config.tokens
        key = (
            (repr(config.model), held, config.optimizer.accumulate_grad_in_fp32),
            (layout.tp, layout.tp_mode, layout.recompute_layer, layout.tp_recompute_allgather),
            (tokens.micro_batch_size, tokens.sequence_length),
        )
        if key not in self._chunks:
            self._chunks[key] = measure_chunk(config, held, accelerator=self.accelerator)
        return self._chunks[key]

    def _state(self, config: Config, rank: int, held: Sequence[Held]) -> StateCounts:
        layout = config.parallelism
        key = (
            (repr(config.model), tuple(held), repr(config.optimizer), config.tokens.sequence_length),
            (layout.dp, layout.tp, layout.tp_mode, bool(tied_stages(config)), config.model.ddp_bucket_cap_mb),
        )
        if key not in self._states:
            self._states[key] = measure_state(config, rank, held, accelerator=self.accelerator)
        return self._states[key]


def extended(few: Counts, one_more: Counts, layers: int) -> Counts:
    """The counts for ``layers`` more layers than ``few`` has, of which ``one_more`` has one."""
    values: dict[str, Any] = {}
    for field in fields(few):
        low, high = getattr(few, field.name), getattr(one_more, field.name)
        if isinstance(low, dict):
            values[field.name] = Work({key: low[key] + layers * (high[key] - low[key]) for key in low | high})
        else:
            values[field.name] = low + layers * (high - low)
    return type(few)(**values)


def measure_chunk(config: Config, held: Held, *, accelerator: bool) -> ChunkCounts:
    """Run F, B and W, then F and a B that includes W, of one microbatch in one chunk."""
    tp = mesh_axes(config)["tp"]
    with counting(accelerator=accelerator) as counter:
        mesh = FakeMesh({"tp": tp}, config.parallelism.tp - 1)
        (chunk,) = build_chunks(config, mesh, [held], "cpu")
        buckets = build_buckets(config, mesh, [chunk])
        batch = _batch(config)
        apart = _run(counter, config, chunk, buckets, batch, defer=True)
        at_once = _run(counter, config, chunk, buckets, batch, defer=False)
    return ChunkCounts(
        message=apart.message,
        forward_peak=apart.forward_peak,
        kept=apart.kept,
        sent=apart.sent,
        backward_peak=apart.backward_peak,
        stash=apart.stash,
        weights_peak=apart.weights_peak,
        fused_peak=at_once.backward_peak,
        forward=apart.forward,
        backward=apart.backward,
        weights=apart.weights,
    )


class _Pass(NamedTuple):
    message: int
    forward_peak: int
    kept: int
    sent: int
    backward_peak: int
    stash: int
    weights_peak: int
    forward: Work
    backward: Work
    weights: Work


def _run(counter: Counting, config: Config, chunk: Llama, buckets: Buckets, batch: Batch, *, defer: bool) -> _Pass:
    """One microbatch through a chunk, holding and dropping tensors where the pipeline's engine does."""
    buckets.start(1, config.tokens.sequence_length)
    before = counter.alive
    message = _message(config)
    message_bytes = message.numel() * message.element_size()
    x = None if chunk.embed is not None else message.requires_grad_()
    del message
    with counter.section() as forward:
        y, losses, _ = chunk(x, batch)
        loss = torch.stack(list(losses.values())).sum() if losses else None
        output = None if losses else get_gradient_edge(y)
        handed = None if losses else y.detach()
    forward_peak, held = counter.peak - before, 0
    del y, losses
    held = counter.alive - before
    del handed
    kept = counter.alive - before
    _assert_no_scores(counter, config)
    grad = None if output is None else _message(config)
    chunk.weight_grads.defer = defer
    with counter.section() as backward:
        root = loss if output is None else output
        assert root is not None
        torch.autograd.backward((root,), (grad,))  # type: ignore[arg-type]
    chunk.weight_grads.defer = False
    backward_peak = counter.peak - before
    del x, output, loss, root, grad
    stash, jobs = counter.alive - before, chunk.weight_grads.take()
    with counter.section() as weights:
        while jobs:
            jobs.pop(0)()
    return _Pass(
        message_bytes, forward_peak, kept, held - kept, backward_peak, stash, counter.peak - before,
        forward, backward, weights,
    )  # fmt: skip


def _assert_no_scores(counter: Counting, config: Config) -> None:
    """Nothing of size s × s per head may be kept for backward: memory must grow with s, not with its square."""
    rows, s = config.tokens.micro_batch_size, config.tokens.sequence_length
    if s == config.model.model_config.head_dim:
        return  # then every head's vectors have that shape
    for shape in counter.shapes_alive():
        assert shape[-2:] != (s, s) or shape[:-2] in ((), (rows,)), f"a tensor of shape {shape} is kept for backward"


def _message(config: Config) -> Tensor:
    """Activations between stages: [b, s, d], or [b, s/t, d] under sequence parallelism."""
    tokens, layout = config.tokens, config.parallelism
    s = tokens.sequence_length // (layout.tp if layout.sequence_parallel else 1)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return torch.empty(tokens.micro_batch_size, s, config.model.model_config.hidden_size, dtype=dtype)


def _batch(config: Config) -> Batch:
    shape = (config.tokens.micro_batch_size, config.tokens.sequence_length)
    return Batch(*(torch.zeros(shape, dtype=torch.int64) for _ in range(3)))


def measure_state(config: Config, rank: int, held: Sequence[Held], *, accelerator: bool) -> StateCounts:
    """Build a rank's chunks, buckets and optimizer, and run the end of a step."""
    with counting(accelerator=accelerator) as counter:
        mesh = FakeMesh(mesh_axes(config), rank)
        chunks = build_chunks(config, mesh, held, "cpu")
        buckets = build_buckets(config, mesh, chunks)
        optimizer = build_optimizer(config, buckets)
        parameters = sum(_nbytes(bucket.weights) for bucket in buckets.all)
        gradients = sum(_nbytes(bucket.grads) for bucket in buckets.all)
        state = {"master": 0, "exp_avg": 0, "exp_avg_sq": 0}
        for entry in optimizer.state():
            state[entry.kind] += _nbytes(entry.tensor)
        before = counter.alive
        with counter.section() as update:
            _update(config, mesh, chunks, buckets, optimizer)
        update_peak = counter.peak - before
    return StateCounts(
        parameters=parameters,
        gradients=gradients,
        master_weights=state["master"],
        moments=state["exp_avg"] + state["exp_avg_sq"],
        other=before - parameters - gradients - sum(state.values()),
        update_peak=update_peak,
        update=update,
    )


def _update(config: Config, mesh: FakeMesh, chunks: Sequence[Llama], buckets: Buckets, optimizer: Optimizer) -> None:
    """What `Training.step` does besides forward and backward."""
    length = config.tokens.sequence_length
    num_targets = begin_to_count_targets([_batch(config)], mesh)()
    buckets.start(1, length)
    for chunk in reversed(chunks):
        for name, weight in reversed(chunk.weights.items()):
            for _ in range(chunk.uses(name, length)):
                chunk.weight_grads.ready(weight)
    buckets.finish()
    word = ControlWord(buckets.squared_norm(), {}, loss_names(config.model.model_config), save=False, stop=False)
    word.reduce(mesh, num_targets)
    optimizer.step(1e-3, word.grad_scale(config.optimizer.clip_grad), word.found_inf())
    buckets.start_gather()
    buckets.wait_gather()


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
