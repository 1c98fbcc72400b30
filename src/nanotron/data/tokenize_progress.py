"""The progress line of `nanotron tokenize`: share done, documents, tokens, tokens per second, time left."""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.sharedctypes import SynchronizedArray
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from nanotron.logging import human_format


class TokenizeProgress:
    """Draws counters that any number of processes add to: [size read, documents, tokens]."""

    def __init__(self, total: int, *, visible: bool = True) -> None:
        """`total` is the size of all input, 0 when unknown; on something that is no terminal, nothing is drawn."""
        self.counters: SynchronizedArray[int] = multiprocessing.get_context("spawn").Array("q", 3)
        console = Console(file=sys.stderr)
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[counts]}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not (visible and console.is_terminal))
        self._task = self._progress.add_task("tokenize", total=total or None, counts="")
        self._start = time.monotonic()

    def refresh(self) -> None:
        """Draw what the counters say now."""
        size, documents, tokens = self.counters[:]
        rate = tokens / max(1e-9, time.monotonic() - self._start)
        counts = f"{human_format(documents)} documents, {human_format(tokens)} tokens, {human_format(rate)} tokens/s"
        self._progress.update(self._task, completed=size, counts=counts)

    def __enter__(self) -> TokenizeProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.refresh()
        self._progress.stop()
