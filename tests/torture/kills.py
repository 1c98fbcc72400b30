"""A run of several ranks that is killed again and again.

One rank kills itself (SIGKILL) at an instant of a phase, all others die with it, and the run starts again. At the end
its metrics and its weights must be those of a run that was never killed.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nanotron.checkpoint.resume import newest_complete
from nanotron.launch import codes
from tests.checkpoint.runs import different, metrics_of, run, sparse_values_of
from tests.pool import CaseFailed, Pool

LAYOUT = (2, 2, 1)
EXPERT_RANKS = 2
INTERVAL = 2

PHASES = ("step", "snapshot", "shard", "before the index", "before latest.txt", "load")
ONLY_RANK_0 = {"before the index", "before latest.txt"}  # it alone writes them


class Kill(NamedTuple):
    """Which rank dies, in which phase, and the how-manieth time it comes by there."""

    phase: str
    rank: int
    count: int


def draw(phase: str, world: int, random_numbers: random.Random) -> Kill:
    """A rank and an instant, late enough for a checkpoint to be complete since the start where the phase allows it.

    A save waits for the one before it, so whatever dies in a second save leaves a first one.
    """
    rank = 0 if phase in ONLY_RANK_0 else random_numbers.randrange(world)
    counts = {
        "step": random_numbers.randint(2 * INTERVAL + 1, 3 * INTERVAL),
        "snapshot": 2,
        "shard": random_numbers.randint(1, 100),  # of the second save's writes
        "before the index": 2,
        "before latest.txt": 2,
        "load": random_numbers.randint(1, 60),
    }
    return Kill(phase, rank, counts[phase])


def killed_run(rank: int, world: int, values: dict[str, Any], kill: Kill) -> int:
    """A rank of the run; the one that ``kill`` names dies there."""
    if rank == kill.rank:
        arm(kill)
    return run(rank, world, values)


def arm(kill: Kill) -> None:
    """Put the trap where the phase passes by."""
    from nanotron.checkpoint import read, storage, write
    from nanotron.optim.buckets import Buckets

    left = [kill.count]

    def pass_by() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def trapped(*arguments: Any, **options: Any) -> Any:
            pass_by()
            return function(*arguments, **options)

        return trapped

    if kill.phase == "step":
        Buckets.start = before(Buckets.start)
    elif kill.phase == "snapshot":
        write.Snapshot.take = before(write.Snapshot.take)
    elif kill.phase == "before the index":
        write.write_index = before(write.write_index)
    elif kill.phase == "load":
        read.CheckpointTensors.read_into = before(read.CheckpointTensors.read_into)
    elif kill.phase == "before latest.txt":
        write.Saver._tidy = before(write.Saver._tidy)
    else:
        _trap_writes(storage.LocalFolder, pass_by)


def _trap_writes(folder: Any, pass_by: Callable[[], None]) -> None:
    """Cut the second save's shard into short writes, each of which may be the last."""
    plain = folder._write
    shards = set()

    def write(self: Any, file: int, view: memoryview) -> int:
        path = os.readlink(f"/proc/self/fd/{file}")
        shards.update({path} if "shard-" in path else ())
        if len(shards) < 2 or path not in shards:
            return plain(self, file, view)
        pass_by()
        return plain(self, file, view[: max(1, len(view) // 2)] if len(view) > 64 else view)

    folder._write = write


def torture(
    pool: Pool,
    folder: Path,
    kills_per_phase: int,
    seed: int = 0,
    tell: Callable[[str], None] = print,
    layout: tuple[int, int, int] = LAYOUT,
) -> None:
    """Kill a run in every phase, ``kills_per_phase`` times, in random order; raises AssertionError when it suffers."""
    random_numbers, world = random.Random(seed), prod(layout)
    kills = [draw(phase, world, random_numbers) for phase in PHASES * kills_per_phase]
    first, *others = kills  # PHASES begins with one that needs no checkpoint to load
    random_numbers.shuffle(others)
    kills = [first, *others]
    steps = INTERVAL * (2 * len(kills) + 4)
    options = {"tokens__train_steps": steps, "checkpoints__checkpoint_interval": INTERVAL}
    plain, killed = (
        sparse_values_of(folder / name, layout, EXPERT_RANKS, **options)  # some of its layers are dense
        for name in ("plain", "killed")
    )
    assert pool.run(world, run, plain, timeout=3600) == [codes.DONE] * world
    step = 0
    for kill in kills:
        died(pool, world, killed, kill)
        now = newest_step(folder / "killed")
        tell(f"{kill.phase}, rank {kill.rank}: step {step} -> {now}")
        assert now > step or kill.phase == "load", f"no progress: {kill}, step {now}"
        step = now
    assert pool.run(world, run, killed, timeout=3600) == [codes.DONE] * world
    assert metrics_of(folder / "killed") == metrics_of(folder / "plain")
    assert different(folder / "killed" / str(steps), folder / "plain" / str(steps)) == []


def died(pool: Pool, world: int, values: dict[str, Any], kill: Kill) -> None:
    """Run until the kill; anything else that ends the run is an error."""
    with pytest.raises(CaseFailed) as caught:
        pool.run(world, killed_run, values, kill, timeout=600)
    assert f"rank {kill.rank} of {world} failed:\nthe process died, exit code -9" in str(caught.value), caught.value


def newest_step(folder: Path) -> int:
    newest = newest_complete(str(folder))
    return int(Path(newest).name) if newest else 0
