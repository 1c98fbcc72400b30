"""Writing one Nanoset file triple: nothing is visible under its final name before all of it is on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from nanotron.checkpoint.storage import LocalFolder


def token_bytes_for(vocab_size: int) -> int:
    """Bytes per token: 2 while every id fits 16 bits, else 4 (datatrove's rule)."""
    return 2 if vocab_size <= 2**16 else 4


def metadata_text(tokenizer: str, token_bytes: int, num_tokens: int) -> str:
    """The three lines of a `.ds.metadata` file; the last is for people, three digits and a suffix: "1.23 MT"."""
    digits, _, power = f"{num_tokens:.2e}".partition("e")
    thousands, rest = divmod(int(power), 3)
    human, suffix = f"{float(digits) * 10**rest:.{2 - rest}f}", ["", "k", "M", "G", "T", "P"][thousands]
    return f"{tokenizer}|{token_bytes}\n{num_tokens}\n{human} {suffix}T"


class NanosetWriter:
    """Writes `X.ds`, `X.ds.index` and `X.ds.metadata`; as a context manager it commits, or removes all on an error.

    The tokens go to `X.ds.partial` first. On commit the index and the metadata are put in place, then the tokens: a
    visible `.ds` is complete. A file without any token is not put in place at all.
    """

    def __init__(self, path: str, *, tokenizer: str, token_bytes: int) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._dtype = np.dtype(f"<u{token_bytes}")
        self._tokens: BinaryIO = open(f"{path}.partial", "wb")  # noqa: SIM115 (closed by commit or discard)
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._targets: list[npt.NDArray[np.uint8]] = []
        self.num_tokens = 0
        self.num_documents = 0

    def write(self, documents: Sequence[Sequence[int]], targets: Sequence[Sequence[bool]] | None = None) -> None:
        """Append documents, each a sequence of token ids; `targets` says which may be targets (all or no call)."""
        lengths = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
        total = int(lengths.sum())
        tokens = np.fromiter(chain.from_iterable(documents), dtype=self._dtype, count=total)
        self._tokens.write(tokens.tobytes())
        if targets is not None:
            self._targets.append(np.fromiter(chain.from_iterable(targets), dtype=np.uint8, count=total))
        self._lengths.append(lengths)
        self.num_tokens += total
        self.num_documents += len(documents)

    def commit(self) -> None:
        """Put the three files in place, the tokens last."""
        self._tokens.flush()
        os.fsync(self._tokens.fileno())
        self._tokens.close()
        if self.num_tokens == 0:
            os.remove(f"{self._path}.partial")
            return
        place, name = os.path.split(self._path)
        folder = LocalFolder(place or ".")
        folder.write(f"{name}.index", [np.cumsum(np.concatenate(self._lengths)).astype("<u8").tobytes()])
        if self._targets:
            assert sum(map(len, self._targets)) == self.num_tokens, "targets were given for some documents only"
            folder.write(f"{name}.loss", [np.concatenate(self._targets).tobytes()])
        text = metadata_text(self._tokenizer, self._dtype.itemsize, self.num_tokens)
        folder.write(f"{name}.metadata", [text.encode()])
        os.replace(f"{self._path}.partial", self._path)

    def discard(self) -> None:
        """Leave nothing behind."""
        self._tokens.close()
        os.remove(f"{self._path}.partial")

    def __enter__(self) -> NanosetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()
