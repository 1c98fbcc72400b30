"""A stream in shuffled order: block by block, so that any position is found again from where its block begins.

    stream  0 1 2 3 | 4 5 6 7 | 8 …        blocks of 4 windows
    given   2 0 3 1 | 7 5 4 6 | …          each in an order of its own, chosen by (seed, stage, source, block)

A buffer from which a random window is taken and refilled would reach further, but what it holds depends on all that
came before: to resume, it would have to be saved, or everything read again. Here sample n is a function of the seed
and of block n // 4 alone. While a block is given out the next one is read, a window for a window, so memory is that of
one block and no step waits for a whole one.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from nanotron.data.order.permutation import Indices, derive_key, permute
from nanotron.data.order.windows import Window
from nanotron.data.sources.stream import EndOfData, StreamSource


class ShuffledStream:
    """Gives the windows of `source` in shuffled blocks of `block_size`; the last block may be smaller."""

    def __init__(self, source: StreamSource, block_size: int, *key_parts: int | str) -> None:
        """`key_parts`, with a block's number, choose the order within it."""
        self.name = source.name
        self._source = source
        self._block_size = block_size
        self._key_parts = key_parts
        self._current = self._new_block(0)
        self._given = 0  # windows of the current block
        self._following: _Block | None = None  # None until the current block is read
        self._end: EndOfData | None = None

    def _new_block(self, number: int) -> _Block:
        """The block that begins where the source is."""
        key = derive_key("shuffle", *self._key_parts, number)
        return _Block(number, self._block_size, key, self._source.state_dict())

    def next(self) -> Window:
        """The next window of the block, or the first of the next block; raises EndOfData."""
        if self._following is not None and self._given == len(self._current.windows):
            self._current, self._following, self._given = self._following, None, 0
        if self._following is None:
            self._read(self._current, self._current.size)
            self._following = self._new_block(self._current.number + 1)
        if not self._current.windows:
            assert self._end is not None
            raise self._end
        window = self._current.take(self._given)
        self._given += 1
        self._read(self._following, min(self._given, self._following.size))
        return window

    def _read(self, block: _Block, count: int) -> None:
        """Read until the block has `count` windows, or the source ends."""
        while len(block.windows) < count and self._end is None:
            try:
                block.windows.append(self._source.next())
            except EndOfData as end:
                self._end = end

    def fingerprint(self) -> dict[str, Any]:
        """That of the source."""
        return self._source.fingerprint()

    def state_dict(self) -> dict[str, Any]:
        """The source's position before the block, how the block is shuffled, and how much of it is given out."""
        block, given = self._current, self._given
        if self._following is not None and given == len(block.windows):
            block, given = self._following, 0
        return {"block": block.number, "size": block.size, "key": block.key, "start": block.start, "given": given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that state_dict gave; the block is read again, and ends in the order it was begun in."""
        self._source.load_state_dict(state["start"])
        self._current = _Block(state["block"], state["size"], state["key"], state["start"])
        self._following, self._given, self._end = None, state["given"], None


class _Block:
    """Windows that follow each other in the source, given out in another order; each is kept until then."""

    def __init__(self, number: int, size: int, key: int, start: dict[str, Any]) -> None:
        """`start` is the source's position before the first window."""
        self.number, self.size, self.key, self.start = number, size, key, start
        self.windows: list[Window | None] = []

    @cached_property
    def _order(self) -> Indices:
        return permute(np.arange(len(self.windows)), len(self.windows), self.key)

    def take(self, number: int) -> Window:
        """The window that is given out as number `number`; once, and not before all are read."""
        place = int(self._order[number])
        window, self.windows[place] = self.windows[place], None
        assert window is not None
        return window
