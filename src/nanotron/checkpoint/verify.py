"""Checksums: every byte that an index answers for, compared with what is stored. No torch."""

from __future__ import annotations

from typing import NamedTuple

import xxhash

from nanotron.checkpoint.format import INDEX, Damaged, Index, key_of, missing_elements
from nanotron.checkpoint.storage import Folder, read_header


class Expected(NamedTuple):
    """What an index says of one box in a file."""

    dtype: str
    shape: tuple[int, ...]
    xxh3: str


def damaged_files(checkpoint: Folder, index: Index, rank: int = 0, world: int = 1) -> list[str]:
    """One line per damaged file among those of a rank's share: files rank, rank + world, rank + 2·world, …

    Each file is read once, from start to end.
    """
    expected: dict[str, dict[str, Expected]] = {name: {} for name in index.files}
    for name, tensor in index.tensors.items():
        if missing_elements(tensor) or any(stored.key != key_of(name, stored.box) for stored in tensor.boxes):
            return [f"{checkpoint.path}/{INDEX} is damaged: the boxes of {name} contradict it"]
        for stored in tensor.boxes:
            entry = Expected(tensor.dtype, stored.box.shape, stored.xxh3)
            expected.setdefault(stored.file, {})[stored.key] = entry
    problems = []
    for name in sorted(expected)[rank::world]:
        try:
            if name not in index.files:
                raise Damaged(f"{checkpoint.path}/{INDEX} lists boxes of {name}, but not that file")
            _check_file(checkpoint, name, index, expected[name])
        except Damaged as error:
            problems.append(str(error))
    return problems


def _check_file(checkpoint: Folder, name: str, index: Index, boxes: dict[str, Expected]) -> None:
    whole = index.files[name]
    path = f"{checkpoint.path}/{name}"
    try:
        size = checkpoint.size(name)
        if size != whole.size:
            raise Damaged(f"{path} has {size} bytes, not {whole.size}")
        if whole.xxh3 is not None:
            if _digests(checkpoint, name, [(0, size)]) != [whole.xxh3]:
                raise Damaged(f"{path} is damaged: its checksum differs")
            return
        entries = read_header(checkpoint, name)[0]
        if {key: entry[:2] for key, entry in boxes.items()} != {key: entry[:2] for key, entry in entries.items()}:
            raise Damaged(f"{path} is damaged: its header does not list what the index does")
        found = _digests(checkpoint, name, [(entry.start, entry.stop) for entry in entries.values()])
        wrong = [key for key, digest in zip(entries, found, strict=True) if digest != boxes[key].xxh3]
        if wrong:
            raise Damaged(f"{path} is damaged: the checksum of {wrong[0]} differs")
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror or error})") from error


def _digests(checkpoint: Folder, name: str, ranges: list[tuple[int, int]]) -> list[str]:
    """xxh3-64 of each of the ascending ranges, the file being read once."""
    digests = [xxhash.xxh3_64() for _ in ranges]
    position, current = 0, 0
    for chunk in checkpoint.stream(name):
        end = position + len(chunk)
        while current < len(ranges) and ranges[current][0] < end:
            start, stop = ranges[current]
            digests[current].update(memoryview(chunk)[max(start - position, 0) : stop - position])
            if stop > end:
                break
            current += 1
        position = end
    return [digest.hexdigest() for digest in digests]
