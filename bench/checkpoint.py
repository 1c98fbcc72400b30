"""Checkpoints: saving and loading beside plain sequential writing and reading, a save's stall beside a memory copy.

    python -m bench.checkpoint [--gib 1.0] [--rounds 5] [--folder .]

Contenders alternate within a round; printed are medians of the rounds, after one round that is not counted. Reads are
cold: the page cache is told to drop the file before each. The folder decides which disk is measured.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from nanotron.checkpoint.format import StateShard
from nanotron.checkpoint.read import load
from nanotron.checkpoint.retention import read_index
from nanotron.checkpoint.storage import open_folder
from nanotron.checkpoint.verify import damaged_files
from nanotron.checkpoint.write import Saver
from nanotron.parallel.params import Box

ROWS, COLUMNS = 2048, 1024  # 8 MiB of float32 a tensor
CHUNK = 4 << 20


def timed(action: Callable[[], object]) -> float:
    """Seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def make_pieces(gib: float) -> list[StateShard]:
    """A model state of random tensors."""
    shape = (ROWS, COLUMNS)
    count = max(1, round(gib * 2**30 / (4 * ROWS * COLUMNS)))
    return [StateShard("weight", f"p{i}", shape, Box((0, 0), shape), torch.randn(shape)) for i in range(count)]


def write_plainly(path: Path, size: int) -> None:
    """Write and fsync a file in one sequence, as `dd conv=fsync` does."""
    chunk = os.urandom(CHUNK)
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // CHUNK):
            file.write(chunk)
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    """Read a file from start to end."""
    with open(path, "rb", buffering=0) as file:
        while file.read(CHUNK):
            pass


def drop_from_cache(path: Path) -> None:
    """Make the next read of a file come from the disk."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def copy(pieces: list[StateShard], into: list[StateShard]) -> None:
    """Copy every tensor."""
    for piece, target in zip(pieces, into, strict=True):
        target.tensor.copy_(piece.tensor)


def one_round(folder: Path, saver: Saver, pieces: list[StateShard], loaded: list[StateShard]) -> dict[str, float]:
    """Seconds of each contender, once."""
    plain, shard = folder / "plain", folder / "1" / "shard-00000-of-00001.safetensors"
    seconds = {"write": timed(lambda: write_plainly(plain, sum(piece.tensor.nbytes for piece in pieces)))}
    seconds["copy"] = timed(lambda: copy(pieces, loaded))
    seconds["stall"] = timed(lambda: saver.save(1, pieces, {}))
    seconds["save"] = timed(saver.wait)
    for name, path, action in (
        ("read", plain, lambda: read_plainly(plain)),
        (
            "verify",
            shard,
            lambda: damaged_files(open_folder(str(folder / "1")), read_index(open_folder(f"{folder}/1"))),
        ),
        ("load", shard, lambda: load(str(folder / "1"), loaded)),
    ):
        drop_from_cache(path)
        seconds[name] = timed(action)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=".")
    options = parser.parse_args()
    pieces = make_pieces(options.gib)
    loaded = [piece._replace(tensor=torch.zeros_like(piece.tensor)) for piece in pieces]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        saver = Saver(name)
        rounds = [one_round(Path(name), saver, pieces, loaded) for _ in range(options.rounds + 1)][1:]
    gib = sum(piece.tensor.nbytes for piece in pieces) / 2**30
    for ours, plain, what in (
        ("save", "write", "of sequential writing with fsync (goal: at least 0.7)"),
        ("load", "read", "of sequential reading (goal: at least 0.7)"),
        ("verify", "read", "of sequential reading"),
    ):
        ratio = median(seconds[plain] / seconds[ours] for seconds in rounds)
        rate = gib / median(seconds[ours] for seconds in rounds)
        print(f"{ours:<7} {rate:6.2f} GiB/s   {ratio:5.2f} {what}")
    stall = median(seconds["stall"] / seconds["copy"] for seconds in rounds)
    print(f"stall   {median(s['stall'] for s in rounds):6.3f} s       {stall:5.2f} × a memory copy (goal: at most 1.5)")


if __name__ == "__main__":
    main()
