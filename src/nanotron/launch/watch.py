"""A thread beside the main one, which may be deep in a wait: it hears signals, misses the launcher, answers the roll.

    holding     the config is being read; a signal to stop is kept until its mistakes have been said
    starting    a signal to stop ends this rank at once with code 76: nothing is lost
    training    it becomes the wish to save and stop; a rank that is not done after its grace is ended
    ending      the rank is leaving with a code that is known; it is only hurried

The launcher's end, however it came, is a signal to stop. So is the end of its store, which may be on another machine.
When others are gone, this rank cannot go on either: it is ended if it does not notice by itself, which it cannot while
it waits for them through the store.

The thread learns of a signal through a pipe that the interpreter's own handler writes to, so it hears of it also while
the main thread is in a call that would hear nothing.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from nanotron.errors import complain
from nanotron.launch import codes
from nanotron.launch.peers import Peers
from nanotron.launch.place import Place
from nanotron.launch.signals import forget_stop_signals
from nanotron.parallel.store import LostPeers, LostStore

LOOK_S = 1.0
LAST_WORDS_S = 10.0  # for ranks to answer the roll, and for this one to notice by itself that others are gone


class Watch:
    """This rank's watch. Made in the main thread; it ends with the process."""

    def __init__(self, place: Place, peers: Peers) -> None:
        self._peers = peers
        self.record: Callable[[str], int] = lambda why: codes.INTERNAL_ERROR
        """Puts on record why this rank is ended, says it, and returns the exit code."""
        self._rank, self._launcher = place.rank, os.getppid() if place.launched else None
        self._phase, self._code = "holding", codes.INTERNAL_ERROR
        self._wish: Callable[[], None] = lambda: None
        self._grace_s = 0.0
        self._told = ""  # by whom to stop
        self._told_at = self._entered_at = 0.0  # on the monotonic clock
        self._called = self._alone = False
        self._lost_since: float | None = None
        self._lock = threading.Lock()  # of the phase: nobody is ended while it becomes another one
        self._signals = _hear_signals()
        threading.Thread(target=self._run, daemon=True, name="watch").start()

    # -------------------------------------------------------- called by the main thread

    def begin(self) -> None:
        """From here on a signal to stop ends this rank at once, also one that came before."""
        self._enter("starting")

    @property
    def was_told(self) -> bool:
        """Whether a request to stop has come."""
        return bool(self._told)

    @contextmanager
    def training(self, wish: Callable[[], None], *, grace_s: float) -> Iterator[None]:
        """While the block lasts a signal to stop calls ``wish``; ``grace_s`` later the rank is ended."""
        self._wish, self._grace_s = wish, grace_s
        self._enter("training")
        try:
            yield
        finally:
            self.end(codes.INTERNAL_ERROR)

    def end(self, code: int) -> None:
        """The rank is leaving with this code, and is no longer ended with another one."""
        self._code = code
        self._enter("ending")

    def _enter(self, phase: str) -> None:
        with self._lock:
            self._phase, self._entered_at = phase, time.monotonic()
            self._follow()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            if select.select([self._signals], [], [], LOOK_S)[0]:
                os.read(self._signals, 64)
                self._tell("a signal")
                continue  # it may be the last one of a launcher that is being ended, whose store is better left alone
            if self._launcher is not None and os.getppid() != self._launcher:
                self._alone = True
                self._tell("the launcher's end")
            lost = self._others_lost()
            with self._lock:
                self._follow()
                ends = bool(lost) and self._phase in ("starting", "training")
                if ends:
                    self._phase = "ending"
            if ends:
                code = self.record(lost)
                leave_now(codes.PREEMPTED_UNSAVED if self._told else code)

    def _tell(self, by: str) -> None:
        with self._lock:
            if not self._told:
                self._told, self._told_at = by, time.monotonic()
            self._follow()

    def _follow(self) -> None:
        """Do what the phase says of a request to stop; the lock is held."""
        if not self._told or self._phase == "holding":
            return
        now = time.monotonic()
        if self._phase == "starting":
            self._leave(f"told to stop by {self._told} before the first step" if self._rank == 0 else "")
        elif self._phase == "training":
            self._wish()
            if now > self._told_at + self._grace_s:
                self._leave(f"told to stop by {self._told}, not done within {self._grace_s:g} s: ended without a save")
        elif now > max(self._told_at, self._entered_at) + LAST_WORDS_S:
            leave_now(self._code)

    def _leave(self, why: str) -> None:
        if why:
            with suppress(OSError):
                complain(f"rank {self._rank}: {why}")
        leave_now(codes.PREEMPTED_UNSAVED)

    def _others_lost(self) -> str:
        """Why this rank cannot go on, once it has had time to notice by itself; "" while it can."""
        try:
            why = self._missing()
        except LostStore:
            self._alone = True
            self._tell("the end of the launcher's store")
            return ""
        except LostPeers:  # the link may be back before anybody gives up
            return ""
        if not why:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = time.monotonic()
        return why if self._lost_since is not None and time.monotonic() - self._lost_since > LAST_WORDS_S else ""

    def _missing(self) -> str:
        """Answer the roll; why the run seems to be over."""
        roll = self._peers.roll
        if roll is None or self._alone:  # the ranks have not met yet, or the launcher's store is gone
            return ""
        if self._told and self._phase == "training" and not self._called:
            roll.call()
            self._called = True
        if not roll.answer():
            return ""
        if roll.failed():
            return "another rank has failed"
        silent = roll.silent() if self._told else []
        return f"rank {', '.join(map(str, silent))} does not answer" if silent else ""


def leave_now(code: int) -> None:
    """End this process as it is: neither groups nor threads are waited for."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _hear_signals() -> int:
    """Let every signal to stop be written to a pipe, whose read end is returned, and do nothing else."""

    def hear(number: int, frame: FrameType | None) -> None:
        """The interpreter has written it to the pipe already."""

    def keep() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, codes.STOP_SIGNALS)

    def go_on() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, codes.STOP_SIGNALS)

    def forget() -> None:
        """In a child process: the pipe is its parent's."""
        signal.set_wakeup_fd(-1)
        forget_stop_signals()
        go_on()

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in codes.STOP_SIGNALS:
        signal.signal(number, hear)
    os.register_at_fork(before=keep, after_in_parent=go_on, after_in_child=forget)
    return read_end
