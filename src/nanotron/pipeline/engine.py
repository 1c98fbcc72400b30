"""The one loop that runs any pipeline schedule; a pipeline of one rank is the same loop with nothing to send.

b rows   s tokens of a row   t tensor-parallel ranks   d hidden size
what travels between stages is [b, s, d], or [b, s/t, d] under sequence parallelism
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from nanotron.ops.chunk import Chunk
from nanotron.parallel.mesh import Mesh
from nanotron.pipeline.communication import Exchange, Program, communication
from nanotron.pipeline.schedules import Action, Schedule, forward_only
from nanotron.pipeline.simulate import prove, rendezvous
from nanotron.pipeline.timeline import Message, Span, input_of, output_of
from nanotron.pipeline.transport import Transport


class Pipeline:
    """One rank of a pipeline: its chunks, and the proven program that says when each works and with whom it talks."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        schedule: Schedule,
        mesh: Mesh,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        sequence_parallel: bool = False,
        fills_waits: bool = True,
    ) -> None:
        """``fills_waits``: compute weight gradients while waiting, not only when the program says so."""
        assert (schedule.ranks, schedule.num_chunks) == (mesh.size("pp"), len(chunks))
        self.chunks, self.schedule, self.mesh = chunks, schedule, mesh
        self.rank = mesh.coord("pp")
        self.hidden_size, self.dtype, self.device = hidden_size, dtype, torch.device(device)
        self.fills_waits = fills_waits
        self.token_shards = mesh.size("tp") if sequence_parallel else 1
        self.current_action = "idle"
        """What this rank is doing, for whoever reports a failure."""
        self.spans: list[Span] | None = None
        """Set it to a list, and every action of the following batches is noted there with its start and end."""
        self.metrics: dict[str, Tensor] = {}
        """Sums over the microbatches of what the chunks measured in the last ``run``."""
        self.clock_zero = max(time.time() - time.perf_counter() for _ in range(5))  # one pair may be torn apart
        """When this host's steady clock was 0, seconds since the epoch: spans of several hosts are drawn together."""
        self._programs: dict[tuple[int, bool], Program] = {}

    def run(self, batches: Sequence[Any], loss_scale: float | Callable[[], Tensor]) -> dict[str, Tensor]:
        """Forward and backward of all microbatches; gradients of Σ losses · loss_scale are added to the weights'.

        A ``loss_scale`` that other ranks have a say in is a function, called where the first loss is there.

        Returns the losses' sums (unscaled, detached) as far as this rank computes them.
        """
        scale = loss_scale if callable(loss_scale) else lambda: loss_scale
        for chunk in self.chunks:
            chunk.hooks.loss_scale = scale
        run = _Run(self, batches, scale)
        losses = run.execute(self._program(len(batches), forward=False))
        self.metrics = run.metrics
        return losses

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Any]) -> dict[str, Tensor]:
        """Forward of all microbatches without gradients; returns the losses' sums as far as this rank computes them."""
        return _Run(self, batches, lambda: 1.0).execute(self._program(len(batches), forward=True))

    def _program(self, microbatches: int, *, forward: bool) -> Program:
        """This rank's program, proven together with all the others' the first time it is asked for."""
        key = (microbatches, forward)
        if key not in self._programs:
            if forward:
                schedule = forward_only(self.schedule)
                programs = communication(schedule, microbatches)
                rendezvous(schedule, programs)
            else:
                programs = prove(self.schedule, microbatches)
            self._programs[key] = programs[self.rank]
        return self._programs[key]


@dataclass
class _Live:
    """A microbatch in a chunk between its forward and its backward: its input, and where its backward starts.

    The output itself is not kept: its place in the graph is enough, so its memory is free as soon as it has left,
    unless autograd needs it.
    """

    x: Tensor | None
    output: GradientEdge | None
    loss: Tensor | None


