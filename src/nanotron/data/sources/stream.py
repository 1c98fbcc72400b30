"""Streams: sources that can only be read in order, with a position small enough to put into every checkpoint.

documents   d0 d0 d0 | d1 d1 | d2 d2 d2 d2 d2 | …
windows     └──────────────┘               S+1 tokens each, stepping by S
                           └───────────…
position    (state of the documents before d2, 0 tokens into d2): to resume, read d2 again and skip what was used
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nanotron.data.order.windows import Window, join, token_array
from nanotron.errors import ConfigError
from nanotron.logging import get_logger

logger = get_logger(__name__)

_END = object()

Tokens = npt.NDArray[np.int64]

EMPTY_IN_A_ROW = (1_000, 10_000, 100_000, 1_000_000)
"""Documents without a token after which a stream says so, and at last gives up: it may have no end."""


class EndOfData(Exception):
    """A stage may not repeat its sources and cannot fill another batch; the text is a line for the user."""


class StreamSource(Protocol):
    """A source in which only the next window can be asked for."""

    name: str

    def next(self) -> Window:
        """The window at the position, which moves on; raises EndOfData."""

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data, for comparison when a run resumes."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; before the first `next`."""


class CountedDocuments:
    """Gives any iterable a position: the number of documents read, of which a resumed run skips as many."""

    def __init__(self, documents: Iterable[Any]) -> None:
        self._documents = documents
        self._num_read = 0

    def __iter__(self) -> Iterator[Any]:
        for number, document in enumerate(self._documents):
            if number >= self._num_read:
                self._num_read = number + 1
                yield document

    def state_dict(self) -> dict[str, Any]:
        """How many documents were read."""
        return {"num_read": self._num_read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Skip as many documents when iteration begins."""
        self._num_read = state["num_read"]


class DocumentStream:
    """Windows of documents that come one after another.

    `open_documents` begins an epoch and returns an iterable; one with state_dict and load_state_dict is resumed by
    them, any other by skipping. `encode` makes token ids of a document.
    """

    def __init__(
        self,
        name: str,
        open_documents: Callable[[], Iterable[Any]],
        encode: Callable[[Any], Sequence[int]],
        sequence_length: int,
        *,
        vocab_size: int,
        repeat: bool = True,
        guard: Callable[[str, str], AbstractContextManager[None]] = lambda *_: nullcontext(),
    ) -> None:
        """`guard`, given the stream's name and a place in it, is around what reads the documents."""
        self.name = name
        self._guard = guard
        self._open_documents = open_documents
        self._encode = encode
        self._sequence_length = sequence_length
        self._vocab_size = vocab_size
        self._repeat = repeat
        self._epoch = 0
        self._number = 0  # documents read in this epoch
        self._named_empty = False
        self._empty_in_a_row = 0
        self._documents: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._loaded: dict[str, Any] | None = None  # the position that was gone to, until a document is read there
        self._pending: deque[tuple[dict[str, Any], Tokens]] = deque()  # documents in use, and the state before each
        self._offset = 0  # tokens of the first pending document that are used up
        self._available = 0  # tokens of all pending documents that are not
        self._epoch_is_empty = True

    def _open(self, state: dict[str, Any] | None = None) -> None:
        with self._guard(self.name, ""):
            documents = self._open_documents()
        self._documents = documents if hasattr(documents, "state_dict") else CountedDocuments(documents)
        self._epoch_is_empty = state is None
        if state is not None:
            self._documents.load_state_dict(copy.deepcopy(state))
        self._iterator = iter(self._documents)

    def next(self) -> Window:
        """The next S+1 tokens; the last of them is the first of the window after."""
        needed = self._sequence_length + 1
        while self._available < needed:
            self._read_document()
        parts, offset = [], self._offset
        for _, tokens in self._pending:
            part = tokens[offset : offset + needed]
            parts.append(Window(part, starts=np.empty(0, np.int64)))
            needed, offset = needed - len(part), 0
            if needed == 0:
                break
        self._offset += self._sequence_length
        self._available -= self._sequence_length
        while self._offset >= len(self._pending[0][1]):
            self._offset -= len(self._pending.popleft()[1])
        return join(parts)

    def _read_document(self) -> None:
        if self._documents is None:
            self._open()
        state = self._before_next_document()
        with self._guard(self.name, f": document {self._number}"):
            document = next(self._iterator, _END)
        if document is _END:
            self._end_epoch()
            return
        self._loaded = None
        self._number += 1
        where = f"{self.name}: document {self._number - 1}"
        needed = "a text or a sequence of token ids"
        tokens = token_array(self._encode(document), where, self._vocab_size, needed=needed)
        if tokens.size == 0:
            self._name_empty()
            return
        self._epoch_is_empty, self._empty_in_a_row = False, 0
        used = self._offset if not self._pending else 0  # more than 0 where a run resumes within a document
        self._pending.append((state, tokens))
        self._available += len(tokens) - used

    def _before_next_document(self) -> dict[str, Any]:
        """Where the next document begins, in a copy that reading on does not change.

        Documents that were told where to go may only know that they are there when one of them has been read.
        """
        if self._loaded is not None:
            return self._loaded
        documents = None if self._documents is None else copy.deepcopy(self._documents.state_dict())
        return {"epoch": self._epoch, "number": self._number, "documents": documents, "offset": 0}

    def _name_empty(self) -> None:
        if not self._named_empty:
            self._named_empty = True
            logger.info(f"{self.name}: document {self._number - 1} has no tokens; empty documents are skipped")
        self._empty_in_a_row += 1
        line = f"{self.name}: {self._empty_in_a_row:,} documents in a row have no tokens"
        if self._empty_in_a_row == EMPTY_IN_A_ROW[-1]:
            raise ConfigError(f"{line}; look at what gives them")
        if self._empty_in_a_row in EMPTY_IN_A_ROW:
            logger.warning(f"{line}; still looking for one that has")

    def _end_epoch(self) -> None:
        if self._epoch_is_empty:
            raise ConfigError(f"{self.name} gives no documents")
        if not self._repeat:
            raise EndOfData(f"{self.name} has no documents left and data.repeat is false")
        self._epoch, self._number, self._loaded = self._epoch + 1, 0, None
        self._open()

    def fingerprint(self) -> dict[str, Any]:
        """Nothing but its name is known of a stream."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the state of the documents before the first one in use, and the tokens of it that are used up."""
        return {**self._pending[0][0], "offset": self._offset} if self._pending else self._before_next_document()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that state_dict gave."""
        self._epoch, self._number = state["epoch"], state["number"]
        self._offset, self._available = state["offset"], 0
        self._pending.clear()
        self._documents, self._loaded = None, None
        if state["documents"] is not None:  # else nothing was read yet
            self._open(state["documents"])
            self._loaded = state
