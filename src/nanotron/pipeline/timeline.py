"""When every action of a schedule happens: the clockwork under simulate.py, and what pictures are drawn from.

A `Timeline` is a list of spans, predicted here or measured by the engine (trace.py): both are drawn by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nanotron.errors import ConfigError
from nanotron.pipeline.schedules import Action, Schedule

StageCost = Callable[[str, int], float]  # (kind F, B or W, stage) -> time


class Span(NamedTuple):
    """One action of one rank, from start to end."""

    rank: int
    kind: str
    microbatch: int
    chunk: int
    stage: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Everything that the ranks of one pipeline did for one batch; the time unit is that of its costs."""

    name: str
    ranks: int
    spans: list[Span]

    @property
    def start(self) -> float:
        """When the first action starts."""
        return min(span.start for span in self.spans)

    @property
    def duration(self) -> float:
        """Time from the first start to the last end."""
        return max(span.end for span in self.spans) - self.start

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which no action runs."""
        busy = sum(span.end - span.start for span in self.spans)
        return 1 - busy / (self.ranks * self.duration)

    def of_rank(self, rank: int) -> list[Span]:
        """One row of the picture, in order of time."""
        return sorted((span for span in self.spans if span.rank == rank), key=lambda span: (span.start, span.end))


class Message(NamedTuple):
    """A stage's input for one microbatch: its activation (F) or the gradient of its output (B)."""

    kind: str
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{'activation' if self.kind == 'F' else 'gradient'} {self.microbatch} for stage {self.stage}"


def input_of(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """What an action must receive before it starts; None at both ends of the model, and for W."""
    stage = schedule.placement(rank, action.chunk)
    if (action.kind == "F" and stage > 0) or (action.kind in ("B", "BW") and stage < schedule.num_stages - 1):
        return Message(action.kind[0], action.microbatch, stage)
    return None


def output_of(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """What an action produces, as the neighbouring stage's input; None at both ends of the model, and for W."""
    stage = schedule.placement(rank, action.chunk)
    if action.kind == "F" and stage < schedule.num_stages - 1:
        return Message("F", action.microbatch, stage + 1)
    if action.kind in ("B", "BW") and stage > 0:
        return Message("B", action.microbatch, stage - 1)
    return None


def unit_costs(kind: str, stage: int) -> float:
    """Every F, B and W takes one unit of time, as in the papers' drawings."""
    return 1.0


def execute(
    schedule: Schedule,
    microbatches: int,
    cost: StageCost = unit_costs,
    *,
    transfer: float = 0.0,
    eager_weights: bool = False,
) -> Timeline:
    """Run every rank's actions in order, each as soon as its input has arrived, and note when.

    A transfer between ranks takes `transfer`, occupies neither rank, and leaves as soon as its sender has computed it.
    With `eager_weights` a rank that waits spends the time on its oldest pending W, as the engine does over gloo.
    Raises ConfigError, naming rank, stage and action, when a rank waits for something that is never computed.
    """
    clockwork = _Clockwork(schedule, microbatches, cost, transfer, eager_weights)
    clockwork.run()
    return Timeline(schedule.name, schedule.ranks, clockwork.spans)


@dataclass
class _Row:
    """One rank while it executes: its list, its place in it, its clock, and what is left of the W it has not done."""

    rank: int
    actions: Sequence[Action]
    position: int = 0
    clock: float = 0.0
    pending: dict[Action, float] = field(default_factory=dict)  # W whose B is done, oldest first -> time left


class _Clockwork:
    """Lets any rank whose next input has been computed go on, until none can."""

    def __init__(
        self, schedule: Schedule, microbatches: int, cost: StageCost, transfer: float, eager_weights: bool
    ) -> None:
        self.schedule, self.cost, self.transfer, self.eager_weights = schedule, cost, transfer, eager_weights
        self.runnable = [_Row(rank, schedule.pieces(rank, microbatches)) for rank in range(schedule.ranks)]
        self.waiting: dict[Message, _Row] = {}  # ranks whose next input nobody has computed yet
        self.arrivals: dict[Message, float] = {}
        self.spans: list[Span] = []

    def run(self) -> None:
        while self.runnable:
            row = self.runnable.pop()
            while row.position < len(row.actions):
                action = row.actions[row.position]
                need = input_of(self.schedule, row.rank, action)
                if need is not None and need not in self.arrivals:
                    self.waiting[need] = row
                    break
                row.position += 1
                self._do(row, action, row.clock if need is None else self.arrivals[need])
        for message, row in self.waiting.items():
            raise ConfigError(
                f"schedule {self.schedule.name}: rank {row.rank} waits for ever before {row.actions[row.position]} of "
                f"stage {message.stage}: its {'activation' if message.kind == 'F' else 'gradient'} is never computed; "
                f"reorder the actions so that every input can be computed before it is needed"
            )

    def _do(self, row: _Row, action: Action, arrival: float) -> None:
        """Wait for the input, run the action, and pass its result on."""
        while self.eager_weights and row.clock < arrival and row.pending:
            oldest = next(iter(row.pending))
            self._work(row, oldest, min(row.pending[oldest], arrival - row.clock))
        row.clock = max(row.clock, arrival)
        stage = self.schedule.placement(row.rank, action.chunk)
        if action.kind == "W":
            self._work(row, action, row.pending.get(action, 0.0))
            return
        self._work(row, action, sum(self.cost(kind, stage) for kind in action.kind))
        if action.kind == "B":
            row.pending[action._replace(kind="W")] = self.cost("W", stage)
        message = output_of(self.schedule, row.rank, action)
        if message is None:
            return
        remote = self.schedule.holders[message.stage][0] != row.rank
        self.arrivals[message] = row.clock + (self.transfer if remote else 0.0)
        if message in self.waiting:
            self.runnable.append(self.waiting.pop(message))

    def _work(self, row: _Row, action: Action, time: float) -> None:
        """Spend time on an action; W may be done in parts."""
        if time > 0:
            stage = self.schedule.placement(row.rank, action.chunk)
            self.spans.append(Span(row.rank, *action, stage, row.clock, row.clock + time))
            row.clock += time
        if action.kind == "W" and action in row.pending:
            row.pending[action] -= time
            if row.pending[action] <= 0:
                del row.pending[action]
