"""What context-parallel ranks attend to: every pair of tokens on one rank, and as many on each where rows are plain."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanotron.batch import Span, Spans, context_pieces, context_spans, document_spans
from nanotron.data.context import ContextCut
from nanotron.parallel.mesh import Mesh


class Case(NamedTuple):
    """A row, where its documents begin, and over how many ranks it is cut."""

    length: int
    starts: list[int]
    ranks: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 6))
    length = 2 * ranks * draw(st.integers(1, 7))
    return Case(length, sorted({0} | draw(st.sets(st.integers(0, length - 1), max_size=6))), ranks)


def pairs(span: Span) -> int:
    """(query, key) pairs of a span: the last query sees all keys, each before it one less."""
    queries, keys = span.q_hi - span.q_lo, span.k_hi - span.k_lo
    return queries * keys - queries * (queries - 1) // 2


def spans_of(case: Case, rank: int, mode: str = "ALL_GATHER") -> tuple[list[int], Spans]:
    """The tokens of the row that a rank holds, and its spans."""
    starts = np.maximum.accumulate([index if index in case.starts else 0 for index in range(case.length)])
    held, spans = ContextCut(Mesh({"cp": case.ranks}, rank), mode).of((1, case.length), starts[None])
    assert spans is not None
    return list(np.arange(case.length)[held]), spans


@given(cases())
def test_every_pair_of_tokens_of_a_document_is_attended_to_on_one_rank_and_no_other_pair(case: Case) -> None:
    ends = [*case.starts[1:], case.length]
    expected = sorted(
        (q, k) for lo, hi in zip(case.starts, ends, strict=True) for q in range(lo, hi) for k in range(lo, q + 1)
    )
    found = []
    for rank in range(case.ranks):
        held, (row,) = spans_of(case, rank)
        assert [query for span in row for query in range(span.q_lo, span.q_hi)] == list(range(len(held)))
        seen = [
            (held[query], key)
            for span in row
            for query in range(span.q_lo, span.q_hi)
            for key in range(span.k_lo, span.k_hi - (span.q_hi - 1 - query))
        ]
        assert len(seen) == sum(map(pairs, row))
        found += seen
    assert sorted(found) == expected


@given(st.integers(1, 64), st.integers(1, 4096))
def test_plain_rows_are_as_many_pairs_on_every_rank(ranks: int, piece: int) -> None:
    length = 2 * ranks * piece
    whole = document_spans([[0]], length)
    per_rank = {
        sum(pairs(span) for span in context_spans(whole, context_pieces(length, rank, ranks))[0])
        for rank in range(ranks)
    }
    assert per_rank == {length * (length + 1) // 2 // ranks}


@given(cases())
def test_cutting_heads_leaves_every_rank_the_spans_of_whole_rows(case: Case) -> None:
    whole = document_spans([case.starts], case.length)
    assert all(spans_of(case, rank, "ALL_TO_ALL")[1] == whole for rank in range(case.ranks))
