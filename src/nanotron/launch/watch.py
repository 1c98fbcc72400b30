"""A thread beside the main one, which may be deep in a wait: it hears signals, misses the launcher, answers the roll.

    holding     the config is being read; a signal to stop is kept until its mistakes have been said
    starting    a signal to stop ends this rank at once with code 76: nothing is lost
    training    it becomes the wish to save and stop; a rank that is not done after its grace is ended
    ending      the rank is leaving with a code that is known; it is only hurried

The launcher's end, however it came, is a signal to stop. So is the end of its store, which may be on another machine.
When others are gone, this rank cannot go on either: it is ended if it does not notice by itself, which it cannot while
it waits for them through the store.

The thread also gives signs of life, with the place where the main thread is, and looks for those of others: rank 0 for
everyone's, everyone for rank 0's. A process that is stopped or frozen gives none, and nothing else tells of a link that
is down. A rank that cannot reach the store for as long is on the machine that is cut off: it ends, and its launcher,
which would wait a quarter of an hour, with it. Rank 0 also looks for one that lives and does not go on (standstill.py).

The thread learns of a signal through a pipe that the interpreter's own handler writes to, so it hears of it also while
the main thread is in a call that would hear nothing.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

from nanotron.errors import complain, shorten
from nanotron.launch import codes
from nanotron.launch.alike import named
from nanotron.launch.failures import Failure
from nanotron.launch.peers import Peers
from nanotron.launch.place import Place
from nanotron.launch.roll import Beat, Pulse, Roll, stuck
from nanotron.launch.signals import forget_stop_signals
from nanotron.launch.standstill import Standstill
from nanotron.parallel.store import LostPeers, LostStore

LOOK_S = 1.0
BEATS = 4  # signs of life in general.heartbeat_s
SHOWN = 32  # ranks whose last actions are printed; all of them are on record
LAUNCHER_END_S = 2.0
WAITING = (
    "parallel/",
    "pipeline/transport.py",
    "launch/peers.py",
    "data/replica.py",
    "training/host_copy.py",  # for a device, and so for what other ranks send it
    "metrics/step_clock.py",
    "doctor/measure.py",
)
WAITING_THERE = {
    ("optim/buckets.py", "wait"),
    ("optim/sharding.py", "_wait"),
    ("training/diagnostics.py", "__torch_dispatch__"),
}
"""File and function: where the main thread waits for other ranks, beside those files."""
LAST_WORDS_S = 10.0  # for ranks to answer the roll, and for this one to notice by itself that others are gone


class Watch:
    """This rank's watch. Made in the main thread; it ends with the process."""

    def __init__(self, place: Place, peers: Peers) -> None:
        self._peers = peers
        self.record: Callable[[Failure], int] = lambda failure: codes.INTERNAL_ERROR
        """Puts on record why this rank is ended, says it, and returns the exit code."""
        self._world, self._num_nodes = place.world, place.num_nodes
        self._rank, self._launcher = place.rank, os.getppid() if place.launched else None
        self._phase, self._code = "holding", codes.INTERNAL_ERROR
        self._wish: Callable[[], None] = lambda: None
        self._grace_s = 0.0
        self._told = ""  # by whom to stop
        self._told_at = self._entered_at = 0.0  # on the monotonic clock
        self._called = self._alone = False
        self._lost_since: float | None = None
        self._where: Callable[[], dict[str, Any]] = dict
        self._heartbeat_s, self._next_beat, self._num_beats = 10.0, 0.0, 0
        self._heard_at = self._looked_at = time.monotonic()  # from the store; at whether others live
        self._is_cut_off = self._is_stuck = False
        self._timeout_s, self._standstill, self._told_standstill = math.inf, Standstill(), False
        self._pulse = Pulse(range(place.world) if place.rank == 0 else [0], 2 * self._heartbeat_s)
        self._lock = threading.Lock()  # of the phase: nobody is ended while it becomes another one
        self._signals = _hear_signals()
        threading.Thread(target=self._run, daemon=True, name="watch").start()

    # -------------------------------------------------------- called by the main thread

    def begin(self) -> None:
        """From here on a signal to stop ends this rank at once, also one that came before."""
        self._enter("starting")

    def beat_within(self, heartbeat_s: float, timeout_s: float = math.inf) -> None:
        """Let signs of life be as frequent as the config says, and nobody be waited for longer than it says."""
        self._heartbeat_s, self._timeout_s = heartbeat_s, timeout_s
        self._pulse.silence_s = 2 * heartbeat_s

    @property
    def was_told(self) -> bool:
        """Whether a request to stop has come."""
        return bool(self._told)

    @contextmanager
    def training(
        self, wish: Callable[[], None], where: Callable[[], dict[str, Any]] = dict, *, grace_s: float
    ) -> Iterator[None]:
        """While the block lasts a signal to stop calls ``wish``; ``grace_s`` later the rank is ended.

        ``where`` says which stage, step and action the rank is at.
        """
        self._wish, self._where, self._grace_s = wish, where, grace_s
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
            lost = self._heart_stops() or self._others_lost()
            with self._lock:
                self._follow()
                ends = bool(lost) and self._phase in ("starting", "training")
                if ends:
                    self._phase = "ending"
            if ends:
                if self._is_cut_off:
                    self._peers.forget()
                if self._is_cut_off or self._is_stuck:  # so may be what its files are on
                    threading.Timer(LAST_WORDS_S, leave_now, [codes.INTERNAL_ERROR]).start()
                code = self.record(self._failure(lost))
                if self._is_cut_off and self._launcher is not None:
                    _end_launcher(self._launcher)
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

    def _heart_stops(self) -> str:
        """Give a sign of life and look for others' when it is time; why the run is over, "" while it is not."""
        roll, now = self._peers.roll, time.monotonic()
        if roll is None or self._alone or now < self._next_beat:
            return ""
        if now - self._looked_at > self._pulse.silence_s:  # this process was stopped, or its machine
            self._pulse.begin_again()
            self._standstill = Standstill()
            self._heard_at = now
        self._next_beat = now + self._heartbeat_s / BEATS
        self._num_beats += 1
        try:
            at, waits = _main_thread_at()
            roll.beat(Beat(self._num_beats, socket.gethostname(), at, waits, self._where()))
            if self._phase not in ("starting", "training"):
                return ""
            if (lost := roll.lost()) is not None:
                self._is_stuck = lost.kind == "stuck" and lost.rank == self._rank
                others = "another rank " + ("did not go on" if lost.kind == "stuck" else "gave no sign of life")
                return lost.error if self._is_stuck else others
            silent = self._pulse.look(roll)
            self._heard_at = time.monotonic()
            if silent and not roll.failed():
                return self._tell_lost(roll, silent)
            return self._tell_stuck(roll) if self._rank == 0 and self._phase == "training" else ""
        except LostStore:
            return ""  # noticed where the roll is answered
        except LostPeers as error:
            silence = time.monotonic() - self._heard_at
            self._is_cut_off = self._num_nodes > 1 and silence > self._pulse.silence_s
            return f"cut off for {silence:.0f} s, or the machine of the store is frozen ({error})" * self._is_cut_off
        finally:
            self._looked_at = time.monotonic()

    def _tell_lost(self, roll: Roll, silent: Mapping[int, float]) -> str:
        """Name the first rank that gives no sign of life, and say where every rank was last, the silent ones first."""
        beats = roll.beats(range(self._world))
        rank, seconds = min(silent), max(silent.values())
        lines = [f"rank {rank} on {beats[rank].host}, last heard of: {beats[rank]}" for rank in silent]
        lines += [f"rank {rank} on {beat.host}: {beat}" for rank, beat in beats.items() if rank not in silent]
        others = f", nor of {named(sorted(silent)[1:])}" if len(silent) > 1 else ""
        error = f"no sign of life for {seconds:.0f} s (stopped, frozen or cut off){others}"
        where = {**beats[rank].where, "at": beats[rank].at}
        lost = Failure(rank, "lost", error, host=beats[rank].host, where=where, traceback="\n".join(lines))
        if roll.tell_lost(lost):
            with suppress(OSError):
                complain(*shorten(lines, SHOWN))
        return f"{named([*silent])} gave no sign of life"

    def _tell_stuck(self, roll: Roll) -> str:
        """Name a rank that all others wait for, and why the run is over once they have for as long as they may."""
        beats = self._pulse.beats
        ranks, seconds = self._standstill.look(beats, time.monotonic())
        if not ranks or seconds < min(self._pulse.silence_s, self._timeout_s):
            self._told_standstill = False
            return ""
        rank, lines = ranks[0], [f"rank {rank} on {beat.host}: {beat}" for rank, beat in beats.items()]
        if not self._told_standstill:
            self._told_standstill = True
            with suppress(OSError):
                complain(f"all ranks have waited {seconds:.0f} s for {named(ranks)}:", *shorten(lines, SHOWN))
        if seconds < self._timeout_s or roll.failed():
            return ""
        others = f"nor did {named(ranks[1:])}, and " * (len(ranks) > 1)
        told = stuck(rank, beats[rank], f"{others}all others waited for {seconds:.0f} s")
        roll.tell_lost(replace(told, traceback="\n".join(lines)))
        self._is_stuck = rank == self._rank
        return told.error if self._is_stuck else f"{named(ranks)} did not go on"

    def _failure(self, why: str) -> Failure:
        """Why this rank is ended, where it is, and the stacks of its threads."""
        at, _ = _main_thread_at()
        kind, where = "stuck" if self._is_stuck else "peer", {**self._where(), "at": at}
        return Failure(self._rank, kind, why, where=where, traceback=_stacks())

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


