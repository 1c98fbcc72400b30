"""From windows to a batch: tokens, labels, positions and, where wanted, document starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nanotron.batch import IGNORED_LABEL
from nanotron.data.order.permutation import Indices
from nanotron.data.order.windows import Window


class Rows(NamedTuple):
    """A batch in host memory; b rows of s tokens, as in `nanotron.batch.Batch`."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    doc_starts: npt.NDArray[np.int64] | None


def collate(windows: Sequence[Window], *, document_masking: bool) -> Rows:
    """Stack windows of s+1 tokens into rows of s.

    Positions restart at every known document start. With document masking, the first token of a document is not a
    target, and doc_starts is given unless every row is one document.
    """
    shape = len(windows), len(windows[0].tokens) - 1
    tokens, labels, positions = (np.empty(shape, np.int64) for _ in range(3))  # [b, s] each
    index = np.arange(shape[1])
    doc_starts = np.zeros(shape, np.int64) if document_masking else None
    for row, window in enumerate(windows):
        tokens[row], labels[row], positions[row] = window.tokens[:-1], window.tokens[1:], index
        if window.targets is not None:
            labels[row, ~window.targets[1:]] = IGNORED_LABEL
        if window.starts is not None and window.starts.size:
            starts = _start_of_each_token(window.starts, shape[1])
            positions[row] -= starts
            if doc_starts is not None:
                doc_starts[row] = starts
                labels[row, window.starts - 1] = IGNORED_LABEL
    return Rows(tokens, labels, positions, doc_starts if doc_starts is not None and doc_starts.any() else None)


def _start_of_each_token(starts: Indices, num_tokens: int) -> npt.NDArray[np.int64]:
    """[s] the start of the document that each of the first `num_tokens` tokens lies in."""
    marks = np.zeros(num_tokens, dtype=np.int64)
    inside = starts[starts < num_tokens]  # a document may start at the last token of the window, which is only a label
    marks[inside] = inside
    return np.maximum.accumulate(marks)
