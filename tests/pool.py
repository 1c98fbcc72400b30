"""A pool of gloo worker processes that outlives a test, so that torch is imported once per session.

    results = pool.run(4, function, *args)     # [function(rank, 4, *args) for rank in range(4)], in four processes

`function` must be importable (module level). Every run gets a fresh default process group over one shared store,
so no communicator of an earlier case is left; world 1 gets none, like a plain `python run_train.py`.
A case that fails or hangs ends its workers, and the next run starts new ones.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

PRELOADED = ["__main__", "torch", "torch.distributed", "numpy", "pytest", "nanotron.cli", "nanotron.training.trainer"]
PRELOADED += ["torch._inductor.config"]  # which `torch.use_deterministic_algorithms` imports, for 1.5 s
GRACE_S = 1.0  # how long the other ranks may take to fail too, once one has failed


def forkserver() -> Any:
    """How processes of tests start: as forks of one that has imported all that they have in common, a few ms each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class CaseFailed(AssertionError):
    """Some rank of a case raised, died or did not answer in time; the message holds each such rank's traceback."""


class Pool:
    """Worker processes by rank; rank r of every case, whatever its world, runs in worker r."""

    def __init__(self) -> None:
        self._context = forkserver()
        self._folder = Path(tempfile.mkdtemp(prefix="pool-"))
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: dict[int, _Worker] = {}
        self._cases = itertools.count()

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """Run `function(rank, world, *args)` on ranks 0..world-1 and return the results in rank order.

        Raises CaseFailed with the failing ranks' tracebacks, or the stacks of the ranks that hang.
        """
        case = _Case(next(self._cases), world, timeout)
        job = pickle.dumps((list(sys.path), pickle.dumps((case, function, args))))
        for rank in range(world):
            if rank not in self._workers:
                self._workers[rank] = _Worker(self._context, rank, self._folder, self._store.port)
            self._workers[rank].send(job)
        answers = self._collect(world, time.monotonic() + timeout)
        if len(answers) == world and all(succeeded for succeeded, _ in answers.values()):
            return [answers[rank][1] for rank in range(world)]
        report = self._report(world, answers, timeout)
        for rank in range(world):
            self._workers.pop(rank).kill()
        raise CaseFailed(report)

    def close(self) -> None:
        """End every worker."""
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, world: int, deadline: float) -> dict[int, tuple[bool, Any]]:
        """Read (succeeded, result or traceback) of each rank until all have answered, or the time is up."""
        waiting = {self._workers[rank].connection: rank for rank in range(world)}
        answers: dict[int, tuple[bool, Any]] = {}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                answers[rank] = self._workers[rank].receive()
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _report(self, world: int, answers: dict[int, tuple[bool, Any]], timeout: float) -> str:
        """Say what each rank did; the one that failed first comes first, for the others often only follow."""
        failures = [(rank, text) for rank, (succeeded, text) in answers.items() if not succeeded]
        parts = [f"rank {rank} of {world} failed:\n{text}" for rank, text in failures]
        why = "when another had failed" if parts else f"after {timeout:g} s"
        for rank in range(world):
            if rank not in answers:
                stack = self._workers[rank].stack()
                parts.append(f"rank {rank} of {world} had not answered {why}; it was here:\n{stack}")
        return "\n".join(parts)


class _Case(NamedTuple):
    """What a worker must know to join one case."""

    number: int
    world: int
    timeout: float


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self, context: Any, rank: int, folder: Path, port: int) -> None:
        self.connection, theirs = context.Pipe()
        handle, name = tempfile.mkstemp(prefix=f"rank-{rank}-", dir=folder)
        os.close(handle)
        self._log = Path(name)
        self._process = context.Process(target=_work, args=(rank, theirs, name, port), daemon=True, name=f"rank {rank}")
        self._process.start()
        theirs.close()

    def send(self, job: bytes) -> None:
        self.connection.send_bytes(job)

    def receive(self) -> tuple[bool, Any]:
        try:
            succeeded, answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self._process.join(5)
            return False, f"the process died, exit code {self._process.exitcode}\n{self._tail()}"
        return succeeded, answer if succeeded else f"{answer}{self._tail()}"

    def stack(self) -> str:
        """Where a silent worker is now: the stacks of its threads, written by its signal handler."""
        assert self._process.pid is not None
        size = self._log.stat().st_size
        os.kill(self._process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while self._log.stat().st_size == size and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)
        return self._tail()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


def _work(rank: int, connection: Any, log: str, port: int) -> None:
    """A worker's life: take a job, run it in a process group of its own, answer."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)
    torch.set_num_threads(1)
    if hasattr(os, "SCHED_BATCH"):  # gloo's receive threads otherwise spin against the thread they serve
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    store = TCPStore("127.0.0.1", port, is_master=False)  # one connection for life: many in a row can stall for 5 s
    gc.freeze()  # what was imported, so that looking for what a case leaves behind takes no time
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            return
        os.truncate(log, 0)
        try:
            answer = pickle.dumps((True, _run(rank, job, store)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
        gc.collect()  # process groups in cycles: a thread of each would look around a hundred times a second, for ever


def _run(rank: int, job: bytes, store: TCPStore) -> Any:
    """Join the case's process group, call its function, leave the group."""
    path, packed = pickle.loads(job)
    sys.path[:] = path  # the function may live in a test module found after this worker began
    case, function, args = pickle.loads(packed)
    if case.world == 1:
        return function(rank, 1, *args)
    limit = datetime.timedelta(seconds=case.timeout + 30)  # the parent gives up first, and shows who hangs
    prefixed = PrefixStore(f"case-{case.number}", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=case.world, timeout=limit)
    result = function(rank, case.world, *args)
    dist.barrier()  # nobody may close its connections while another still reads from them
    dist.destroy_process_group()
    return result