def _main_thread_at() -> tuple[str, bool]:
    """Which line of ours the main thread is at, as `data/feed.py:210 _wait`, and whether it waits for others there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        folder, _, path = frame.f_code.co_filename.rpartition("/nanotron/")
        if folder:
            name = frame.f_code.co_name
            return f"{path}:{frame.f_lineno} {name}", waits_at(path, name)
        frame = frame.f_back
    return "its end", False


def waits_at(path: str, function: str) -> bool:
    """Whether the main thread waits for other ranks where it is in a function of a file of ours."""
    return path.startswith(WAITING) or (path, function) in WAITING_THERE


def _stacks() -> str:
    """Where each Python thread of this process is but this one, the main thread last."""
    frames, threads = sys._current_frames(), reversed(threading.enumerate())
    there = [thread for thread in threads if thread is not threading.current_thread() and thread.ident in frames]
    return "\n".join(
        f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident or 0]))}" for thread in there
    )


def _end_launcher(process: int) -> None:
    """End a launcher on a machine that is cut off: asked to, it would first finish a call that takes 15 minutes."""
    with suppress(OSError):
        os.kill(process, signal.SIGTERM)
        deadline = time.monotonic() + LAUNCHER_END_S
        while os.getppid() == process and time.monotonic() < deadline:
            time.sleep(0.1)
        if os.getppid() == process:
            os.kill(process, signal.SIGKILL)


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
