"""One kill in every phase of a run; `python -m tests.checkpoint.torture 8` does more."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.torture import torture


def test_a_run_killed_in_every_phase_ends_bit_for_bit_like_one_that_was_not(pool, tmp_path: Path) -> None:
    torture(pool, tmp_path, kills_per_phase=1)
