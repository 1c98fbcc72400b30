"""Keys and values that are kept: fed in any pieces, a row's next logits are those of the whole row at once."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch

from nanotron.batch import Batch, Span, Spans
from nanotron.generate.decode import left_padded
from nanotron.generate.source import open_source
from nanotron.models.cache import new_cache
from nanotron.models.decoder import DecoderChunk
from tests.generate.tiny import CPU, training_logits, whole_model, write_run

ROWS = ([5, 90, 200, 31, 7, 44, 120, 60, 61, 62], [9, 8, 7, 270, 3], [1] * 8)


def part_of(spans: Spans, start: int, stop: int) -> Spans:
    """Those of queries [start, stop), which count from 0 again; keys are the cache's."""
    parts = [[(max(start, span.q_lo), min(stop, span.q_hi), span) for span in row] for row in spans]
    return tuple(
        tuple(Span(lo - start, hi - start, span.k_lo, span.k_hi - span.q_hi + hi) for lo, hi, span in row if lo < hi)
        for row in parts
    )


SIZES = [[10], [1] * 10, [4, 3, 3], [9, 1]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["alone", "padded"])
def test_a_row_fed_in_pieces_has_the_logits_of_the_whole_row(
    run: Path, sizes: list[int], rows: list[list[int]]
) -> None:
    whole_row_by_pieces(whole_model(open_source(str(run))), sizes, rows)


def test_under_windows_too(tmp_path: Path) -> None:
    facts = {"sliding_window_size": 3, "sliding_window_layers": [0, 2]}
    model = whole_model(open_source(str(write_run(tmp_path, **facts))))
    for sizes, rows in product(SIZES, (ROWS[:1], ROWS)):
        whole_row_by_pieces(model, sizes, rows)


def whole_row_by_pieces(model: DecoderChunk, sizes: list[int], rows: Sequence[list[int]]) -> None:
    whole = left_padded(rows, CPU)
    assert (whole.spans is None) == (len(rows) == 1)
    cache, start = new_cache(3, 10), 0
    for size in sizes:
        tokens, labels, positions = (part[:, start : start + size] for part in whole[:3])
        piece = Batch(tokens, labels, positions, part_of(whole.spans, start, start + size) if whole.spans else None)
        with torch.inference_mode():
            logits, losses, _ = model(None, piece, cache)
        start += size
        assert logits.shape == (len(rows), 1, model.config.vocab_size)
        assert not losses
    for row, ids in enumerate(rows):
        torch.testing.assert_close(logits[row, 0], training_logits(model, list(ids))[-1], rtol=1e-5, atol=1e-5)


def test_padding_starts_on_the_left_and_positions_at_the_text() -> None:
    batch = left_padded([[4, 5, 6], [7]], CPU)
    assert batch.tokens.tolist() == [[4, 5, 6], [0, 0, 7]]
    assert batch.positions.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.spans == ((Span(0, 3, 0, 3),), (Span(0, 2, 0, 2), Span(2, 3, 2, 3)))


def test_a_full_cache_refuses_more(run: Path) -> None:
    model = whole_model(open_source(str(run)))
    with pytest.raises(AssertionError, match="room for 2"):
        model(None, left_padded([[1, 2, 3]], CPU), new_cache(3, 2))
