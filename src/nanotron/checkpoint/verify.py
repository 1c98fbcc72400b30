"""Whether a checkpoint is what its index says: every file, every box, and every byte of them. No torch.

The one check of everybody who reads a checkpoint: resuming, ``model.init_method.path``, generating, inspecting,
exporting.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import xxhash

from nanotron.checkpoint.documents import PARSERS, saved_document
from nanotron.checkpoint.format import INDEX, STATE, Damaged, Index, StoredTensor, key_of, tiles
from nanotron.checkpoint.retention import read_index
from nanotron.checkpoint.storage import Folder, open_folder, read_header
from nanotron.parallel.agreement import Agreement


class Expected(NamedTuple):
    """What an index says of one box in a file."""

    dtype: str
    shape: tuple[int, ...]
    xxh3: str
    counts: bool
    """Whether its bytes are looked at."""


def refuse_damage(checkpoint: str, agreement: Agreement, kinds: Collection[str] | None = None) -> None:
    """Raise ``Damaged``, the same on every rank, unless the checkpoint is whole; of its boxes, those of ``kinds``."""
    if damage := agree_on_damage(agreement, "whole", checkpoint, kinds=kinds):
        raise Damaged(damage)


def agree_on_damage(
    agreement: Agreement,
    question: str,
    checkpoint: str,
    *,
    kinds: Collection[str] | None = None,
    checksums: bool = True,
) -> list[str]:
    """``damaged_files`` of all ranks, each of which looks at its share of the files; the same lines on every rank."""
    folder, rank, world = open_folder(checkpoint), agreement.rank, agreement.world
    try:
        with agreement.at_work(f"reading {checkpoint} to compare checksums"):
            mine = damaged_files(folder, read_index(folder), rank, world, kinds=kinds, checksums=checksums)
    except Damaged as error:  # another node sees another folder
        mine = [f"rank {rank}: {error}"]
    damage: list[str] = agreement.decide(
        f"{question}/damage", mine, lambda lists: [line for part in lists for line in part]
    )
    return damage


def damaged_files(
    checkpoint: Folder,
    index: Index,
    rank: int = 0,
    world: int = 1,
    *,
    kinds: Collection[str] | None = None,
    checksums: bool = True,
) -> list[str]:
    """One line per damaged file among those of a rank's share: files rank, rank + world, rank + 2·world, …

    Each file is read once, from the first byte that counts to the last: all those of text files, and of boxes those of
    ``kinds`` (None: of all). Without ``checksums`` only headers and text files are read.
    """
    expected: dict[str, dict[str, Expected]] = {name: {} for name in index.files}
    for number, (name, tensor) in enumerate(index.tensors.items()):
        if number % world == rank and not _agrees(name, tensor):
            return [f"{checkpoint.path}/{INDEX} is damaged: the boxes of {name} contradict it"]
        counts = kinds is None or name.partition("/")[0] in kinds
        for stored in tensor.boxes:
            entry = Expected(tensor.dtype, stored.box.shape, stored.xxh3, counts)
            expected.setdefault(stored.file, {})[stored.key] = entry
    problems = []
    if rank == 0 and STATE not in index.files:
        problems.append(f"{checkpoint.path}/{INDEX} is damaged: it does not list {STATE}")
    for name in sorted(expected)[rank::world]:
        try:
            if name not in index.files:
                raise Damaged(f"{checkpoint.path}/{INDEX} lists boxes of {name}, but not that file")
            _check_file(checkpoint, name, index, expected[name], checksums=checksums)
        except Damaged as error:
            problems += error.problems
    return problems


def _agrees(name: str, tensor: StoredTensor) -> bool:
    """Whether the boxes of a tensor make up the whole of it, each under its own key."""
    named = all(stored.key == key_of(name, stored.box) for stored in tensor.boxes)
    return named and tiles(tensor.shape, [stored.box for stored in tensor.boxes])


def _check_file(checkpoint: Folder, name: str, index: Index, boxes: dict[str, Expected], *, checksums: bool) -> None:
    whole = index.files[name]
    path = f"{checkpoint.path}/{name}"
    try:
        size = checkpoint.size(name)
        if size != whole.size:
            raise Damaged(f"{path} has {size} bytes, not {whole.size}")
        if whole.xxh3 is None or boxes:
            _check_boxes(checkpoint, name, boxes, checksums=checksums)
        elif checksums and _digests(checkpoint, name, [(0, size)]) != [whole.xxh3]:
            raise Damaged(f"{path} is damaged: its checksum differs")
        document = saved_document(checkpoint, name) if name in PARSERS else None
        if name == STATE and document is not None and document["step"] != index.step:
            raise Damaged(f"{path} is of step {document['step']}, but {INDEX} of step {index.step}")
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror or error})") from error


def _check_boxes(checkpoint: Folder, name: str, boxes: dict[str, Expected], *, checksums: bool) -> None:
    """The header of a shard, and the bytes of the boxes in it that count."""
    entries = read_header(checkpoint, name)[0]
    if {key: entry[:2] for key, entry in boxes.items()} != {key: entry[:2] for key, entry in entries.items()}:
        raise Damaged(f"{checkpoint.path}/{name} is damaged: its header does not list what the index does")
    counted = {key: entry for key, entry in entries.items() if checksums and boxes[key].counts}
    found = _digests(checkpoint, name, [(entry.start, entry.stop) for entry in counted.values()])
    wrong = [key for key, digest in zip(counted, found, strict=True) if digest != boxes[key].xxh3]
    if wrong:
        raise Damaged(f"{checkpoint.path}/{name} is damaged: the checksum of {wrong[0]} differs")


def _digests(checkpoint: Folder, name: str, ranges: list[tuple[int, int]]) -> list[str]:
    """xxh3-64 of each of the ascending ranges, the file being read once."""
    if not ranges:
        return []
    digests = [xxhash.xxh3_64() for _ in ranges]
    position, current = ranges[0][0], 0
    for chunk in checkpoint.stream(name, position, ranges[-1][1]):
        end = position + len(chunk)
        while current < len(ranges) and ranges[current][0] < end:
            start, stop = ranges[current]
            digests[current].update(memoryview(chunk)[max(start - position, 0) : stop - position])
            if stop > end:
                break
            current += 1
        position = end
    return [digest.hexdigest() for digest in digests]
