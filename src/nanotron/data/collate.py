"""From windows to a batch: tokens, labels, positions and, where wanted, document starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nanotron.batch import IGNORED_LABEL
from nanotron.data.order import Indices
from nanotron.data.windows import Window


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
    windows_tokens = np.stack([window.tokens for window in windows])  # [b, s+1]
    tokens, labels = windows_tokens[:, :-1].copy(), windows_tokens[:, 1:].copy()  # [b, s] each
    doc_starts = np.zeros_like(labels)
    for row, window in enumerate(windows):
        if window.targets is not None:
            labels[row, ~window.targets[1:]] = IGNORED_LABEL
        if window.starts is not None and window.starts.size:
            doc_starts[row] = _start_of_each_token(window.starts, labels.shape[1])
            if document_masking:
                labels[row, window.starts - 1] = IGNORED_LABEL
    positions = np.arange(labels.shape[1]) - doc_starts
    wanted = document_masking and bool(doc_starts.any())
    return Rows(tokens, labels, positions, doc_starts if wanted else None)


def _start_of_each_token(starts: Indices, num_tokens: int) -> npt.NDArray[np.int64]:
    """[s] the start of the document that each of the first `num_tokens` tokens lies in."""
    marks = np.zeros(num_tokens, dtype=np.int64)
    inside = starts[starts < num_tokens]  # a document may start at the last token of the window, which is only a label
    marks[inside] = inside
    return np.maximum.accumulate(marks)
