"""Megatron-LM's indexed datasets: X.bin holds the tokens, X.idx says where sequences and documents begin.

X.idx, little-endian:  "MMIDIDX\\0\\0" · uint64 version 1 · uint8 dtype code · uint64 sequences s · uint64 entries d
                       int32 length × s · int64 byte offset × s · int64 first sequence of document × d (last = s)
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from functools import cached_property
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from nanotron.data.order.permutation import Indices
from nanotron.data.sources.nanoset import MappedTokens, memory_map
from nanotron.data.sources.partial_files import ensure
from nanotron.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class MegatronFile(MappedTokens):
    """One `.bin` file whose documents are found through the memory-mapped `.idx` file."""

    knows_documents = True

    def __init__(self, bin_path: str) -> None:
        self._index_path = f"{bin_path.removesuffix('.bin')}.idx"
        self._num_sequences, self._num_entries, dtype = self._read_header()
        super().__init__(bin_path, dtype)
        self.met_empty: int | None = None
        """A document without tokens that `starts` came upon."""

    def _read_header(self) -> tuple[int, int, str]:
        path = self._index_path
        ensure(path, 0, HEADER.size)
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise ConfigError(f"{path}: bytes 0 to 8 are not Megatron's 'MMIDIDX'; this is not an index of a .bin file")
        _, version, code, num_sequences, num_entries = HEADER.unpack(header)
        if version != 1 or code not in TOKEN_TYPES:
            raise ConfigError(
                f"{path}: version {version} (byte 9) and dtype code {code} (byte 17) are not supported; "
                f"version 1 and codes {sorted(TOKEN_TYPES)} are"
            )
        expected = HEADER.size + 12 * num_sequences + 8 * num_entries
        if os.path.getsize(path) < expected:
            raise ConfigError(
                f"{path}: {num_sequences} sequences and {num_entries} document entries need {expected} bytes but the "
                f"file ends at byte {os.path.getsize(path)}; it is truncated"
            )
        return num_sequences, num_entries, TOKEN_TYPES[code]

    @cached_property
    def _arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The byte offsets of sequences and the first sequences of documents, memory-mapped."""
        ensure(self._index_path)
        mapped = memory_map(self._index_path)
        offsets_at = HEADER.size + 4 * self._num_sequences
        offsets = np.frombuffer(mapped, "<i8", self._num_sequences, offsets_at)
        documents = np.frombuffer(mapped, "<i8", self._num_entries, offsets_at + 8 * self._num_sequences)
        if documents.size and int(documents[-1]) != self._num_sequences:
            raise ConfigError(
                f"{self._index_path}: the last document ends at sequence {int(documents[-1])} of "
                f"{self._num_sequences}; the index is corrupt"
            )
        return offsets, documents

    @property
    def num_documents(self) -> int:
        """Documents in the index."""
        return max(0, self._num_entries - 1)

    def document_place(self, document: int) -> str:
        """Where the index says with which sequence this document begins."""
        byte = HEADER.size + 12 * self._num_sequences + 8 * document
        return f"{self._index_path}: document {document} (byte {byte})"

    def ends(self, first: int, last: int) -> Indices:
        """The token offsets at which the documents first … last - 1 end."""
        offsets, documents = self._arrays
        sequences = documents[first + 1 : last + 1]
        if ((sequences < 0) | (sequences > self._num_sequences)).any():
            self._refuse_order(first, last)
        inside = sequences[sequences < self._num_sequences]
        ends = offsets[inside] // self.dtype.itemsize
        ends = np.concatenate([ends, np.full(len(sequences) - len(inside), self.num_tokens)])
        if (np.diff(ends, prepend=0) < 0).any() or (ends.size and ends[-1] > self.num_tokens):
            self._refuse_order(first, last)
        return ends

    def _refuse_order(self, first: int, last: int) -> NoReturn:
        raise ConfigError(f"{self._index_path}: documents {first} to {last} are not in order; the index is corrupt")

    def _document_start(self, document: int) -> int:
        """The token at which a document begins."""
        offsets, documents = self._arrays
        sequence = int(documents[document])
        if not 0 <= sequence <= self._num_sequences:
            self._refuse_order(document, document)
        at_end = sequence == self._num_sequences  # an empty document may be the last
        return self.num_tokens if at_end else int(offsets[sequence]) // self.dtype.itemsize

    def starts(self, start: int, stop: int) -> Indices:
        """The document starts strictly between start and stop; binary search touches a few pages of the index."""
        numbers = range(self._num_entries - 1)
        first = bisect_right(numbers, start, key=self._document_start)
        last = bisect_left(numbers, stop, lo=first, key=self._document_start)
        found = [self._document_start(document) for document in range(first, last)]
        if found != sorted(found) or (found and (found[0] <= start or found[-1] >= min(stop, self.num_tokens))):
            self._refuse_order(first, last)
        if first > 1 and self._document_start(first - 1) == self._document_start(first - 2) == start:
            self.met_empty = first - 2
        starts = np.array(found, dtype=np.int64)
        repeated = np.diff(starts) == 0  # an empty document starts where the next one does
        if repeated.any():
            self.met_empty = first + int(np.argmax(repeated))
            return np.unique(starts)
        return starts
