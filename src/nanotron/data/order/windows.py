"""Windows: the rows that training reads, cut from a source's concatenated token files.

    files   [ a a a | b b b b b ] [ c c c c c c | d d ]        one stream of T tokens; | and file edges start documents
    S = 4   └─────────┘                                        window 0: tokens 0 … 4
                    └─────────┘                                window 1: tokens 4 … 8   (steps by S, shares one token)

Every token but the first is a target once per epoch; a tail shorter than S+1 tokens is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nanotron.data.order.permutation import Indices
from nanotron.data.sources.empty_documents import IS_EMPTY, IndexedFile, first_empty_document
from nanotron.errors import ConfigError
from nanotron.logging import get_logger

logger = get_logger(__name__)


class Window(NamedTuple):
    """One row before it becomes tokens and labels."""

    tokens: npt.NDArray[np.int64]
    """[S+1]"""
    starts: Indices | None
    """Indices in 1 … S at which a new document begins, ascending; None: this source does not know its documents."""
    targets: npt.NDArray[np.bool_] | None = None
    """[S+1] whether each token may be a target; None: all may."""


def starts_after(tokens: npt.NDArray[np.int64], eos_id: int) -> Indices:
    """Where documents begin in a window of files, or in a row, that only an end token tells apart."""
    return np.flatnonzero(tokens[:-1] == eos_id) + 1


def empty_window(sequence_length: int) -> Window:
    """A row without any target, which adds nothing to a loss."""
    size = sequence_length + 1
    return Window(np.zeros(size, np.int64), starts=None, targets=np.zeros(size, np.bool_))


def token_array(ids: object, where: str, vocab_size: int, *, needed: str) -> npt.NDArray[np.int64]:
    """What a user's code gave as token ids, as an array; raises ConfigError, beginning with `where`, if it is not."""
    try:
        tokens = np.asarray(ids)
    except ValueError:  # rows of different lengths
        tokens = np.empty((0, 0))
    if tokens.ndim == 1 and tokens.size == 0:
        return tokens.astype(np.int64)
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise ConfigError(f"{where} is {str(ids)[:60]!r}; {needed} is needed")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ConfigError(
            f"{where} has token ids from {tokens.min()} to {tokens.max()}; 0 to {vocab_size - 1} (vocab_size) are "
            f"legal. It begins {tokens[:8].tolist()}"
        )
    return tokens.astype(np.int64, copy=False)


class TokenFile(Protocol):
    """A file of tokens that is read by ranges and never in full."""

    path: str
    num_tokens: int

    @property
    def knows_documents(self) -> bool:
        """Whether the file comes with an index of its documents."""

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The tokens [start, stop), none of them negative."""

    def starts(self, start: int, stop: int) -> Indices | None:
        """The offsets strictly between start and stop at which a document begins; None: boundaries are unknown."""

    def targets(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Which of the tokens [start, stop) may be targets; None: all."""

    def byte_offset(self, token: int) -> int:
        """Where token number `token` lies in the file, for error messages."""


def read_tokens(file: TokenFile, first: int, last: int, vocab_size: int | None) -> npt.NDArray[np.int64]:
    """The tokens [first, last) of a file; raises ConfigError where one is none of the vocabulary's."""
    tokens = file.read(first, last)
    if vocab_size is not None and int(tokens.max()) >= vocab_size:
        position = first + int(np.argmax(tokens >= vocab_size))
        raise ConfigError(
            f"{file.path}: token id {int(tokens.max())} at byte {file.byte_offset(position)} is not below "
            f"vocab_size={vocab_size}; use the tokenizer the file was written with"
        )
    return tokens


class IndexedSource(Protocol):
    """A source in which any window can be asked for by its number: a pure function."""

    name: str

    def __len__(self) -> int:
        """The number of windows in one epoch."""

    def window(self, index: int) -> Window:
        """Window number `index`, the same at every call and on every rank."""

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data, for comparison when a run resumes."""


class TokenWindows:
    """The windows of several token files read as one stream; start-up and memory grow with files, not with tokens."""

    def __init__(
        self,
        name: str,
        files: Sequence[TokenFile],
        sequence_length: int,
        *,
        vocab_size: int | None = None,
        eos_id: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """`eos_id` marks the end of documents in files without an index; tokens past `max_tokens` are left out."""
        self.name = name
        self._files = [file for file in files if file.num_tokens > 0]
        self._sequence_length = sequence_length
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._named_empty = False
        self._ends = np.cumsum([file.num_tokens for file in self._files], dtype=np.int64)
        self.num_tokens = int(self._ends[-1]) if self._files else 0
        if max_tokens is not None:
            self.num_tokens = min(self.num_tokens, max_tokens)
        self._num_windows = max(0, self.num_tokens - 1) // sequence_length
        if self._num_windows == 0:
            raise ConfigError(
                f"{name} holds {self.num_tokens} tokens, fewer than one window of tokens.sequence_length + 1 = "
                f"{sequence_length + 1}; use more data or a shorter sequence"
            )

    def __len__(self) -> int:
        return self._num_windows

    def window(self, index: int) -> Window:
        """Tokens [index·S, index·S + S], wherever the file edges are."""
        assert 0 <= index < self._num_windows, f"window {index} of {self._num_windows} in {self.name}"
        start = index * self._sequence_length
        stop = start + self._sequence_length + 1
        number = int(np.searchsorted(self._ends, start, side="right"))
        if stop <= self._ends[number]:
            return self._part(number, start, stop)
        parts = []
        while start < stop:
            parts.append(self._part(number, start, min(stop, int(self._ends[number]))))
            start, number = int(self._ends[number]), number + 1
        return join(parts)

    def _part(self, number: int, start: int, stop: int) -> Window:
        """The tokens [start, stop) of the stream, all of them in one file."""
        file = self._files[number]
        file_start = int(self._ends[number]) - file.num_tokens
        first, last = start - file_start, stop - file_start
        tokens = read_tokens(file, first, last, self._vocab_size)
        starts = file.starts(first, last)
        if not self._named_empty:
            self._name_empty(file)
        if starts is not None:
            starts = starts - first
        elif self._eos_id is not None:
            starts = starts_after(tokens, self._eos_id)
        return Window(tokens, starts, file.targets(first, last))

    def _name_empty(self, file: TokenFile) -> None:
        """Say once that a document without tokens was met, unless the check of the run has named one.

        At the level of information, which rank 0 alone prints.
        """
        if isinstance(file, IndexedFile) and file.met_empty is not None:
            self._named_empty = True
            if first_empty_document(self._files) is None:
                logger.info(f"{file.document_place(file.met_empty)} {IS_EMPTY}")

    def fingerprint(self) -> dict[str, Any]:
        """Names and sizes of the files, a hash of the first and of the last MiB, and the number of windows."""
        from nanotron.data.sources.fingerprint import fingerprint_files

        return {**fingerprint_files([file.path for file in self._files]), "windows": self._num_windows}


def join(parts: Sequence[Window]) -> Window:
    """Windows end to end; each but the first begins a document."""
    offsets = np.cumsum([0, *(len(part.tokens) for part in parts)])
    starts = None
    if all(part.starts is not None for part in parts):
        inside = [part.starts + offset for part, offset in zip(parts, offsets, strict=False) if part.starts is not None]
        starts = np.sort(np.concatenate([offsets[1:-1], *inside]))
    targets = None
    if any(part.targets is not None for part in parts):
        all_of = [np.ones(len(part.tokens), np.bool_) if part.targets is None else part.targets for part in parts]
        targets = np.concatenate(all_of)
    return Window(np.concatenate([part.tokens for part in parts]), starts, targets)
