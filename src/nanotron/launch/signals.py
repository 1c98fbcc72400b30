"""Signals to stop, as the parent of the ranks hears them. Imports next to nothing: it is the first thing a run does."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

from nanotron.errors import complain
from nanotron.launch import codes

if TYPE_CHECKING:
    from nanotron.launch.host import Workers


def forget_stop_signals() -> None:
    """In a child process: whoever heard them is its parent."""
    for number in codes.STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


class StopSignals:
    """Signals to stop, heard from before there are ranks, when they end this process, until after their end."""

    def __init__(self) -> None:
        self.workers: Workers | None = None
        for number in codes.STOP_SIGNALS:
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.workers is not None:
            self.workers.stop(number)
            return
        complain("told to stop before the first step")
        os._exit(codes.PREEMPTED_UNSAVED)
