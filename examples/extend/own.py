"""A pipeline schedule and a data source of one's own, which config.yaml names by file and function."""

from __future__ import annotations

from collections.abc import Iterator


def two_at_a_time(rank: int, ranks: int, microbatches: int) -> Iterator[tuple[str, int, int]]:
    """Forward of two microbatches, then backward of both: a rank never keeps more than two, and waits often.

    Yields (kind, microbatch, chunk); that no rank waits for ever is proven before training starts.
    """
    for first in range(0, microbatches, 2):
        pair = range(first, min(first + 2, microbatches))
        yield from (("F", microbatch, 0) for microbatch in pair)
        yield from (("BW", microbatch, 0) for microbatch in pair)


def counting(longest: int = 9) -> Iterator[str]:
    """Documents without end: `1 2 3 4 5`, forwards and backwards, by the run's tokenizer."""
    while True:
        for last in range(2, longest + 1):
            numbers = [str(number) for number in range(1, last + 1)]
            yield " ".join(numbers)
            yield " ".join(reversed(numbers))
