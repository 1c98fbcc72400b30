"""Sharing a stream's rows: one rank of each replica reads, the others receive; from host to host, by no device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanotron.data.collate import Rows
from nanotron.data.sources.stream import EndOfData

if TYPE_CHECKING:
    from nanotron.parallel.mesh import Mesh


class ReplicaShare:
    """Broadcasts the microbatches of a step from the replica's first rank; the identity on a replica of one rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._source = mesh.ranks_along("pp", "cp", "tp")[0]
        self._group = mesh.group("pp", "cp", "tp", purpose="rows")
        self.is_reader = mesh.rank == self._source

    def share(self, rows: Sequence[Rows] | EndOfData | None, shape: tuple[int, int, int]) -> list[Rows]:
        """The reader's rows, or its EndOfData, on every rank; `shape` is (microbatches, b, s).

        One message: [end of data, doc_starts of each microbatch or not, tokens, labels, positions, doc_starts].
        """
        if self._group is None:
            if isinstance(rows, EndOfData):
                raise rows
            assert rows is not None
            return list(rows)
        num_microbatches = shape[0]
        message = torch.zeros(1 + num_microbatches + 4 * int(np.prod(shape)), dtype=torch.int64)
        if isinstance(rows, EndOfData):
            message[0] = 1
        elif rows is not None:
            _fill(message[1:], rows)
        torch.distributed.broadcast(message, self._source, group=self._group)
        if message[0]:
            raise rows if isinstance(rows, EndOfData) else EndOfData("the stream has ended")
        masked = message[1 : 1 + num_microbatches].tolist()
        tokens, labels, positions, starts = message[1 + num_microbatches :].reshape(4, *shape).numpy()
        return [
            Rows(tokens[number], labels[number], positions[number], starts[number] if masked[number] else None)
            for number in range(num_microbatches)
        ]


def _fill(message: torch.Tensor, rows: Sequence[Rows]) -> None:
    """Lay the microbatches out as `share` says."""
    arrays = message.numpy()
    arrays[: len(rows)] = [part.doc_starts is not None for part in rows]
    columns = arrays[len(rows) :].reshape(4, len(rows), *rows[0].tokens.shape)  # [4, microbatches, b, s]
    for number, part in enumerate(rows):
        columns[:3, number] = part.tokens, part.labels, part.positions
        if part.doc_starts is not None:
            columns[3, number] = part.doc_starts
