"""What a context-parallel rank holds of each row, and which tokens of the whole row its own see.

c = 2    row    │ piece 0 │ piece 1 │ piece 2 │ piece 3 │
         rank 0   held                          held          an early piece and a late one:
         rank 1             held      held                    causal attention is equal work
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nanotron.batch import Spans, context_pieces, context_spans, document_spans

if TYPE_CHECKING:
    import numpy.typing as npt

    from nanotron.parallel.mesh import Mesh


class ContextCut:
    """Cuts rows for one rank of a mesh; of one context-parallel rank, it is the identity."""

    def __init__(self, mesh: Mesh, mode: str) -> None:
        self._rank, self._ranks, self._mode = mesh.coord("cp"), mesh.size("cp"), mode

    def of(
        self, shape: Sequence[int], doc_starts: npt.NDArray[np.int64] | None
    ) -> tuple[slice | npt.NDArray[np.int64], Spans | None]:
        """The tokens of each row that the rank holds, and the spans of rows [b, s] whose documents begin there."""
        rows, length = shape
        spans = None if doc_starts is None else document_spans([np.unique(row).tolist() for row in doc_starts], length)
        if self._ranks == 1:
            return slice(None), spans
        pieces = context_pieces(length, self._rank, self._ranks)
        held = np.concatenate([np.arange(lo, hi) for lo, hi in pieces])
        if self._mode == "ALL_TO_ALL":  # attention sees whole rows
            return held, spans
        return held, context_spans(spans or document_spans([[0]] * rows, length), pieces)
