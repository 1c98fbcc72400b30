"""When a loss is a spike: one rule on the run's losses alone, so it says the same on every layout.

A loss is a spike when it exceeds the median of the last 50 losses of its data stage by more than 6 standard deviations
(estimated as 1.4826 × the median absolute deviation, which a spike itself hardly moves) and by more than 5 % of the
median. The rule needs 20 losses first. Losses of a spike do not enter the 50; after 50 in a row they do, as the new
normal. Losses that are not finite are no spikes: the trainer stops at them, or leaves the update out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

WINDOW, NEEDED = 50, 20  # losses
DEVIATIONS, SHARE = 6.0, 0.05
TO_STANDARD_DEVIATION = 1.4826  # of a normal distribution, from its median absolute deviation


class Spike(NamedTuple):
    """The first step of a spike, and what was usual before."""

    step: int
    loss: float
    usual: float

    def __str__(self) -> str:
        return f"step {self.step}: loss spike, {self.loss:.6g} where {self.usual:.6g} was usual"


class LossSpikes:
    """Watches the losses of a run in order of step."""

    def __init__(self, recent: Iterable[float] = (), high: Iterable[float] = (), stage: str | None = None) -> None:
        """What ``state`` gave, to go on from there."""
        self._recent: deque[float] = deque(recent, maxlen=WINDOW)
        self._high = list(high)
        self._stage = stage

    def state(self) -> tuple[list[float], list[float], str | None]:
        """All that decides whether the next loss is a spike."""
        return list(self._recent), self._high, self._stage

    def add(self, step: int, loss: float | None, stage: str) -> Spike | None:
        """Take the next loss; a spike if one begins here. Its further steps are part of it."""
        if stage != self._stage:
            self._stage = stage
            self._recent.clear()
            self._high.clear()
        if loss is None or not math.isfinite(loss):
            return None
        usual = median(self._recent) if self._recent else loss
        if len(self._recent) < NEEDED or loss - usual <= self._margin(usual):
            self._high.clear()
            self._recent.append(loss)
            return None
        self._high.append(loss)
        if len(self._high) == WINDOW:
            self._recent.extend(self._high)
            self._high.clear()
            return None
        return Spike(step, loss, usual) if len(self._high) == 1 else None

    def _margin(self, usual: float) -> float:
        deviation = TO_STANDARD_DEVIATION * median(abs(loss - usual) for loss in self._recent)
        return max(DEVIATIONS * deviation, SHARE * abs(usual))
