"""Samples of a stage that are left out, such as those around a loss spike: those that stay keep their order.

number, in the whole order    0  1  2  3  4  5  6  7  8        skip_samples: [[2, 5]] leaves 2, 3 and 4 out
place, among those that stay  0  1           2  3  4  5
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nanotron.data.order.blend import Blend
from nanotron.data.order.permutation import Indices


class Skips:
    """Ranges [first, end) of sample numbers that are left out; in any order, and they may overlap."""

    def __init__(self, ranges: Sequence[Sequence[int]] = ()) -> None:
        merged: list[list[int]] = []
        for first, end in sorted((first, end) for first, end in ranges):
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([first, end])
        self.ranges = merged
        lengths = np.array([0, *(end - first for first, end in merged)], dtype=np.int64)
        self._skipped = np.cumsum(lengths)  # by the ranges before each one, and by all
        self._places = np.array([first for first, _ in merged], dtype=np.int64) - self._skipped[:-1]

    def numbers(self, places: Indices) -> Indices:
        """The number of each sample that is given by its place."""
        return places + self._skipped[np.searchsorted(self._places, places, side="right")]

    def end(self, num_samples: int) -> int:
        """How many numbers are used up when `num_samples` have been given."""
        return int(self.numbers(np.array([num_samples - 1]))[0]) + 1 if num_samples else 0

    def stay(self, end: int) -> int:
        """How many of the first `end` numbers stay."""
        return end - sum(min(last, end) - first for first, last in self.ranges if first < end)

    def taken(self, blend: Blend, num_samples: int) -> list[int]:
        """How many of the first `num_samples` that stay each source gave."""
        end = self.end(num_samples)
        counts = np.array(blend.taken(end))
        for first, last in self.ranges:
            if first < end:  # whole ranges only: a sample that stays is the last one used
                counts -= np.array(blend.taken(last)) - np.array(blend.taken(first))
        return [int(count) for count in counts]

    @property
    def skipped(self) -> int:
        """How many samples are left out."""
        return int(self._skipped[-1])

    def before(self, end: int) -> list[list[int]]:
        """What is left out of the first `end` numbers."""
        return [[first, min(last, end)] for first, last in self.ranges if first < end]
