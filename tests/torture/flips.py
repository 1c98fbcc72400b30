"""A bit of the newest checkpoint changes between two starts, again and again.

The start either notices, names the damage and goes on from the step before, or the bit did not matter: in the end all
steps and weights are those of a run that was left in peace.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from nanotron.checkpoint.resume import newest_complete
from nanotron.launch import codes
from tests.checkpoint.runs import different, metrics_of, run, values_of
from tests.pool import Pool


def flip(file: Path, bit: int) -> None:
    """Change one bit of a file."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def torture(pool: Pool, folder: Path, num_flips: int, seed: int, tell: Callable[[str], None] = print) -> None:
    """Flip a bit after each step of a run; raises AssertionError when it suffers."""
    random_numbers = random.Random(seed)
    steps = num_flips + 2

    def go_on(name: str, last: int) -> None:
        changes = {"tokens__train_steps": last, "tokens__batch_accumulation_per_replica": 2}
        values = values_of(folder / name, checkpoints__checkpoint_interval=1, **changes)
        values["optimizer"]["learning_rate_scheduler"]["lr_decay_steps"] = steps
        assert pool.run(1, run, values) == [codes.DONE]

    go_on("plain", steps)
    go_on("flipped", 2)
    for step in range(2, steps):
        newest = newest_complete(str(folder / "flipped"))
        assert newest is not None
        files = sorted(file for file in Path(newest).iterdir() if file.stat().st_size)
        file = random_numbers.choice(files)
        bit = random_numbers.randrange(8 * file.stat().st_size)
        tell(f"bit {bit} of {Path(newest).name}/{file.name}")
        flip(file, bit)
        go_on("flipped", step + 1)
    assert metrics_of(folder / "flipped") == metrics_of(folder / "plain")
    assert different(folder / "flipped" / str(steps), folder / "plain" / str(steps)) == []
