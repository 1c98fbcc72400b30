"""One small round of every attack; `make torture` goes on for as long as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture import disks, flips, kills, launches, links


def test_a_run_killed_in_every_phase_ends_bit_for_bit_like_one_that_was_not(pool, tmp_path: Path) -> None:
    kills.torture(pool, tmp_path, kills_per_phase=1, layout=(2, 1, 1))


def test_a_rank_that_is_stopped_in_a_save_is_named_in_time_and_the_run_goes_on(tmp_path: Path) -> None:
    place = "nanotron.checkpoint.write:Saver._write_shard"
    launches.torture(tmp_path, [launches.Attack("stop", place, launches.MOST_STEPS // 2, 1, "nanotron")])


def test_bits_that_change_between_two_starts_do_no_harm(pool, tmp_path: Path) -> None:
    flips.torture(pool, tmp_path, num_flips=4, seed=0)


def test_a_run_whose_files_may_not_grow_goes_on_with_room(pool, tmp_path: Path) -> None:
    disks.limit_files(pool, tmp_path, seed=0)


@pytest.mark.skipif(bool(disks.why_not()), reason=disks.why_not())
def test_a_run_whose_disk_is_full_goes_on_with_room(pool, tmp_path: Path) -> None:
    disks.fill_disk(pool, tmp_path, seed=0)


@pytest.mark.skipif(bool(links.why_not()), reason=links.why_not())
def test_two_machines_without_a_link_end_in_time_and_go_on_with_it(tmp_path: Path) -> None:
    links.torture(tmp_path, seed=0)
