"""Runs a rank's training step on meta tensors and notes, in order, what it does, and which lines do it.

The step is the trainer's own (`Training.step`, with its pipeline and its proven program); only tensors have no data and
process groups no peers, as where the planner counts. So there is no second account of a step that could be another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

import nanotron
from nanotron.ops.kernels import kernels_of
from nanotron.pipeline.engine import Pipeline
from nanotron.plan.counting import Counting
from nanotron.plan.fakes import META, FakeMesh, counting, fake_group
from nanotron.plan.measure import fake_batch
from nanotron.training.step import Training
from nanotron.training.topology import mesh_axes

if TYPE_CHECKING:
    from nanotron.config import Config

PACKAGE = os.path.dirname(nanotron.__file__) + os.sep
OURS = (PACKAGE + "explain", PACKAGE + "plan")
"""Whose lines are none of the trainer's."""
ENDS = {(Training.step.__code__.co_filename, "step"), (Pipeline.run.__code__.co_filename, "execute")}
"""(file, function) where a step, or the pipeline's part of it, begins."""
IDLE, LINES = "idle", "nanotron lines"


class Line(NamedTuple):
    """A line of the source."""

    file: str
    number: int
    function: str


class Event(NamedTuple):
    """A collective, a send, a receive, or a kernel, which tells that something is done here."""

    during: str | Line
    """The pipeline's action, as the engine names it; outside of the pipeline, the line of `Training.step`."""
    kind: str
    """Of the collective, "send", "recv" or "kernel"."""
    axis: str = ""
    """As in `Traffic`."""
    num_bytes: int = 0
    """Of the whole tensor."""
    lines: tuple[Line, ...] = ()
    """Who calls whom, innermost first."""
    forward: tuple[Line, ...] = ()
    """Within a backward: who called the forward that it is of."""


class Recorder(Counting):  # type: ignore[no-untyped-call]
    """Counts as the planner does, and keeps every communication as an event of its own."""

    def __init__(self) -> None:
        super().__init__(imagined=True)
        self.events: list[Event] = []
        self.pipeline: Pipeline | None = None
        """What says which action runs; events are kept from the moment it is there."""

    def communicated(self, kind: str, axis: str, num_bytes: int) -> None:
        """Count a collective or transfer, and note it."""
        super().communicated(kind, axis, num_bytes)
        lines, node = lines_of(sys._getframe(1)), cast(Any, torch._C._current_autograd_node())
        self._note(lines, kind, axis, num_bytes, lines, node.metadata.get(LINES, ()) if node is not None else ())

    def _count_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        before = self.work["kernels"]
        super()._count_operator(func, args, kwargs, result)
        if self.work["kernels"] > before and self.pipeline is not None:
            idle, last = self.pipeline.current_action == IDLE, self.events[-1].during if self.events else None
            if idle or self.pipeline.current_action != last:
                self._note(lines_of(sys._getframe(1)), "kernel")

    def _note(self, lines: tuple[Line, ...], *event: Any) -> None:
        if self.pipeline is not None:
            action = self.pipeline.current_action
            self.events.append(Event(lines[-1] if action == IDLE else action, *event))


def lines_of(frame: FrameType | None) -> tuple[Line, ...]:
    """Where a frame and its callers are in the trainer's code, innermost first, up to `Training.step` or the engine."""
    found: list[Line] = []
    while frame is not None and (not found or (found[-1].file, found[-1].function) not in ENDS):
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(OURS):
            found.append(Line(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)


class _Mesh(FakeMesh):
    """One whose ranks can send to those at other stages: torch looks up who is who in such a group."""

    def edge_group(self, source: int, target: int) -> ProcessGroup:
        name = f"{source} to {target}"
        group = self._fakes.get(name) or fake_group("pp", 2)
        assert group is not None, "two ranks are a group"
        self._fakes[name] = group
        ranks = (self.rank_at(pp=source), self.rank_at(pp=target))
        c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        return group

    def forget(self) -> None:
        """Take these groups out of torch's book."""
        for group in filter(None, self._fakes.values()):
            c10d._world.pg_group_ranks.pop(group, None)


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Have each backward know who called its forward; and have nobody ask for the backend, of which there is none."""
    apply, get_backend = Function.__dict__["apply"], dist.get_backend

    def noting_apply(cls: type[Function], *args: Any) -> Any:
        result = apply.__func__(cls, *args)
        for output in result if isinstance(result, tuple) else (result,):
            node: Any = output.grad_fn if isinstance(output, Tensor) else None
            if node is not None:
                node.metadata[LINES] = lines_of(sys._getframe(1))
        return result

    Function.apply = classmethod(noting_apply)  # type: ignore[assignment,method-assign]
    dist.get_backend = lambda group=None: dist.Backend("fake")
    try:
        yield
    finally:
        Function.apply, dist.get_backend = apply, get_backend  # type: ignore[method-assign]


def record(config: Config, rank: int) -> Recorder:
    """Make a rank's step."""
    recorder = Recorder()
    with counting(recorder), _stand_ins(), fake_training(config, rank) as training:
        batches = [fake_batch(config)] * config.tokens.batch_accumulation_per_replica
        recorder.work.clear()
        recorder.pipeline = training.pipeline
        training.step(1, batches)
    return recorder


@contextmanager
def fake_training(config: Config, rank: int) -> Iterator[Training]:
    """What a rank trains, without values, within `counting`: nothing compiled, in host memory or measured."""
    mesh = _Mesh(mesh_axes(config), rank)
    measured = replace(config.metrics_logging, log_level=0, straggler_interval=None)
    model, optimizer = replace(config.model, compile=False), replace(config.optimizer, offload=False)
    plain = replace(config, model=model, optimizer=optimizer, metrics_logging=measured)
    try:
        yield Training(plain, mesh, META, kernels=kernels_of("cpu"))
    finally:
        mesh.forget()
