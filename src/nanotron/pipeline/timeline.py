"""When every action of a schedule happens: the clockwork under simulate.py, and what pictures are drawn from.

A `Timeline` is a list of spans, predicted here or measured by the engine (trace.py): both are drawn by the same code.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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


def split_fused(actions: Iterable[Action]) -> list[Action]:
    """Write every BW as B, W: its result leaves between the two."""
    return [Action(kind, *action[1:]) for action in actions for kind in action.kind]


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
    With `eager_weights` a rank that waits takes its oldest pending W meanwhile (but none of the last microbatch), as
    the engine does over gloo.
    Raises ConfigError, naming rank, stage and action, when a rank waits for something that is never computed.
    """
    clockwork = _Clockwork(schedule, microbatches, cost, transfer, eager_weights)
    clockwork.run()
    return Timeline(schedule.name, schedule.ranks, clockwork.spans)


@dataclass
class _Row:
    """One rank while it executes: its list, its place in it, its clock, and the W that it may do while it waits."""

    rank: int
    actions: Sequence[Action]
    position: int = 0
    clock: float = 0.0
    pending: deque[Action] = field(default_factory=deque)  # W whose B is done, oldest first


class _Clockwork:
    """Lets the rank whose clock is furthest behind do one thing at a time: so nothing is decided from the future."""

    def __init__(
        self, schedule: Schedule, microbatches: int, cost: StageCost, transfer: float, eager_weights: bool
    ) -> None:
        self.schedule, self.microbatches, self.cost = schedule, microbatches, cost
        self.transfer, self.eager_weights = transfer, eager_weights
        self.rows = [_Row(rank, split_fused(schedule.actions(rank, microbatches))) for rank in range(schedule.ranks)]
        self.queue = [(0.0, row.rank) for row in self.rows]  # ranks that can go on, by clock
        self.arrivals: dict[Message, float] = {}
        self.waiting: dict[Message, _Row] = {}  # ranks that cannot: nobody has computed their input yet
        self.spans: list[Span] = []

    def run(self) -> None:
        while self.queue:
            row = self.rows[heapq.heappop(self.queue)[1]]
            if row.position < len(row.actions):
                self._advance(row)
        for message, row in self.waiting.items():
            action = row.actions[row.position]
            raise ConfigError(
                f"schedule {self.schedule.name}: rank {row.rank} waits for ever before {action} of stage "
                f"{message.stage}: its {'activation' if message.kind == 'F' else 'gradient'} is never computed; "
                f"reorder the actions so that every input can be computed before it is needed"
            )

    def _advance(self, row: _Row) -> None:
        """Start the rank's next action if its input is there; else do a W, or wait."""
        action = row.actions[row.position]
        need = input_of(self.schedule, row.rank, action)
        arrival = row.clock if need is None else self.arrivals.get(need)
        if arrival is not None and arrival <= row.clock:
            row.position += 1
            if action.kind != "W":
                self._do(row, action)
            elif action in row.pending:  # else it was done while waiting
                row.pending.remove(action)
                self._do(row, action)
        elif self.eager_weights and row.pending and row.pending[0].microbatch < self.microbatches - 1:
            self._do(row, row.pending.popleft())
        elif arrival is not None:
            row.clock = arrival
        else:
            assert need is not None
            self.waiting[need] = row
            return
        heapq.heappush(self.queue, (row.clock, row.rank))

    def _do(self, row: _Row, action: Action) -> None:
        stage = self.schedule.placement(row.rank, action.chunk)
        start, row.clock = row.clock, row.clock + self.cost(action.kind, stage)
        self.spans.append(Span(row.rank, *action, stage, start, row.clock))
        if action.kind == "B":
            row.pending.append(Action("W", *action[1:]))
        message = output_of(self.schedule, row.rank, action)
        if message is None:
            return
        remote = self.schedule.holders[message.stage][0] != row.rank
        self.arrivals[message] = row.clock + (self.transfer if remote else 0.0)
        if message in self.waiting:
            woken = self.waiting.pop(message)
            woken.clock = max(woken.clock, self.arrivals[message])
            heapq.heappush(self.queue, (woken.clock, woken.rank))
