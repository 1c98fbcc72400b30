"""The `nanotron` command, scripts and torchrun, each in a process of its own that need not import torch again.

    done = nanotron(folder, "check", "x.yaml")          # returncode, stdout, stderr, as subprocess.run has them
    running = Command(folder, "train", "x.yaml")        # pid, poll, wait, send_signal, communicate, as Popen has them

The process is forked from one that has imported what they have in common: a tenth of the time of `python -m …`, and
whatever a process is, it is: a working directory, an environment, signals, an exit code, the lines of two streams.
What it cannot tell is what a command imports; tests of that start an interpreter (`tests/test_imports.py`).
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

from tests.pool import forkserver

LONGEST_S = 300.0  # no measure of anything: a process that hangs is ended


class Command:
    """A process that runs `nanotron` with some arguments; or torchrun or a script, where the first names one."""

    def __init__(self, folder: Path, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
        self._arguments = [str(argument) for argument in arguments]
        self._output = tempfile.TemporaryDirectory(prefix="command-")
        streams = [os.path.join(self._output.name, name) for name in ("stdout", "stderr")]
        given = (os.fspath(folder), self._arguments, {**os.environ, **(environment or {})}, streams)
        self._process = forkserver().Process(target=_become, args=given)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Of `subprocess`: minus the signal's number if one ended it, None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float = LONGEST_S) -> int:
        """Wait for its end; kills it and raises TimeoutError when it takes longer than ``timeout`` seconds."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            self.send_signal(signal.SIGKILL)
            self._process.join()
            raise TimeoutError(f"{self._arguments} had not ended after {timeout:g} s: {self._texts()}")
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float = LONGEST_S) -> tuple[str, str]:
        """Wait for its end; what it printed to stdout and stderr."""
        self.wait(timeout)
        return self._texts()

    def _texts(self) -> tuple[str, str]:
        stdout, stderr = (Path(self._output.name, name).read_text() for name in ("stdout", "stderr"))
        return stdout, stderr


def nanotron(folder: Path, *arguments: object, environment: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """Run a command to its end; or torchrun or a script, named in its place."""
    command = Command(folder, *arguments, environment=environment)
    stdout, stderr = command.communicate()
    return CompletedProcess(arguments, command.wait(), stdout, stderr)


def _become(folder: str, arguments: list[str], environment: dict[str, str], streams: list[str]) -> None:
    """In the new process: be what a shell would have started there."""
    for descriptor, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    gc.freeze()  # what was imported: a short life need not look through it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if arguments[0].endswith(".py"):
        sys.argv, sys.path[0:0] = arguments, [os.path.dirname(os.path.abspath(arguments[0]))]
        runpy.run_path(arguments[0], run_name="__main__")
        return
    name = "torch.distributed.run" if arguments[0] == "torchrun" else "nanotron.cli"
    sys.argv = [arguments[0], *arguments[1:]] if arguments[0] == "torchrun" else ["nanotron", *arguments]
    sys.modules["__main__"] = program = importlib.import_module(name)  # what processes that it spawns look for
    sys.exit(program.main())
