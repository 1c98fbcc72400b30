"""What a model is fed: one microbatch of token rows, and which of its tokens see which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

IGNORED_LABEL = -100
"""The label of a position that is not a target: it adds nothing to the loss nor to the count of valid tokens."""


class Span(NamedTuple):
    """Queries [q_lo, q_hi) of a row and the keys [k_lo, k_hi) they see: the last query all, each before it one less."""

    q_lo: int
    q_hi: int
    k_lo: int
    k_hi: int


Spans = tuple[tuple[Span, ...], ...]
"""Of each row of a microbatch, in the order of their queries, which they cover. Made once, on the host, and kept there:
no layer reads a boundary from a device, and no mask of all pairs of tokens exists anywhere."""


def document_spans(starts: Iterable[Sequence[int]], length: int) -> Spans:
    """Of rows of ``length`` tokens whose documents begin at ``starts``; a token sees its own document up to itself."""
    return tuple(tuple(Span(lo, hi, lo, hi) for lo, hi in pairwise([*row, length])) for row in starts)


def context_pieces(length: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """The tokens [lo, hi) of a row that a context-parallel rank holds: pieces rank and 2·ranks−1−rank of 2·ranks."""
    size = length // (2 * ranks)
    return [(piece * size, (piece + 1) * size) for piece in (rank, 2 * ranks - 1 - rank)]


def context_spans(spans: Spans, pieces: Sequence[tuple[int, int]]) -> Spans:
    """The spans of the queries in these pieces of each row: queries count in the pieces, keys in the whole row."""
    return tuple(tuple(_in_pieces(row, pieces)) for row in spans)


def _in_pieces(row: Iterable[Span], pieces: Sequence[tuple[int, int]]) -> Iterator[Span]:
    start = 0
    for lo, hi in pieces:
        for span in row:
            first, last = max(lo, span.q_lo), min(hi, span.q_hi)
            if first < last:
                yield Span(start + first - lo, start + last - lo, span.k_lo, span.k_hi - span.q_hi + last)
        start += hi - lo


class Batch(NamedTuple):
    """One microbatch; every pipeline stage of a replica gets the whole of it. b rows of s tokens, all int64."""

    tokens: Tensor
    """[b, s] input token ids."""
    labels: Tensor
    """[b, s] the next token of each position, or IGNORED_LABEL."""
    positions: Tensor
    """[b, s] position of each token, restarting per document where the document boundaries are known."""
    spans: Spans | None = None
    """Which tokens see which; None: each row is one causal span."""
