"""Which rank failed first: the one line that matters among N tracebacks.

Every failing rank writes ``failures/rank-N.json`` in the run directory. A rank whose connection broke only suffers what
another one did, so *its* failure never counts as the first where a real one exists; and a rank that waited in vain
points to one that is behind. NCCL ends a rank that waited too long by a thread of its own, its watchdog, before Python
can say anything. What is left then is ``failures/rank-N.stack``, by the signal's handler: where Python's threads were.

    kind      own      raised by this rank's own work                       first of all, by time
              killed   ended by a signal (only the parent can tell)         alike
              lost     gives no sign of life (another rank tells)           alike
              stuck    lives, and does not go on (another rank tells)       then
              timeout  waited too long for a peer                           then the rank that is furthest behind
              peer     lost its connection to a peer                        last
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from nanotron.parallel.store import LostPeers, LostStore
from nanotron.untrusted import checked, parse_json

KINDS = ("own", "killed", "lost", "stuck", "timeout", "peer")
STACK_SIGNAL = signal.SIGQUIT
"""A rank that gets it prints the stack of each of its threads and goes on."""
SOURCE_LINE = re.compile(r"\[\S+\.(cc|cpp|h):\d+\] ")  # of torch's own sources
TIMEOUT_WORDS = ("timed out", "timeout")
PEER_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "connection was likely closed",
    "remote process has terminated",
    "remote process exited",
    "nccl communicator was aborted",
)


@dataclass(frozen=True)
class Failure:
    """How one rank ended. ``where`` tells the stage, step and action it was at, as far as known."""

    rank: int
    kind: str
    error: str
    when: float = field(default_factory=time.time)  # seconds since the epoch
    host: str = field(default_factory=socket.gethostname)
    where: dict[str, Any] = field(default_factory=dict)
    traceback: str = ""

    def __str__(self) -> str:
        at = ", ".join(f"{name} {value}" for name, value in self.where.items())
        return f"rank {self.rank} on {self.host}" + (f" ({at})" if at else "") + f": {self.error}"


def failure_of(error: BaseException, rank: int) -> Failure:
    """Describe an exception that ended this rank; ``errors.located`` has noted on it where it happened."""
    text = SOURCE_LINE.sub("", " ".join(f"{type(error).__name__}: {error}".split()))
    return Failure(
        rank=rank,
        kind=_kind_of(error),
        error=text[:500],
        where=dict(getattr(error, "where", {})),
        traceback="".join(traceback.format_exception(error)),
    )


def _kind_of(error: BaseException) -> str:
    if isinstance(error, LostPeers):
        return "peer" if isinstance(error, LostStore) else "timeout"
    if not isinstance(error, (RuntimeError, ConnectionError, TimeoutError)):
        return "own"
    text = str(error).lower()
    if any(words in text for words in PEER_WORDS):
        return "peer"
    return "timeout" if any(words in text for words in TIMEOUT_WORDS) else "own"


def first_of(failures: Iterable[Failure]) -> Failure | None:
    """The failure that caused the others, as far as it can be told."""

    def order(failure: Failure) -> tuple[int, float, float]:
        behind = float(failure.where.get("step", 0)) if failure.kind == "timeout" else 0.0
        return max(0, KINDS.index(failure.kind) - 2), behind, failure.when

    return min(failures, key=order, default=None)


def verdict(first: Failure, silent: Sequence[int] | None, hosts: Sequence[str] = ()) -> str:
    """The line that names where it began: the first failure, or the ranks that its rank waited for in vain.

    ``silent`` is None where no other rank could be asked; ``hosts``: theirs, as far as known.
    """
    if silent is None:
        return f"failed first, as far as one can tell without the launcher's store: {first}"
    if first.kind not in ("timeout", "peer") or not silent:
        return f"failed first: {first}"
    who = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
    who += f" on {', '.join(hosts)}" if hosts else ""
    if first.kind == "timeout":
        return f"failed first: {who} fell behind and said nothing; waiting for it: {first}"
    return f"failed first: {who} left and said nothing; noticed by {first}"


def tell_torchrun(line: str, first: Failure, mine: Failure) -> None:
    """Let torchrun's report, which is what a user reads last, show our line with the rank that it holds responsible.

    That is the one with the earliest time in the file that it asks each rank for.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    when = first.when if first.rank == mine.rank else max(mine.when, first.when + 1)  # it counts whole seconds
    details = {"py_callstack": line if first.rank == mine.rank else str(mine), "timestamp": str(int(when))}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": details}}), encoding="utf-8")


RECORD = TypeAdapter(Failure)


def record_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's failure is recorded."""
    return run_dir / "failures" / f"rank-{rank}.json"


def stack_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's stacks are put when a signal such as SIGABRT or SIGSEGV ends it."""
    return run_dir / "failures" / f"rank-{rank}.stack"


@contextmanager
def stacks_on_record(run_dir: Path, rank: int) -> Iterator[None]:
    """While the block lasts, what ends this rank outside of Python leaves the stacks of Python's threads behind."""
    path = stack_path(run_dir, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w", encoding="utf-8")
    except OSError:  # a full disk, say: then to where errors go
        faulthandler.enable()
        yield
        return
    with file:
        faulthandler.enable(file)
        try:
            yield
        finally:
            faulthandler.disable()
            with suppress(OSError):  # the folder may be gone, or hold what failed
                path.unlink(missing_ok=True)
                path.parent.rmdir()


def record_collectives(environment: MutableMapping[str, str], run_dir: Path) -> None:
    """Let NCCL's watchdog write what each rank had in flight into ``failures/nccl-N`` before it ends a rank."""
    wanted = {
        "TORCH_FR_BUFFER_SIZE": "2000",  # collectives that are remembered
        "TORCH_FR_DUMP_TEMP_FILE": str(run_dir / "failures" / "nccl-"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    for name, value in wanted.items():
        environment.setdefault(name, value)


def judged_by_stack(killed: Failure, run_dir: Path) -> Failure:
    """A rank that a signal ended; one whose watchdog did so only waited, as the stacks that it left behind tell.

    They mark the thread that was ended, unless that was none of Python's.
    """
    try:
        stack = stack_path(run_dir, killed.rank).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return killed
    if not stack.startswith("Fatal Python error: Aborted") or "Current thread" in stack:
        return killed
    return replace(killed, kind="timeout", error=f"waited for a collective until its watchdog ended it{_at(stack)}")


def _at(stack: str) -> str:
    """Of stacks, ` at <file>:<line>`: where the main thread, which comes last, was in our code."""
    *_, main = stack.split("\n\n")
    found = re.search(r'nanotron/(\S+\.py)", line (\d+)', main)
    return f" at {found[1]}:{found[2]}" if found else ""


def write_failure(run_dir: Path, failure: Failure) -> None:
    """Record a failure on disk, whole or not at all."""
    path = record_path(run_dir, failure.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(failure), indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_failures(run_dir: Path) -> list[Failure]:
    """The failures on record, in order of rank, without a file that is none."""
    failures = []
    for path in (run_dir / "failures").glob("rank-*.json"):
        with suppress(OSError, ValueError):
            failures.append(failure_in(path.read_text(encoding="utf-8")))
    return sorted(failures, key=lambda failure: failure.rank)


def failure_in(text: str) -> Failure:
    """The failure of one record; raises ValueError when it is none."""
    failure = checked(RECORD, parse_json(text))
    if failure.kind not in KINDS:
        raise ValueError(f"kind is {failure.kind!r}, none of {', '.join(KINDS)}")
    return failure
