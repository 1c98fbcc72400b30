"""Starting contenders and letting them step in turn, so that all meet the same machine."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from bench.contenders import Contender, Subject
from bench.environments import ROOT, CannotInstall, process_environment, python_of
from bench.shapes import Shape

START_LIMIT_S = 300.0
TURN_LIMIT_S = 600.0  # the first turn may compile
END_LIMIT_S = 10.0


class Failed(Exception):
    """A contender's process ended or took too long; the message is the last line it wrote on its standard error."""


@dataclass
class Measured:
    """What one contender did."""

    seconds: list[float] = field(default_factory=list)
    """Of a step: the mean over each round's turn."""
    first_loss: float | None = None
    warm_up_s: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    """The most that the first process had resident, Python and libraries included."""
    in_use_bytes: int | None = None
    """The most that it had in use in a step, beyond what Python and libraries had: tensors, and what sends them."""
    failure: str | None = None


class Running:
    """The processes of one contender."""

    def __init__(self, contender: Contender, subject: Subject, shape: Shape, folder: Path) -> None:
        world, threads = (1, subject.world * subject.threads) if contender.alone else (subject.world, subject.threads)
        asked = {"shape": asdict(shape), "dtype": subject.dtype, "threads": threads}
        asked |= {"batch_policy": contender.batch_policy and world > 1, **contender.options}
        command = [python_of(contender.environment), "-m", contender.module, json.dumps(asked)]
        shared = process_environment(threads=threads, keep_freed_memory=contender.keep_freed_memory)
        shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        name = re.sub(r"\W+", "-", contender.name)
        self._logs = [folder / f"{name}.{rank}.txt" for rank in range(world)]
        self._processes = []
        for rank, path in enumerate(self._logs):
            with path.open("w") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else log,
                    stderr=log,
                    text=True,
                    cwd=ROOT,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    start_new_session=True,  # Ctrl-C is for the runner; what a contender started ends with it
                )
            self._processes.append(process)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_ready(self) -> None:
        """Wait until it has set itself up. Raises Failed."""
        self._answer(START_LIMIT_S)

    def make_steps(self, count: int) -> dict[str, Any]:
        """Let it make steps, and return their seconds and losses, and the peak of its memory. Raises Failed."""
        for process in reversed(self._processes):  # the first measures: it starts last
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, which the answer tells
                process.stdin.write(f"{count}\n")
                process.stdin.flush()
        answer: dict[str, Any] = self._answer(TURN_LIMIT_S)
        return answer

    def close(self) -> None:
        """End all processes: politely, then not."""
        for process in self._processes:
            with suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
        limit = time.monotonic() + END_LIMIT_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End at once whatever is left, and whatever that started."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _listen(self) -> None:
        stdout = self._processes[0].stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith("@"):  # the rest is what libraries print
                self._lines.put(line[1:])

    def _answer(self, limit_s: float) -> Any:
        """The next line of the first process. Raises Failed when any has ended before it comes."""
        limit = time.monotonic() + limit_s
        while True:
            with suppress(queue.Empty):
                return json.loads(self._lines.get(timeout=0.1))
            ended = [process for process in self._processes if process.poll() is not None]
            if ended and self._lines.empty():
                raise Failed(self._last_words(self._processes.index(ended[0])))
            if time.monotonic() > limit:
                raise Failed(f"no answer in {limit_s:.0f} s; {self._last_words(0)}")

    def _last_words(self, rank: int) -> str:
        """The line of a log that says what went wrong: the last that names an error, else the last."""
        lines = [line.strip() for line in self._logs[rank].read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        code = f"exit code {self._processes[rank].returncode}"
        return (errors or lines or [f"rank {rank}: {code}, nothing on its standard error"])[-1]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def compare(
    subject: Subject,
    contenders: Sequence[Contender],
    shape: Shape,
    folder: Path,
    *,
    rounds: int,
    steps: int,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Measured]:
    """Start all contenders one after the other, then let each make some steps per round, in another order each time.

    One that fails is left out from there on; its measurement tells why. Logs of all processes go to the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    measured = {contender.name: Measured() for contender in contenders}
    running: dict[str, Running] = {}
    try:
        for contender in contenders:
            say(f"starting {contender.name}")
            try:
                running[contender.name] = Running(contender, subject, shape, folder)
                running[contender.name].wait_ready()
                _warm_up(running[contender.name], measured[contender.name], contender.warm_up)
            except (Failed, CannotInstall) as failure:
                _give_up(contender.name, running, measured, failure)
        for number in range(rounds):
            names = [contender.name for contender in contenders if contender.name in running]
            say(f"round {number + 1} of {rounds}, {len(names)} contenders")
            first = number % max(1, len(names))
            for name in names[first:] + names[:first]:
                try:
                    answer = running[name].make_steps(1 + steps)
                    measured[name].peak_bytes, measured[name].in_use_bytes = (
                        answer["peak_bytes"],
                        answer["in_use_bytes"],
                    )
                    measured[name].seconds.append(mean(answer["seconds"][1:]))  # the first brings back paged-out memory
                except Failed as failure:
                    _give_up(name, running, measured, failure)
    finally:
        for one in running.values():
            one.close()
    return measured


def _warm_up(running: Running, measured: Measured, steps: int) -> None:
    """Steps that are not counted; the first of them shows that the loss is that of an untrained model."""
    answer = running.make_steps(steps)
    measured.warm_up_s, measured.first_loss = answer["seconds"], answer["losses"][0]


def _give_up(name: str, running: dict[str, Running], measured: dict[str, Measured], failure: Exception) -> None:
    measured[name].failure = str(failure)
    if name in running:
        running.pop(name).kill()
