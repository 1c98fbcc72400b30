"""How long a step takes, measured where it happens and not when the host learns of its numbers.

       │ step n: data, update │ validation │ read, log │ save │ step n+1: data, update │ …
    began                     └── apart ───┤           └apart─┘                        │
                                     step n ends                               step n+1 ends

An accelerator works behind the host, so there a moment is an event in its queue. Whoever asks for the time between two
waits for the later one: for a step that is read at once, until its update is made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from nanotron.metrics.columns import APART, TIME_MS

if TYPE_CHECKING:
    import torch


class Moment:
    """When a device is done with all that it was given so far; on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._seconds, self._event = perf_counter(), None
        if device.type != "cpu":
            import torch

            self._event = torch.Event(device, enable_timing=True)
            self._event.record()

    def ms_since(self, earlier: Moment) -> float:
        """Milliseconds between two moments; waits for this one."""
        if self._event is None or earlier._event is None:
            return (self._seconds - earlier._seconds) * 1e3
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event))


class StepTime(NamedTuple):
    """From the end of a step to the end of the next, and what of it was not the step's, by column."""

    began: Moment
    ended: Moment
    apart: list[tuple[str, Moment, Moment]]

    def columns(self) -> dict[str, float]:
        """Milliseconds of the step, and of each kind of work apart from it."""
        columns: dict[str, float] = {}
        for column, began, ended in self.apart:
            columns[column] = columns.get(column, 0.0) + ended.ms_since(began)
        return {TIME_MS: self.ended.ms_since(self.began) - sum(columns.values()), **columns}


class StepClock:
    """Cuts the time of a run into its steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begin()

    def begin(self) -> None:
        """Let the next step begin now."""
        self._began = Moment(self._device)
        self._apart: list[tuple[str, Moment, Moment]] = []

    @contextmanager
    def apart(self, column: str) -> Iterator[None]:
        """Keep what runs inside out of the step's time; it counts to a column of its own."""
        began = Moment(self._device)
        yield
        self._apart.append((column, began, Moment(self._device)))

    def step_ends(self) -> StepTime:
        """The time of the step that ends now, to be read when its numbers are."""
        step = StepTime(self._began, Moment(self._device), self._apart)
        self._began, self._apart = step.ended, []
        return step


class TimeLeft:
    """How long the rest of a run takes: its steps as they took lately, with what validating and saving took so far."""

    def __init__(self) -> None:
        self._lately: deque[float] = deque(maxlen=20)
        self._steps, self._apart = 0, 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Note a step's row."""
        self._lately.append(row[TIME_MS])
        self._steps += 1
        self._apart += sum(row.get(column, 0.0) for column in APART)

    def seconds(self, steps: float) -> float:
        """For so many more steps."""
        return steps * (median(self._lately) + self._apart / self._steps) / 1e3