class _Run:
    """One batch on its way through the rank."""

    def __init__(self, pipeline: Pipeline, batches: Sequence[Any], loss_scale: Callable[[], float | Tensor]) -> None:
        self.pipeline, self.schedule, self.rank = pipeline, pipeline.schedule, pipeline.rank
        self.batches, self.loss_scale = batches, loss_scale
        rows, tokens = batches[0].tokens.shape
        shape = (rows, tokens // pipeline.token_shards, pipeline.hidden_size)
        self.transport = Transport(pipeline.mesh, shape, pipeline.dtype, pipeline.device)
        self.losses: dict[str, Tensor] = {}
        self.metrics: dict[str, Tensor] = {}
        self.live: dict[tuple[int, int], _Live] = {}
        self.handed: dict[Message, Tensor] = {}  # computed here: to be sent, or the input of this rank's next chunk
        self.pending: deque[tuple[Action, Callable[[], None]]] = deque()  # jobs of W not done yet, oldest first

    def execute(self, program: Program) -> dict[str, Tensor]:
        for step in program:
            if isinstance(step, Exchange):
                self.pipeline.current_action = str(step)
                self.transport.post(step, self.handed.pop)
            elif step.kind == "F":
                self._forward(step)
            elif step.kind == "W":
                self._weights(step)
            else:
                self._backward(step)
        self.pipeline.current_action = "waiting until everything sent has left"
        self.transport.finish()
        self.pipeline.current_action = "idle"
        assert not any((self.live, self.handed, self.pending)), "the program left something undone"
        return self.losses

    def _forward(self, action: Action) -> None:
        x = self._input(action)
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()  # it belongs to no graph yet: each chunk's begins at its input
        with self._timed(action):
            y, losses, metrics = self.pipeline.chunks[action.chunk](x, self.batches[action.microbatch])
            loss = torch.stack(list(losses.values())).sum() * self.loss_scale() if losses else None
        for sums, values in ((self.losses, losses), (self.metrics, metrics)):
            for name, value in values.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        message = output_of(self.schedule, self.rank, action)
        if message is not None:
            self.handed[message] = y.detach()
        if torch.is_grad_enabled():
            output = None if message is None else get_gradient_edge(y)
            self.live[action[1:]] = _Live(x, output, loss)

    def _backward(self, action: Action) -> None:
        """B, or BW when nobody waits for the input's gradient: then the weights' are computed on the way."""
        grad = self._input(action)
        live = self.live.pop(action[1:])
        starts = [(live.output, grad), (live.loss, None if live.loss is None else torch.ones_like(live.loss))]
        roots, grads = zip(*[start for start in starts if start[0] is not None], strict=True)
        weight_grads = self.pipeline.chunks[action.chunk].hooks.weight_grads
        with self._timed(action), weight_grads.deferring(action.kind == "B"):
            # what torch.autograd.backward calls once it has compared shapes, which imports sympy: 40 MB on every rank
            _engine_run_backward(roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)
        if action.kind == "B":
            self.pending.extend((action._replace(kind="W"), job) for job in weight_grads.take())
        message = output_of(self.schedule, self.rank, action)
        if message is not None:
            grad = None if live.x is None else live.x.grad
            assert grad is not None, "a chunk's output must depend on its input"
            self.handed[message] = grad

    def _weights(self, action: Action) -> None:
        while self.pending and self.pending[0][0] == action:  # some of it may have been done while waiting
            self._next_job()

    def _next_job(self) -> None:
        """One weight's gradient of the oldest W."""
        action, job = self.pending.popleft()
        with self._timed(action):
            job()

    def _input(self, action: Action) -> Tensor | None:
        """What an action needs from a neighbouring stage, waiting for it if need be.

        Waiting is spent on pending weight gradients. Replicas may so complete their gradient buckets at different
        times, but reduce them in one order, since buckets leave in line (optim/buckets.py).
        """
        message = input_of(self.schedule, self.rank, action)
        if message is None:
            return None
        if message in self.handed:
            return self.handed.pop(message)
        waiting = f"waiting for {message} before {self._describe(action)}"
        self.pipeline.current_action = waiting
        parcel = self.transport.receive(message)
        while self.pending and self.pipeline.fills_waits and self.transport.can_ask and not parcel.is_done():
            self._next_job()
            self.pipeline.current_action = waiting
        return parcel.take()

    def _describe(self, action: Action) -> str:
        stage = self.schedule.placement(self.rank, action.chunk)
        return f"{action.kind} of microbatch {action.microbatch} in stage {stage}"

    @contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        """Say which action runs now, and note when it starts and ends if somebody wants to know."""
        self.pipeline.current_action = self._describe(action)
        spans = self.pipeline.spans
        if spans is None:
            yield
            return
        start = self._now()
        yield
        stage = self.schedule.placement(self.rank, action.chunk)
        if spans and spans[-1][1:5] == (*action, stage):  # one more job of the same W
            start = spans.pop().start
        spans.append(Span(self.rank, *action, stage, start, self._now()))

    def _now(self) -> float:
        if self.pipeline.device.type != "cpu":
            torch.accelerator.synchronize(self.pipeline.device)  # only while tracing: it shows the device's time
        return self.pipeline.clock_zero + time.perf_counter()
