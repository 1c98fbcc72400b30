"""Series of a run's numbers, thinned to what a picture can show without losing a spike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MOST_POINTS = 400


@dataclass(frozen=True)
class Point:
    """One stretch of steps: its last step, and the mean, least and greatest of its numbers."""

    step: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """One column of a run: what a line is drawn through, and the steps whose number was none."""

    name: str
    points: list[Point]
    not_finite: list[int]


def series_of(rows: Sequence[dict[str, Any]], key: str, name: str, *, most: int = MOST_POINTS) -> Series | None:
    """The column ``key`` of the rows that have it; None when no number is there."""
    present = [(int(row["step"]), row[key]) for row in rows if key in row]
    finite = [(step, float(value)) for step, value in present if value is not None and math.isfinite(value)]
    if not finite:
        return None
    count = min(most, len(finite))
    edges = [len(finite) * i // count for i in range(count + 1)]
    points = [_point(finite[lo:hi]) for lo, hi in pairwise(edges)]
    steps = {step for step, _ in finite}
    return Series(name, points, [step for step, _ in present if step not in steps])


def _point(stretch: Sequence[tuple[int, float]]) -> Point:
    numbers = [value for _, value in stretch]
    return Point(stretch[-1][0], sum(numbers) / len(numbers), min(numbers), max(numbers))
