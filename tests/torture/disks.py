"""The disk of a run is full at some byte: a limit on the size of files, then a small file system where one may mount.

The run says so and ends with the code of what its user can mend; the last complete checkpoint is not touched. With room
again the same command goes on, and ends like a run that was left in peace.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanotron.checkpoint.resume import newest_complete
from nanotron.checkpoint.write import Saver
from nanotron.launch import codes
from tests.checkpoint.runs import different, metrics_of, run, values_of
from tests.pool import Pool

STEPS = 4  # from one attack to the next, each saved
MOST = 500_000  # bytes: somewhat more than a checkpoint of the run
ROOM = 64 << 20


def why_not() -> str:
    """Why this machine cannot have a small file system; "" when it can."""
    if os.getuid() != 0:
        return "only root may mount a small file system"
    done = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
    return f"no file system can be mounted here: {done.stderr.decode().strip()}" if done.returncode else ""


@contextmanager
def small_file_system(folder: Path, size: int) -> Iterator[Callable[[int], None]]:
    """A folder on a file system of so many bytes; gives what changes them."""

    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)

    folder.mkdir(parents=True)
    mount(f"size={size}")
    try:
        yield lambda size: mount(f"remount,size={size}")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def values(folder: Path, steps: int) -> dict[str, Any]:
    """A run of one rank that saves every step."""
    changes = {"tokens__train_steps": steps, "tokens__batch_accumulation_per_replica": 2}
    values = values_of(folder, checkpoints__checkpoint_interval=1, **changes)
    values["optimizer"]["learning_rate_scheduler"]["lr_decay_steps"] = 1000  # whatever the number of steps
    return values


def run_with_small_files(rank: int, world: int, values: dict[str, Any], save: int, most: int) -> int:
    """A run of which no file may become larger than ``most`` bytes from a save on."""
    write, saves = Saver._write_shard, [0]

    def limited(self: Saver, *arguments: Any) -> Any:
        saves[0] += 1
        if saves[0] == save:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        return write(self, *arguments)

    Saver._write_shard = limited  # type: ignore[method-assign]
    try:
        return run(rank, world, values)
    finally:
        Saver._write_shard = write  # type: ignore[method-assign]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def survived(folder: Path, go: Callable[[], list[int]]) -> None:
    """Let the run meet its full disk, and see what it makes of it."""
    before = newest_complete(str(folder))
    (code,) = go()
    assert code in (codes.DONE, codes.USER_MISTAKE)
    after = newest_complete(str(folder))
    assert before is None or (after is not None and int(Path(after).name) >= int(Path(before).name))


def limit_files(pool: Pool, folder: Path, seed: int, tell: Callable[[str], None] = print) -> None:
    """Limit the size of files once; raises AssertionError when the run suffers."""
    random_numbers = random.Random(seed)
    save, most = random_numbers.randint(1, STEPS), random_numbers.randrange(MOST)
    tell(f"files of at most {most} bytes from save {save} on")
    limited = values(folder / "limited", STEPS)
    survived(folder / "limited", lambda: pool.run(1, run_with_small_files, limited, save, most))
    _ends_like_one_in_peace(pool, folder, folder / "limited", STEPS)


def fill_disk(pool: Pool, folder: Path, seed: int, tell: Callable[[str], None] = print) -> None:
    """Fill a small file system once; raises AssertionError when the run suffers. Needs `why_not` to find nothing."""
    left = random.Random(seed).randrange(STEPS * MOST)
    with small_file_system(folder / "filled", ROOM) as resize:
        assert pool.run(1, run, values(folder / "filled", STEPS)) == [codes.DONE]
        disk = os.statvfs(folder / "filled")
        tell(f"a disk with {left} bytes left")
        resize((disk.f_blocks - disk.f_bfree) * disk.f_frsize + left)
        survived(folder / "filled", lambda: pool.run(1, run, values(folder / "filled", 2 * STEPS)))
        resize(ROOM)
        _ends_like_one_in_peace(pool, folder, folder / "filled", 2 * STEPS)


def _ends_like_one_in_peace(pool: Pool, folder: Path, attacked: Path, steps: int) -> None:
    for place in (attacked, folder / "peace"):
        assert pool.run(1, run, values(place, steps)) == [codes.DONE]
    assert metrics_of(attacked) == metrics_of(folder / "peace")
    assert different(attacked / str(steps), folder / "peace" / str(steps)) == []
