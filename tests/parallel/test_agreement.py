"""Ranks that agree through a store: whom they wait for, how long, and that they say so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nanotron.parallel import agreement as module
from nanotron.parallel.agreement import Agreement
from nanotron.parallel.store import BoundedStore, LostPeers, LostStore
from tests.local_store import LocalStore

Rank = Callable[[Agreement], Any]


def answers_of(world: int, ranks: dict[int, Rank], timeout_s: float = 0.4) -> dict[int, Any]:
    """What some of the ranks of ``world`` come to, each in a thread; what one raises is its answer."""
    store = LocalStore()

    def answer(rank: int) -> Any:
        try:
            return ranks[rank](Agreement("topic", rank, world, store, timeout_s=timeout_s))
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(world) as threads:
        return dict(zip(ranks, threads.map(answer, ranks), strict=True))


def ask(agreement: Agreement) -> Any:
    return agreement.decide("question", 1, sum)


def test_every_rank_names_the_one_that_says_nothing() -> None:
    for lost in answers_of(4, {0: ask, 1: ask, 3: ask}).values():
        assert isinstance(lost, LostPeers)
        assert (lost.ranks, str(lost)) == ([2], "rank 2 did not answer within 0.4 s")


def test_rank_0_is_named_when_it_is_the_silent_one() -> None:
    for lost in answers_of(3, {1: ask, 2: ask}).values():
        assert isinstance(lost, LostPeers)
        assert lost.ranks == [0]


def test_a_rank_at_work_is_waited_for_however_long_it_takes() -> None:
    def work(agreement: Agreement) -> Any:
        with agreement.at_work("writing"):
            time.sleep(1.2)
        return ask(agreement)

    assert answers_of(3, {0: ask, 1: work, 2: ask}) == {0: 3, 1: 3, 2: 3}


def test_a_decision_that_takes_long_is_waited_for() -> None:
    def slow(values: list[int]) -> int:
        time.sleep(1.2)
        return sum(values)

    decide: Rank = lambda agreement: agreement.decide("question", 1, slow)  # noqa: E731
    assert answers_of(2, {0: decide, 1: decide}) == {0: 2, 1: 2}


def test_work_that_takes_long_is_said_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SAY_S", 0.05)
    with Agreement("topic", 0, 1, None).at_work("writing runs/x/20/index.json"):
        deadline = time.monotonic() + 30
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(caplog.messages) >= 2
    assert caplog.messages[0].startswith("rank 0 has been writing runs/x/20/index.json for 0 s")


def test_agreements_leave_nothing_in_the_store_but_the_last_answer() -> None:
    store = LocalStore()

    def decide(rank: int) -> list[int]:
        agreement = Agreement("topic", rank, 2, store)
        return [agreement.decide(str(i), i, sum) for i in range(5)]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(decide, range(2))) == [[0, 2, 4, 6, 8]] * 2
    assert set(store._values) == {"topic/1/4/answer", "topic/begun/0", "topic/begun/1"}


def test_a_second_agreement_of_a_topic_does_not_hear_the_first_one_s_answers() -> None:
    store = LocalStore()

    def decide_twice(rank: int) -> list[int]:
        answers = []
        for value in (1, 2):
            if rank == 0:
                time.sleep(0.05)  # so that rank 1 looks for an answer while only the first one's could be there
            answers.append(Agreement("topic", rank, 2, store).decide("same", value, sum))
        return answers

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(decide_twice, range(2))) == [[2, 4], [2, 4]]


class HangingStore(LocalStore):
    """A store at the other end of a link that is down."""

    def __init__(self) -> None:
        super().__init__()
        self.is_up = threading.Event()

    def check(self, keys: list[str], /) -> bool:
        self.is_up.wait(30)
        return super().check(keys)


def test_a_store_that_does_not_answer_is_given_up_on_and_asked_again_when_it_does() -> None:
    behind = HangingStore()
    store = BoundedStore(behind, 0.2)
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(LostPeers, match=r"timed out: no answer within 0\.2 s"):
            store.check(["key"])
    assert threading.active_count() == before + 1, "calls do not pile up"
    behind.is_up.set()
    time.sleep(0.1)
    assert not store.check(["key"])


class BrokenStore(LocalStore):
    """A store whose holder is gone."""

    def add(self, key: str, amount: int, /) -> int:
        raise RuntimeError("Broken pipe")


def test_a_broken_store_is_told_apart() -> None:
    with pytest.raises(LostStore, match="Broken pipe"):
        BoundedStore(BrokenStore(), 5.0).add("key", 1)
