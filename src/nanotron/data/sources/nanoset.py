"""Nanosets: folders of tokenized files in the format that datatrove writes.

X.ds            little-endian unsigned tokens, 2 or 4 bytes each, documents back to back, no header
X.ds.index      one little-endian uint64 per document: the token offset at which it ends
X.ds.metadata   text: "tokenizer|bytes per token", number of tokens, the same number for humans
"""

from __future__ import annotations

import math
import mmap
import os
import resource
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from nanotron.data.order.permutation import Indices
from nanotron.data.sources.partial_files import ensure, partial_file
from nanotron.errors import ConfigError

FILES_LEFT = 64  # for all but data: checkpoints, connections, logs


@dataclass(frozen=True)
class Metadata:
    """The facts in a `.ds.metadata` file."""

    tokenizer: str
    token_bytes: int
    num_tokens: int


def read_metadata(path: str) -> Metadata | None:
    """The metadata beside the `.ds` file `path`, or None when there is none."""
    try:
        text = Path(f"{path}.metadata").read_bytes()
    except FileNotFoundError:
        return None
    try:
        lines = text.decode().splitlines()
        # Nanosets without a tokenizer's name say the size twice: "Unknown Tokenizer|2|2".
        name, _, size = lines[0].rpartition("|")
        metadata = Metadata(name.removesuffix(f"|{size}"), int(size), int(lines[1]))
    except (IndexError, ValueError):  # also for bytes that are no text
        raise ConfigError(
            f"{path}.metadata must start with two lines, 'tokenizer|bytes per token' and the number of tokens; "
            "write the file again with `nanotron tokenize`"
        ) from None
    if metadata.token_bytes not in (2, 4):
        raise ConfigError(f"{path}.metadata: {metadata.token_bytes} bytes per token; a Nanoset has 2 or 4")
    return metadata


def memory_map(path: str) -> mmap.mmap:
    """The file, mapped read-only; no page of it is read until it is touched, and no more than is touched."""
    with open(path, "rb") as file:
        kept = os.dup(file.fileno())  # as the map will
        os.close(kept)
        _keep_room(path, kept)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        # Otherwise the kernel reads 128 KiB around each 4 KiB window, thirty times what a shuffled order needs.
        mapped.madvise(mmap.MADV_RANDOM)
    return mapped


def most_files() -> float:
    """How many files a process of this machine may have open, once it has asked for all that it may."""
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return math.inf if highest == resource.RLIM_INFINITY else highest - FILES_LEFT


def _keep_room(path: str, descriptor: int) -> None:
    """Raise this process's limit of open files before maps, of which each holds a file open, come near to it."""
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or descriptor < limit - FILES_LEFT:
        return
    if limit == highest:
        raise ConfigError(
            f"{path}: too many files: {descriptor} are open, and a process may open {highest}; raise that "
            "(ulimit -Hn), or write fewer and larger files"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))


