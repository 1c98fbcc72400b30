"""Checksums: every byte that an index answers for, compared with what is stored. No torch."""

from __future__ import annotations

import xxhash

from nanotron.checkpoint.format import INDEX, Damaged, Index, StoredBox
from nanotron.checkpoint.storage import Folder, read_header


def damaged_files(checkpoint: Folder, index: Index, rank: int = 0, world: int = 1) -> list[str]:
    """One line per damaged file among those of a rank's share: files rank, rank + world, rank + 2·world, …

    Each file is read once, from start to end.
    """
    boxes: dict[str, list[StoredBox]] = {name: [] for name in index.files}
    for tensor in index.tensors.values():
        for stored in tensor.boxes:
            boxes.setdefault(stored.file, []).append(stored)
    problems = []
    for name in sorted(boxes)[rank::world]:
        try:
            if name not in index.files:
                raise Damaged(f"{checkpoint.path}/{INDEX} lists boxes of {name}, but not that file")
            _check_file(checkpoint, name, index, boxes[name])
        except Damaged as error:
            problems.append(str(error))
    return problems


def _check_file(checkpoint: Folder, name: str, index: Index, boxes: list[StoredBox]) -> None:
    expected = index.files[name]
    path = f"{checkpoint.path}/{name}"
    try:
        size = checkpoint.size(name)
        if size != expected.size:
            raise Damaged(f"{path} has {size} bytes, not {expected.size}")
        if expected.xxh3 is not None:
            if _digests(checkpoint, name, [(0, size)]) != [expected.xxh3]:
                raise Damaged(f"{path} is damaged: its checksum differs")
            return
        entries = read_header(checkpoint, name)[0]
        if {stored.key: stored.box.shape for stored in boxes} != {key: entry.shape for key, entry in entries.items()}:
            raise Damaged(f"{path} is damaged: its header does not list what the index does")
        wanted = {stored.key: stored.xxh3 for stored in boxes}
        found = _digests(checkpoint, name, [(entry.start, entry.stop) for entry in entries.values()])
        wrong = [key for key, digest in zip(entries, found, strict=True) if digest != wanted[key]]
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
