"""The progress of `nanotron tokenize`: a bar in a terminal, and elsewhere, say in a job's log, a line now and then."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from multiprocessing.sharedctypes import SynchronizedArray
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from nanotron.errors import complain
from nanotron.logging import human_duration, human_format

COUNTERS = ("size", "documents", "tokens", "shards")
LINE_S = 10.0  # from one line to the next while no shard is finished
SHARD_LINE_S = 1.0  # at least, when one is
REFRESH_S = 0.2


class TokenizeProgress:
    """Shows counters that any number of processes add to, on standard error, from a thread of its own."""

    def __init__(self, output: str, size: int, num_shards: int, *, visible: bool = True) -> None:
        """`size` is that of all input, 0 when unknown; `num_shards` are left to write."""
        self.counters: SynchronizedArray[int] = multiprocessing.get_context("spawn").Array("q", len(COUNTERS))
        self._output, self._size, self._num_shards = output, size, num_shards
        console = Console(file=sys.stderr)
        self._bar: Progress | None = None
        if visible and console.is_terminal:
            columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[counts]}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("tokenize", total=size or None, counts="")
        self._lines = visible and self._bar is None
        self._start = self._last_line = time.monotonic()
        self._told_shards = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._refresh_until_ended, name="progress", daemon=True)

    def _refresh_until_ended(self) -> None:
        while not self._ended.wait(REFRESH_S):
            self._refresh()

    def _refresh(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self.counters[0], counts=self._counts())
        elif self._lines:
            shards = self.counters[3]
            if time.monotonic() - self._last_line >= (SHARD_LINE_S if shards > self._told_shards else LINE_S):
                self._last_line, self._told_shards = time.monotonic(), shards
                complain(self._line())

    def _counts(self) -> str:
        _, documents, tokens, shards = self.counters[:]
        rate = tokens / max(1e-9, time.monotonic() - self._start)
        return (
            f"{shards} of {self._num_shards} shards, {human_format(documents)} documents, "
            f"{human_format(tokens)} tokens, {human_format(rate)} tokens/s"
        )

    def _line(self) -> str:
        """What the counters say now, as one line."""
        done, seconds = self.counters[0], time.monotonic() - self._start
        left = ""
        if self._size and done:
            left = f", {human_duration(seconds * max(0, self._size - done) / done)} left"
        share = f"{min(1.0, done / self._size):.0%}, " if self._size else ""
        return f"{self._output}: {share}{self._counts()}{left}"

    def __enter__(self) -> TokenizeProgress:
        if self._bar is not None:
            self._bar.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._refresh()
        if self._bar is not None:
            self._bar.stop()
