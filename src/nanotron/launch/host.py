"""All ranks of one machine, started and watched by one parent: ``nanotron train``.

    parent   check the config -> open the store's port -> start N ranks -> watch -> exit code
    ranks    exactly what torchrun would have started: RANK, WORLD_SIZE, MASTER_PORT, … and then run_train(argv)

Why not torchrun itself: it imports torch once per rank, forgets the ranks' exit codes when a signal arrives, and ends
the others the moment one fails, before they could say where they were. Here, where no accelerator is present, torch is
imported once and the ranks are forked; with accelerators every rank starts as a new program.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanotron.launch import codes
from nanotron.launch.failures import STACK_SIGNAL, Failure
from nanotron.launch.peers import hold_store
from nanotron.launch.signals import forget_stop_signals

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

STORE_WAIT_S = 60.0
FAILURE_GRACE_S = 10.0  # for the other ranks to notice, and say where they were, once one has failed
STACK_GRACE_S = 0.2
END_GRACE_S = 5.0  # from SIGTERM to SIGKILL
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


@dataclass
class Workers:
    """The ranks of this machine: rank -> process id while it runs, rank -> (exit status, when) afterwards.

    A negative exit status is the number of the signal that ended the rank. Moments are those of `time.monotonic`.
    """

    running: dict[int, int]
    store: TCPStore
    output: int | None = None  # read end of the pipe that all ranks print to, unless they print to our own output
    ended: dict[int, tuple[int, float]] = field(default_factory=dict)
    asked_to_stop: float = math.inf  # when the first signal was passed on
    being_ended: float = math.inf  # when we began to end those that would not end by themselves

    def poll(self) -> None:
        """Notice the ranks that have ended."""
        for rank, process in list(self.running.items()):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                del self.running[rank]
                self.ended[rank] = (os.waitstatus_to_exitcode(status), time.monotonic())

    def send(self, number: int) -> None:
        """Send a signal to every rank that still runs."""
        for process in self.running.values():
            os.kill(process, number)

    def stop(self, number: int) -> None:
        """Pass a signal to stop on."""
        self.asked_to_stop = min(self.asked_to_stop, time.monotonic())
        self.send(number)

    @property
    def first_bad(self) -> tuple[int, int, float] | None:
        """(rank, exit status, when) of the rank that ended badly first."""
        bad = [(when, rank, status) for rank, (status, when) in self.ended.items() if status != 0]
        return next(((rank, status, when) for when, rank, status in sorted(bad)), None)

    def killed(self) -> list[Failure]:
        """The ranks that a signal not of ours ended, as failures: they could not write their own."""
        boot = time.time() - time.monotonic()  # failures are compared with other processes' records of theirs
        return [
            Failure(rank, "killed", f"ended by {signal.Signals(-status).name}", boot + when)
            for rank, (status, when) in self.ended.items()
            if status < 0 and when < min(self.asked_to_stop, self.being_ended)
        ]


def start_workers(world: int, argv: Sequence[str], *, piped: bool, entry: Callable[[Sequence[str]], int]) -> Workers:
    """Start ``world`` ranks that each run ``entry(argv)``, which is ``run_train`` but in tests."""
    import torch

    listener = socket.create_server(("127.0.0.1", 0))
    read_end, write_end = os.pipe() if piped else (None, None)
    port = listener.getsockname()[1]
    fresh = torch.accelerator.device_count() > 0  # their drivers do not survive a fork
    gc.freeze()  # a collection in a rank would write to every page of what is there now, which then is shared no more
    running = {
        rank: _start(_environment(rank, world, port), argv, write_end, entry, fresh=fresh) for rank in range(world)
    }
    if write_end is not None:
        os.close(write_end)
    store = hold_store(listener, "127.0.0.1", STORE_WAIT_S)  # after the forks: it runs a thread
    return Workers(running, store, read_end)


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    size, number = str(world), str(rank)
    return {
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for: the launcher holds the store
    }


def _start(
    environment: dict[str, str],
    argv: Sequence[str],
    output: int | None,
    entry: Callable[[Sequence[str]], int],
    *,
    fresh: bool,
) -> int:
    """Start one rank as a copy of this process, or ``fresh`` as a new program. Returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    code = codes.INTERNAL_ERROR
    try:
        _become_worker(parent)
        os.environ.update(environment)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        if fresh:
            os.execv(sys.executable, [sys.executable, "-c", _program(entry, argv)])
        code = entry(argv)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else codes.INTERNAL_ERROR
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _program(entry: Callable[[Sequence[str]], int], argv: Sequence[str]) -> str:
    name = entry.__name__
    return f"import sys; from {entry.__module__} import {name}; sys.exit({name}({list(argv)!r}))"


def _become_worker(parent: int) -> None:
    """Leave the terminal's process group, so that Ctrl-C reaches a rank once, through the parent; end with it."""
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # who reads a terminal not its own is stopped for ever
    forget_stop_signals()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:  # it died before we asked to be told
        os._exit(codes.INTERNAL_ERROR)


def watch_workers(workers: Workers, *, stop_grace_s: float, refresh: Callable[[], None]) -> None:
    """Wait until every rank has ended, passing signals on; end those that outlive a failure or a request to stop.

    ``stop_grace_s``: seconds a rank may take from a signal to its end. ``refresh`` is called about ten times a second.
    """

    before = {number: signal.signal(number, lambda number, _: workers.stop(number)) for number in codes.STOP_SIGNALS}
    try:
        while workers.running:
            workers.poll()
            refresh()
            bad = workers.first_bad
            failed_long_ago = bad is not None and time.monotonic() > bad[2] + FAILURE_GRACE_S
            if failed_long_ago or time.monotonic() > workers.asked_to_stop + stop_grace_s:
                end_workers(workers)
            time.sleep(0.1)
        refresh()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_workers(workers: Workers) -> None:
    """End the ranks that still run: ask where they are, then SIGTERM, and SIGKILL for those that do not listen."""
    workers.being_ended = min(workers.being_ended, time.monotonic())
    workers.send(STACK_SIGNAL)
    time.sleep(STACK_GRACE_S)
    workers.send(signal.SIGTERM)
    deadline = time.monotonic() + END_GRACE_S
    while workers.running and time.monotonic() < deadline:
        workers.poll()
        time.sleep(0.05)
    workers.send(signal.SIGKILL)


def exit_code(workers: Workers) -> int:
    """What the whole run came to: the code of the rank that ended badly first; not saved wins over saved."""
    bad = workers.first_bad
    if bad is None:
        return codes.DONE
    stopped = bad[1] < 0 and bad[2] >= workers.asked_to_stop  # told to stop before it could listen, or too slow
    unsaved = any(
        status == codes.PREEMPTED_UNSAVED and when < workers.being_ended for status, when in workers.ended.values()
    )
    if stopped or unsaved:
        return codes.PREEMPTED_UNSAVED
    return bad[1] if bad[1] > 0 else codes.INTERNAL_ERROR
