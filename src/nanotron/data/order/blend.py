"""Blending: which source gives sample n of a stage, and which of that source's samples it is.

Weights become whole units of 2**-16. One period of at most 2**16 samples is assigned by an earliest-deadline rule and
repeats for ever, so sample n is answered from (n // period, n % period): nothing is proportional to the corpus.

    units (2, 1, 1), period 4:   owner  0 1 0 2 | 0 1 0 2 | …
                                 turn   0 0 1 0 | 2 1 3 1 | …
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nanotron.data.order.permutation import Indices
from nanotron.errors import ConfigError

RESOLUTION = 2**16
KEY = "dataset_weights"


def round_weights(weights: Sequence[float]) -> list[int]:
    """Weights as whole units of 2**-16 that sum to 2**16, by the largest-remainder rule."""
    for position, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"{KEY}[{position}]={weight} must be a positive number; drop the source to leave it out")
    total = math.fsum(weights)
    exact = [weight / total * RESOLUTION for weight in weights]
    units = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(units)), key=lambda i: (units[i] - exact[i], i))
    for position in by_remainder[: RESOLUTION - sum(units)]:
        units[position] += 1
    for position, (weight, unit) in enumerate(zip(weights, units, strict=True)):
        if unit == 0:
            least = total / RESOLUTION
            raise ConfigError(
                f"{KEY}[{position}]={weight} is less than 2^-16 of the sum of the weights; "
                f"raise it to at least {least:.3g} or drop the source"
            )
    return units


def earliest_deadline_owners(units: Sequence[int]) -> npt.NDArray[np.int32]:
    """The owner of each slot of one period: after any t slots every source has had its share of t within one.

    Turn k of a source with u of P units may not start before slot kP/u and must be done by slot (k+1)P/u; these are
    the windows of a proportionate-fair schedule, for which taking the earliest deadline among the released turns
    always succeeds (Baruah, Cohen, Plaxton and Varvel 1996).
    """
    period = sum(units)
    owners = np.empty(period, dtype=np.int32)
    waiting = [(0, -(-period // unit), source, 0) for source, unit in enumerate(units)]
    heapq.heapify(waiting)
    released: list[tuple[int, int, int]] = []
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, deadline, source, turn = heapq.heappop(waiting)
            heapq.heappush(released, (deadline, source, turn))
        deadline, source, turn = heapq.heappop(released)
        assert slot < deadline, "a turn missed its deadline"
        owners[slot] = source
        unit = units[source]
        release, next_deadline = (turn + 1) * period // unit, -(-(turn + 2) * period // unit)
        if turn + 1 < unit:
            heapq.heappush(waiting, (release, next_deadline, source, turn + 1))
    return owners


class Blend:
    """A repeating assignment of samples to sources."""

    def __init__(self, weights: Sequence[float]) -> None:
        rounded = round_weights(weights)
        divisor = math.gcd(*rounded)
        self.shares = [unit / RESOLUTION for unit in rounded]
        self.units = np.array([unit // divisor for unit in rounded], dtype=np.int64)
        self.period = int(self.units.sum())
        self._owners = earliest_deadline_owners(self.units.tolist())
        self._slots = np.argsort(self._owners, kind="stable")  # the slots of source 0, then of source 1, …
        self._first = np.concatenate([[0], np.cumsum(self.units)])  # where each source's slots begin in _slots
        self._turns = np.empty(self.period, dtype=np.int64)
        self._turns[self._slots] = np.arange(self.period) - np.repeat(self._first[:-1], self.units)

    def locate(self, samples: Indices) -> tuple[npt.NDArray[np.int32], Indices]:
        """For each sample: its source, and how many of that source's samples come before it."""
        periods, slots = np.divmod(samples, self.period)
        owners = self._owners[slots]
        return owners, periods * self.units[owners] + self._turns[slots]

    def taken(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples each source gave."""
        periods, slots = divmod(num_samples, self.period)
        partial = np.bincount(self._owners[:slots], minlength=len(self.units))
        return [int(count) for count in periods * self.units + partial]

    def samples_before_exhaustion(self, lengths: Sequence[int]) -> int:
        """How many samples can be drawn before some source would have to give more than its length."""
        firsts = []
        for source, length in enumerate(lengths):
            periods, turn = divmod(length, int(self.units[source]))
            firsts.append(periods * self.period + int(self._slots[self._first[source] + turn]))
        return min(firsts)
