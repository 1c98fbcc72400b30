"""Who is there and who failed: what ranks that share a store find out from one another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanotron.launch import roll as module
from nanotron.launch.failures import Failure, verdict
from nanotron.launch.roll import Roll, claimed
from tests.local_store import LocalStore


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLAIM_WAIT_S", 0.2)
    monkeypatch.setattr(module, "ROLL_WAIT_S", 0.6)
    monkeypatch.setattr(module, "STORE_WAIT_S", 0.3)


def failure(rank: int, kind: str) -> Failure:
    return Failure(rank, kind, f"{kind} of {rank}", 1000.0, "host")


def claims(world: int, failures: list[Failure], living: list[int]) -> list[tuple[Failure, list[int] | None]]:
    """What each failing rank comes to, while the watches of the living ones answer the roll."""
    store, over = LocalStore(), threading.Event()

    def answer(rank: int) -> None:
        roll = Roll(store, rank, world)
        while not over.wait(0.02):
            roll.answer()

    with ThreadPoolExecutor(world) as threads:
        watches = [threads.submit(answer, rank) for rank in living]
        found = [threads.submit(claimed, Roll(store, failed.rank, world), failed) for failed in failures]
        answers = [future.result() for future in found]
        over.set()
        for watch in watches:
            watch.result()
    return answers


def test_a_ranks_own_failure_is_the_first_for_all_that_lost_it() -> None:
    for first, silent in claims(3, [failure(0, "peer"), failure(2, "own"), failure(1, "timeout")], []):
        assert (first.rank, silent) == (2, [])


def test_a_rank_that_does_not_answer_is_named_by_those_that_waited_for_it_and_not_one_that_only_waits_too() -> None:
    for first, silent in claims(4, [failure(0, "timeout"), failure(1, "timeout")], living=[3]):
        assert silent == [2]
        line = verdict(first, silent)
        assert line.startswith(f"failed first: rank 2 fell behind and said nothing; waiting for it: rank {first.rank} ")


def test_among_ranks_that_all_answer_those_that_have_not_failed_are_behind() -> None:
    for _, silent in claims(3, [failure(0, "timeout"), failure(2, "timeout")], living=[1]):
        assert silent == [1]


class HangingStore(LocalStore):
    def check(self, keys: list[str], /) -> bool:
        threading.Event().wait(5)
        return False


def test_without_the_store_a_rank_knows_its_own_failure_within_seconds() -> None:
    first, silent = claimed(Roll(HangingStore(), 1, 2), failure(1, "timeout"))
    assert (first.rank, silent) == (1, None)
    assert verdict(first, silent).startswith(
        "failed first, as far as one can tell without the launcher's store: rank 1"
    )


def test_a_failure_of_another_rank_is_known_to_all() -> None:
    store = LocalStore()
    here, there = Roll(store, 0, 2), Roll(store, 1, 2)
    assert not here.answer()
    there.call()
    assert here.answer()
    assert (here.silent(), here.failed()) == ([], False)
    there.claim(failure(1, "own"))
    assert here.failed()
