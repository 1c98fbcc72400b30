"""Standard output and error that no terminal's alphabet, closed pipe or full disk can turn into a traceback.

A command whose output nobody takes ends with a line that says so. A run does not end for it: its lines are logged, and
what a handler cannot write is dropped; its numbers are in metrics.jsonl all the same.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from nanotron.errors import ConfigError


class Output(io.TextIOWrapper):
    """A standard stream: what its alphabet lacks is written as ``\\u00e9``, and a write that fails is ``lost``."""

    def __init__(self, stream: io.TextIOWrapper, lost: Callable[[OSError], None]) -> None:
        # A closed pipe is met by whoever prints, not at the end of the process, where only the interpreter could tell.
        super().__init__(stream.buffer, stream.encoding, "backslashreplace", line_buffering=True)
        self._stream = stream  # would close the buffer if it went
        self._lost = lost

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), self.fileno())  # the interpreter flushes once more when it ends
        self._lost(error)


def open_streams() -> None:
    """Put an ``Output`` in the place of both streams; one that was closed takes everything and keeps nothing."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # becomes this number, which some later file would get otherwise
    for name, number, lost in (("stdout", 1, _end), ("stderr", 2, _go_on)):
        stream = getattr(sys, name) or os.fdopen(number, "w", closefd=False)
        if type(stream) is io.TextIOWrapper:
            setattr(sys, name, Output(stream, lost))


def _end(error: OSError) -> None:
    raise ConfigError(f"standard output cannot be written ({error.strerror}): what was to come is lost") from error


def _go_on(error: OSError) -> None:
    """Nobody is left who could be told."""
