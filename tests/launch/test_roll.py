"""Who is there and who failed: what ranks that share a store find out from one another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from nanotron.launch import roll as module
from nanotron.launch.failures import Failure, verdict
from nanotron.launch.roll import Beat, Pulse, Roll, claimed
from tests.local_store import LocalStore


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLAIM_WAIT_S", 0.2)
    monkeypatch.setattr(module, "ROLL_WAIT_S", 0.6)
    monkeypatch.setattr(module, "STORE_WAIT_S", 0.3)


def failure(rank: int, kind: str) -> Failure:
    return Failure(rank, kind, f"{kind} of {rank}", 1000.0, "host")


def claims(
    world: int, failures: list[Failure], living: list[int], store: LocalStore | None = None
) -> list[tuple[Failure, list[int] | None]]:
    """What each failing rank comes to, while the watches of the living ones answer the roll."""
    store, over = store or LocalStore(), threading.Event()

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


def test_of_ranks_that_have_not_failed_yet_one_that_waits_too_is_not_to_blame() -> None:
    store = LocalStore()
    for rank, waits in ((0, True), (1, True), (2, False), (3, True)):
        Roll(store, rank, 4).beat(Beat(1, "there", "data/feed.py:7 _wait", waits, {"step": 3}))
    for first, silent in claims(4, [failure(0, "timeout")], living=[1, 2, 3], store=store):
        assert (first.rank, first.kind, first.host, silent) == (2, "stuck", "there", [])
        assert first.where == {"step": 3, "at": "data/feed.py:7 _wait"}
        assert first.error == "lives, but did not go on: rank 0 waited in vain (timeout of 0)"


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


def beat(count: int) -> Beat:
    return Beat(count, "node", "data/feed.py:7 _wait", False, {"step": 3})


def test_whoever_gives_no_sign_of_life_is_found_with_those_that_fell_silent_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, now = LocalStore(), [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rolls, pulse = [Roll(store, rank, 4) for rank in range(4)], Pulse(range(4), silence_s=20)
    rolls[0].beat(beat(1))
    assert pulse.look(rolls[0]) == {}, "the others have not begun"
    last = {0: 99, 1: 99, 2: 10, 3: 12}  # when each is heard of last
    silences = []
    for now[0] in range(2, 36, 2):
        for rank, roll in enumerate(rolls):
            if now[0] <= last[rank]:
                roll.beat(beat(int(now[0])))
        silences.append(pulse.look(rolls[0]))
    assert silences[:15] == [{}] * 15, "20 s are no silence"
    assert silences[15] == {2: 22, 3: 20}
    pulse.begin_again()
    assert pulse.look(rolls[0]) == {}
    assert str(rolls[1].beats([2])[2]) == "step 3, at data/feed.py:7 _wait"


def test_a_rank_that_gives_no_sign_of_life_is_the_first_failure_and_told_by_one_rank() -> None:
    store = LocalStore()
    rolls = [Roll(store, rank, 3) for rank in range(2)]
    assert rolls[0].lost() is None
    assert rolls[0].tell_lost(failure(2, "lost"))
    assert not rolls[1].tell_lost(failure(0, "lost"))
    assert rolls[1].lost() == failure(2, "lost")
    first, silent = claimed(rolls[1], failure(1, "peer"))
    assert (first.rank, first.kind, silent) == (2, "lost", [])
