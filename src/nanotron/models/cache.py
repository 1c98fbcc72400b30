"""The KV cache: keys and values of the tokens that went through a chunk, so that the next one costs the work of one.

one layer       |  seen by earlier calls  |  this call's s  |  room for later ones  |
k, v            0                       n − s               n                     room      [b, room, kv/t, e]
"""

from __future__ import annotations

from torch import Tensor


class LayerCache:
    """What one layer keeps. ``room``: tokens of a row that will fit; memory is taken at the first call."""

    def __init__(self, room: int) -> None:
        self._room, self._length = room, 0
        self._kept: tuple[Tensor, Tensor] | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the next s tokens' keys and values [b, s, kv/t, e]; return those of all n so far, [b, n, kv/t, e]."""
        if self._kept is None:
            shape = (k.shape[0], self._room, *k.shape[2:])
            self._kept = k.new_empty(shape), v.new_empty(shape)
        start, self._length = self._length, self._length + k.shape[1]
        assert self._length <= self._room, f"{self._length} tokens, room for {self._room}"
        keys, values = self._kept
        keys[:, start : self._length], values[:, start : self._length] = k, v
        return keys[:, : self._length], values[:, : self._length]


def new_cache(num_layers: int, room: int) -> list[LayerCache]:
    """An empty cache for a chunk of ``num_layers`` layers."""
    return [LayerCache(room) for _ in range(num_layers)]
