"""Which rank all others wait for, and for how long: a rule on signs of life alone."""

from __future__ import annotations

from typing import Any

from nanotron.launch.roll import Beat
from nanotron.launch.standstill import Standstill

COLLECTIVE, STORE, OWN = "parallel/comm.py:128 all_reduce_", "parallel/agreement.py:130 _await", "data/feed.py:7 _wait"


def beat(at: str, **where: Any) -> Beat:
    return Beat(1, "node", at, at != OWN, {"step": 3, "action": "idle"} | where)


def test_the_rank_that_does_not_wait_is_found_and_for_how_long_nothing_moved() -> None:
    standstill, beats = Standstill(), {0: beat(COLLECTIVE), 1: beat(OWN), 2: beat(COLLECTIVE)}
    assert standstill.look(beats, 100.0) == ([1], 0.0)
    assert standstill.look(beats, 112.5) == ([1], 12.5)
    moved = beats | {1: beat(OWN, action="F of microbatch 1 in stage 0")}
    assert standstill.look(moved, 115.0) == ([1], 0.0)
    assert standstill.look(moved | {2: beat(OWN)}, 117.5) == ([1, 2], 0.0)


def test_a_batch_of_validation_is_a_move() -> None:
    standstill = Standstill()
    for batch in range(1, 5):
        beats = {0: beat(COLLECTIVE), 1: beat(OWN, **{"validation batch": batch})}
        assert standstill.look(beats, 10.0 * batch) == ([1], 0.0)


def test_nobody_is_found_while_all_wait_or_all_work() -> None:
    standstill = Standstill()
    for at in (COLLECTIVE, OWN):
        for now in (0.0, 100.0):
            assert standstill.look({0: beat(at), 1: beat(at)}, now)[0] == []
    assert standstill.look({}, 200.0)[0] == []


def test_a_spare_waits_for_nobody() -> None:
    standstill, spare = Standstill(), Beat(1, "node", "launch/peers.py:118 wait_as_spare", True, {})
    assert [standstill.look({0: beat(OWN), 1: spare}, now)[0] for now in (0.0, 1000.0)] == [[], []]


def test_time_does_not_count_while_a_rank_waits_for_one_that_says_it_is_at_work() -> None:
    standstill, beats = Standstill(), {0: beat(STORE), 1: beat(OWN)}
    assert [standstill.look(beats, now) for now in (0.0, 1000.0)] == [([1], 0.0)] * 2
