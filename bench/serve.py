"""How a contender is measured: a process that has set itself up and makes steps when it is told to.

The runner starts every contender once, then lets them step in turn, so that all meet the same machine. It writes one
line, the number of steps, to the standard input of each of a contender's processes; the first answers with one line of
JSON, the seconds and the loss of each step and the most memory it ever had. In between a contender waits for input and
uses no processor. This file is also imported inside the peers' own environments: it needs torch and nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any


def options() -> dict[str, Any]:
    """What the runner asked for: the shape and the layout, from the command line."""
    found: dict[str, Any] = json.loads(sys.argv[1])
    return found


def prepare(threads: int, *, batch_policy: bool) -> None:
    """Threads and scheduling of this process; call it before any process group exists."""
    import torch

    torch.set_num_threads(threads)
    if batch_policy and hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def serve(step: Callable[[], float | None]) -> None:
    """Say that all is set up, then make steps until the input ends.

    A step ends when its process has read the loss and the gradient's norm, which most users log; it returns the loss,
    the mean over the tokens of the batch or of this replica's share, or None where this process does not know it.
    """
    first = int(os.environ.get("RANK", "0")) == 0
    answer(first, {"ready": True})
    for line in sys.stdin:
        seconds, losses = [], []
        for _ in range(int(line)):
            start = perf_counter()
            losses.append(step())
            seconds.append(perf_counter() - start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
        answer(first, {"seconds": seconds, "losses": losses, "peak_bytes": 1024 * peak})


def answer(first: bool, message: dict[str, Any]) -> None:
    """One line of JSON to the runner, from a contender's first process only."""
    if first:
        print("@" + json.dumps(message), flush=True)  # the mark tells it from what libraries print
