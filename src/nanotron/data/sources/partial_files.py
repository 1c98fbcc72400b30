"""Files of this machine that stand for remote ones, and fill up with what is read of them.

    00000_unshuffled.ds           as long as the remote file, empty but for what was read
    00000_unshuffled.ds.remote    a line of JSON that says where it is from, and a byte per block: 1 when it is here

Whoever reads such a file asks for its range first. Blocks that are missing are fetched, written, made durable and only
then marked: a process killed at any moment leaves nothing wrong, and several may fill one file.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from pydantic import TypeAdapter

from nanotron.checkpoint.storage import RemoteFolder
from nanotron.errors import ConfigError
from nanotron.untrusted import checked, parse_json

BLOCK_BYTES = 1 << 20
MOST_BLOCKS = 64  # of one request
MARK = ".remote"


class Origin(NamedTuple):
    """Where a file is from: ``version`` is another one when the remote file has changed."""

    folder: str
    name: str
    size: int
    version: str


class PartialFile:
    """One such file; raises ValueError when there is none that is whole and well marked."""

    def __init__(self, path: str) -> None:
        self._path, self._mark = path, path + MARK
        try:
            header, _, marks = _read(self._mark).partition(b"\n")
        except FileNotFoundError as error:
            raise ValueError(f"{self._mark} is missing") from error
        self.origin = checked(TypeAdapter(Origin), parse_json(header.decode()))
        self._first = len(header) + 1
        self._marks = marks
        if len(marks) != num_blocks(self.origin.size) or _size(path) != self.origin.size:
            raise ValueError(f"{path} or {self._mark} was cut short")

    def ensure(self, start: int, stop: int) -> None:
        """Have the bytes [start, stop) in the file."""
        first, last = start // BLOCK_BYTES, num_blocks(stop)
        if not all(self._marks[first:last]):
            self._marks = _read(self._mark)[self._first :]  # another process may have fetched them
            for begin, end in self._missing(first, last):
                self.fill(begin, self._fetch(begin * BLOCK_BYTES, min(end * BLOCK_BYTES, self.origin.size)))

    def fill(self, first_block: int, data: bytes | bytearray) -> None:
        """Put whole blocks in place and mark them."""
        try:
            for path, position, content in (
                (self._path, first_block * BLOCK_BYTES, data),
                (self._mark, self._first + first_block, bytes([1]) * num_blocks(len(data))),
            ):
                with open(path, "r+b") as file:
                    file.seek(position)
                    file.write(content)
                    file.flush()
                    os.fdatasync(file.fileno())
        except OSError as error:
            raise ConfigError(
                f"{self._path}: what was read of {self.origin.folder} cannot be kept ({error.strerror}); make room, or"
                " name another folder with dataset_read_path"
            ) from error
        self._marks = _read(self._mark)[self._first :]

    def _missing(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Runs of blocks that are not here, each for one request."""
        for here, numbers in groupby(range(first, last), key=lambda block: self._marks[block]):
            if not here:
                run = list(numbers)
                for begin in run[::MOST_BLOCKS]:
                    yield begin, min(begin + MOST_BLOCKS, run[-1] + 1)

    def _fetch(self, start: int, stop: int) -> bytearray:
        data: bytearray = self._folder.read(self.origin.name, start, stop)
        if len(data) != stop - start:
            raise OSError(errno.EIO, f"gave {len(data)} bytes of {start} to {stop}", self._folder.path)
        return data

    @cached_property
    def _folder(self) -> RemoteFolder:
        return RemoteFolder(self.origin.folder)  # connections do not survive a fork, so made where it is used


def begin(path: str, origin: Origin) -> PartialFile:
    """Make the file, empty, in the place of what was there."""
    for old in (path + MARK, path):
        if os.path.exists(old):
            os.remove(old)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + MARK, "wb") as file:
        file.write(json.dumps(origin).encode() + b"\n" + bytes(num_blocks(origin.size)))
    with open(path, "wb") as file:
        file.truncate(origin.size)
    return PartialFile(path)


def partial_file(path: str) -> PartialFile | None:
    """The file at a path, if it stands for a remote one; raises ConfigError when its mark is damaged."""
    if not os.path.exists(path + MARK):
        return None
    try:
        return PartialFile(path)
    except ValueError as error:
        raise ConfigError(f"{error}; remove both, and they are fetched again") from error


def ensure(path: str, start: int = 0, stop: int | None = None) -> None:
    """Have the bytes [start, stop) in the file at a path, if it stands for a remote one."""
    if partial := partial_file(path):
        partial.ensure(max(0, start), partial.origin.size if stop is None else min(stop, partial.origin.size))


def num_blocks(size: int) -> int:
    """Blocks that hold this many bytes."""
    return -(-size // BLOCK_BYTES)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else -1