class MappedTokens:
    """Raw tokens in a memory-mapped file, from byte `offset` on; opened at the first read."""

    def __init__(self, path: str, dtype: npt.DTypeLike, *, offset: int = 0) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self._offset = offset
        self._partial = partial_file(path)
        size = os.path.getsize(path) - offset
        if size % self.dtype.itemsize:
            raise ConfigError(
                f"{path}: {size} bytes of tokens are not a multiple of {self.dtype.itemsize} bytes per token; "
                f"the file is truncated after token {size // self.dtype.itemsize}"
            )
        self.num_tokens = size // self.dtype.itemsize

    @cached_property
    def _mapped(self) -> mmap.mmap:
        return memory_map(self.path)

    def byte_offset(self, token: int) -> int:
        """Where token number `token` lies in the file."""
        return self._offset + token * self.dtype.itemsize

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The tokens [start, stop), asked from the disk as one request; raises ConfigError where one is negative."""
        assert 0 <= start < stop <= self.num_tokens, f"tokens {start}:{stop} of {self.num_tokens} in {self.path}"
        first_byte, last_byte = self.byte_offset(start), self.byte_offset(stop)
        if self._partial is not None:
            self._partial.ensure(first_byte, last_byte)
        page = first_byte - first_byte % mmap.PAGESIZE
        if hasattr(mmap, "MADV_WILLNEED"):
            self._mapped.madvise(mmap.MADV_WILLNEED, page, last_byte - page)
        stored = np.frombuffer(self._mapped, self.dtype, stop - start, first_byte)
        tokens = stored.astype(np.int64)
        if self._may_be_negative and int(tokens.min()) < 0:
            place = int(np.argmax(tokens < 0))
            raise ConfigError(self._negative(start + place, stored[place]))
        if hasattr(mmap, "MADV_DONTNEED"):
            # Leaves the page cache as it is and takes the pages off this process, which would grow with every step.
            self._mapped.madvise(mmap.MADV_DONTNEED, page, last_byte - page)
        return tokens

    @property
    def _may_be_negative(self) -> bool:
        """Whether a stored number can be negative, or so large that it is as int64."""
        return self.dtype.kind == "i" or self.dtype.itemsize == 8

    def _negative(self, token: int, stored: np.integer[Any]) -> str:
        limit = np.iinfo(np.int64 if self.dtype.kind == "u" else self.dtype).max
        return (
            f"{self.path}: token {token} (byte {self.byte_offset(token)}) is {stored} as {self.dtype.name}; ids are 0 "
            f"to {limit}. Write the file again, with a wider type if the ids did not fit"
        )

    def targets(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """None: every token may be a target."""
        return None


class NanosetFile(MappedTokens):
    """One `.ds` file and its index."""

    def __init__(self, path: str, *, token_bytes: int) -> None:
        super().__init__(path, f"<u{token_bytes}")
        self.token_bytes = token_bytes
        self.met_empty: int | None = None
        """A document without tokens that `starts` came upon."""

    @property
    def knows_documents(self) -> bool:
        """Whether there is an index."""
        return os.path.exists(f"{self.path}.index")

    def check_index(self) -> None:
        """Raise ConfigError when the index, if there is one, has an impossible size or ends with another token."""
        if not self.knows_documents:
            return
        path = f"{self.path}.index"
        size = os.path.getsize(path)
        if size == 0 or size % 8:
            raise ConfigError(
                f"{path}: {size} bytes are not a positive multiple of 8; the index is truncated at document {size // 8}"
            )
        ensure(path, size - 8)
        end = int(np.fromfile(path, "<u8", offset=size - 8)[0])
        if end != self.num_tokens:
            raise ConfigError(
                f"{path}: the last document ends at token {end} (byte {size - 8}) but {self.path} holds "
                f"{self.num_tokens} tokens; one of the two is truncated"
            )

    @cached_property
    def document_ends(self) -> npt.NDArray[np.uint64] | None:
        """The memory-mapped index, or None when the file has none; its length is the number of documents."""
        if not self.knows_documents:
            return None
        self.check_index()
        ensure(f"{self.path}.index")
        ends: npt.NDArray[np.uint64] = np.frombuffer(memory_map(f"{self.path}.index"), "<u8")
        return ends

    @cached_property
    def num_documents(self) -> int:
        """Documents in the index; 0 without one."""
        self.check_index()
        return os.path.getsize(f"{self.path}.index") // 8 if self.knows_documents else 0

    def document_place(self, document: int) -> str:
        """Where the index says where this document ends."""
        return f"{self.path}.index: document {document} (byte {document * 8})"

    def ends(self, first: int, last: int) -> Indices:
        """The token offsets at which the documents first … last - 1 end; read from the file, not page by page."""
        last = min(last, self.num_documents)
        ensure(f"{self.path}.index", 8 * first, 8 * last)
        ends = np.fromfile(f"{self.path}.index", "<u8", last - first, offset=8 * first)
        wrong = np.flatnonzero((ends > self.num_tokens) | (np.diff(ends.astype(np.int64), prepend=0) < 0))
        if wrong.size:
            self._refuse_order(first + int(wrong[0]))
        return ends.astype(np.int64)

    def _refuse_order(self, document: int) -> NoReturn:
        raise ConfigError(
            f"{self.document_place(document)} ends before it begins, or after the last token; write the index again "
            "with `nanotron tokenize`"
        )

    def starts(self, start: int, stop: int) -> Indices | None:
        """The document starts strictly between start and stop, by binary search in the index."""
        ends = self.document_ends
        if ends is None:
            return None
        # The needles must be uint64: any other dtype makes searchsorted convert, and so read, the whole index.
        first = int(ends.searchsorted(np.uint64(start), side="right"))
        last = int(ends.searchsorted(np.uint64(stop), side="left"))
        inside = ends[first:last].astype(np.int64)
        gaps = np.diff(inside)
        if (gaps < 0).any():
            self._refuse_order(first + 1 + int(np.argmax(gaps < 0)))
        if first and int(ends[first - 1]) == start == (int(ends[first - 2]) if first > 1 else 0):
            self.met_empty = first - 1
        if (gaps == 0).any():
            self.met_empty = first + 1 + int(np.argmax(gaps == 0))
            return np.unique(inside)  # an empty document ends where it starts
        return inside

    @cached_property
    def _loss(self) -> MappedTokens | None:
        path = f"{self.path}.loss"
        if not os.path.exists(path):
            return None
        loss = MappedTokens(path, "<u1")
        if loss.num_tokens != self.num_tokens:
            raise ConfigError(
                f"{path}: {loss.num_tokens} bytes for the {self.num_tokens} tokens of {self.path}; each has one"
            )
        return loss

    def targets(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """What the `.ds.loss` file says, if there is one."""
        return None if self._loss is None else self._loss.read(start, stop).astype(np.bool_)


def find_nanoset_files(folder: str) -> list[str]:
    """The `.ds` files under a folder, in the order in which they are concatenated."""
    return sorted(str(path) for path in Path(folder).rglob("*.ds"))


def open_nanoset_file(path: str, *, token_bytes: int | None = None) -> NanosetFile:
    """Open a `.ds` file with the token size of its metadata, else `token_bytes`, and check their sizes."""
    metadata = read_metadata(path)
    size = metadata.token_bytes if metadata else token_bytes
    if size is None:
        raise ConfigError(f"{path}.metadata is missing; set dataset.token_size_in_bytes to 2 or 4")
    file = NanosetFile(path, token_bytes=size)
    if metadata and metadata.num_tokens != file.num_tokens:
        end = f"is truncated at byte {file.num_tokens * size}"
        if file.num_tokens > metadata.num_tokens:
            end = f"should end at byte {metadata.num_tokens * size}"
        raise ConfigError(
            f"{path}: holds {file.num_tokens} tokens but {path}.metadata says {metadata.num_tokens}; "
            f"the file {end}, write it again"
        )
    if metadata is None and file.num_tokens == 0:
        raise ConfigError(f"{path} is empty; remove it or write it again")
    return file
