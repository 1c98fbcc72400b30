"""How a contender is measured: a process that has set itself up and makes steps when it is told to.

The runner starts every contender once, then lets them step in turn, so that all meet the same machine. It writes one
line, the number of steps, to the standard input of each of a contender's processes; the first answers with one line of
JSON, the seconds and the loss of each step, the most memory it ever had resident, and the most that the first of these
steps had in use. In between a contender waits for input and uses no processor. This file is also imported inside the
peers' own environments: it needs torch and nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any

LOOK_S = 2e-4


def options() -> dict[str, Any]:
    """What the runner asked for: the shape and the layout, from the command line."""
    found: dict[str, Any] = json.loads(sys.argv[1])
    return found


def prepare(threads: int, *, batch_policy: bool) -> int | None:
    """Threads and scheduling of this process; call it before any process group exists, and when all is imported.

    Returns the bytes that are in use by then, for ``serve``: those of Python and its libraries.
    """
    import torch

    torch.set_num_threads(threads)
    if batch_policy and hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return bytes_in_use()


def serve(step: Callable[[], float | None], imported: int | None = None) -> None:
    """Say that all is set up, then make steps until the input ends. ``imported`` is what ``prepare`` returned.

    A step ends when its process has read the loss and the gradient's norm, which most users log; it returns the loss,
    the mean over the tokens of the batch or of this replica's share, or None where this process does not know it.
    """
    first = int(os.environ.get("RANK", "0")) == 0
    answer(first, {"ready": True})
    for line in sys.stdin:
        watch = Watch()
        seconds, losses = [], []
        for number in range(int(line)):
            start = perf_counter()
            losses.append(step())
            seconds.append(perf_counter() - start)
            if number == 0:  # which the runner does not count
                watch.end()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
        in_use = None if imported is None else watch.most - imported
        answer(first, {"seconds": seconds, "losses": losses, "peak_bytes": 1024 * peak, "in_use_bytes": in_use})


def answer(first: bool, message: dict[str, Any]) -> None:
    """One line of JSON to the runner, from a contender's first process only."""
    if first:
        print("@" + json.dumps(message), flush=True)  # the mark tells it from what libraries print


class Watch:
    """Looks five thousand times a second how many bytes are in use, on a thread of its own, until its end."""

    def __init__(self) -> None:
        self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        if bytes_in_use() is not None:
            self._thread.start()

    def end(self) -> None:
        """Look no more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.most = max(self.most, bytes_in_use() or 0)


def bytes_in_use() -> int | None:
    """What the C library has handed out and not got back, tensors and all; None where it is not glibc 2.33 or newer.

    What it keeps of freed memory, to hand it out again, does not count.
    """
    ask = _mallinfo2()
    if ask is None:
        return None
    found = ask()
    in_use: int = found.uordblks + found.hblkhd
    return in_use


class _Mallinfo2(ctypes.Structure):
    """As malloc.h has it."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


@cache
def _mallinfo2() -> Callable[[], Any] | None:
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is not None:
        ask.restype = _Mallinfo2
    return ask
