"""The worker pool: results by rank, processes reused, failures shown and survived."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import CaseFailed, Pool


@pytest.fixture
def fresh() -> Iterator[Pool]:
    """A pool of its own, for the tests that break workers."""
    pool = Pool()
    yield pool
    pool.close()


def sum_of_ranks(rank: int, world: int, factor: float) -> tuple[int, torch.Tensor]:
    total = torch.full((3,), rank * factor)
    dist.all_reduce(total)
    return rank, total


def process(rank: int, world: int) -> tuple[int, bool, int]:
    return os.getpid(), dist.is_initialized(), torch.get_num_threads()


def keep_a_group_in_a_cycle(rank: int, world: int) -> None:
    cycle: list[object] = [dist.new_group([0, 1])]
    cycle.append(cycle)


def num_threads(rank: int, world: int) -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def fail_on_rank_1(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def hang_on_rank_1(rank: int, world: int) -> None:
    while rank == 1:
        time.sleep(0.01)


def die_on_rank_0(rank: int, world: int) -> None:
    if rank == 0:
        os._exit(7)


def test_every_rank_runs_in_one_group_and_results_come_back_in_rank_order(pool: Pool) -> None:
    for world in (2, 3):
        results = pool.run(world, sum_of_ranks, 2.0)
        assert [rank for rank, _ in results] == list(range(world))
        assert all(total.tolist() == [world * (world - 1.0)] * 3 for _, total in results)


def test_processes_are_reused_with_one_thread_each(pool: Pool) -> None:
    first, second = pool.run(2, process), pool.run(2, process)
    assert first == second
    assert first[0][0] != first[1][0]
    assert first[0][1:] == (True, 1)


def test_no_case_leaves_threads_behind(pool: Pool) -> None:
    before = pool.run(2, num_threads)
    pool.run(2, keep_a_group_in_a_cycle)
    assert pool.run(2, num_threads) == before


def test_one_rank_alone_has_no_process_group(pool: Pool) -> None:
    assert pool.run(1, process)[0][1] is False


def test_a_failing_rank_shows_its_traceback_and_the_next_case_runs(fresh: Pool) -> None:
    with pytest.raises(CaseFailed, match=r"rank 1 of 2 failed:[\s\S]*ValueError: rank one is unwell"):
        fresh.run(2, fail_on_rank_1)
    assert len(fresh.run(2, sum_of_ranks, 1.0)) == 2


def test_a_hanging_rank_is_shown_where_it_hangs_and_replaced(fresh: Pool) -> None:
    with pytest.raises(CaseFailed, match=r"rank 1 of 2 had not answered after 3 s[\s\S]*in hang_on_rank_1") as failure:
        fresh.run(2, hang_on_rank_1, timeout=3.0)
    assert "rank 0 of 2 failed" not in str(failure.value)
    assert len(fresh.run(2, sum_of_ranks, 1.0)) == 2


def test_a_dying_process_is_reported_with_its_exit_code(fresh: Pool) -> None:
    with pytest.raises(CaseFailed, match="rank 0 of 2 failed:\nthe process died, exit code 7"):
        fresh.run(2, die_on_rank_0)
