"""Who is there and who failed, as far as the ranks have told the launcher's store, which outlives any of them.

    roll/called            some rank wants to know who is still there
    roll/<rank>            that rank's watch has answered: it is neither dead nor stopped nor cut off
    failure/<kind>         the first failure of each kind, as JSON
    failure/of/<rank>      that rank has failed, and says so
    failure/silent         the ranks that said nothing when the first failure's rank called the roll, as JSON

Every call ends within seconds, also when the store is out of reach: whoever asks here is about to leave.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict

from nanotron.launch.failures import KINDS, Failure
from nanotron.parallel.store import BoundedStore, LostPeers, Store

STORE_WAIT_S = 5.0
CLAIM_WAIT_S = 1.0  # how long a rank that lost a peer, or waited in vain, waits for that peer's own account
ROLL_WAIT_S = 4.0  # watches look about once a second


class Roll:
    """One rank's view of it."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store = BoundedStore(store, STORE_WAIT_S)
        self._rank, self._world = rank, world
        self._answered = False

    def answer(self) -> bool:
        """Say that this rank is there, if the roll was called; whether it was. Raises LostStore without a launcher."""
        called = self._store.check(["roll/called"])
        if called and not self._answered:
            self._store.set(f"roll/{self._rank}", "here")
            self._answered = True
        return called

    def call(self) -> None:
        """Let every rank answer."""
        self._store.set(f"roll/{self._rank}", "here")
        self._store.set("roll/called", "by some rank")

    def silent(self) -> list[int]:
        """The ranks that have not answered."""
        return self._without("roll")

    def failed(self) -> bool:
        """Whether some other rank has failed: the run cannot go on."""
        others = [f"failure/{kind}" for kind in KINDS]
        return any(self._store.check([key]) for key in others)

    def claim(self, failure: Failure) -> tuple[Failure, list[int]]:
        """Tell the others about a failure; returns the one that came first, and the ranks that it was caused by.

        Those are known where the first one is of a rank that lost a peer or waited for it in vain: who does not answer,
        or else has not failed as well. Raises LostPeers when the store is out of reach.
        """
        self._store.set(f"failure/of/{self._rank}", "")
        self._store.compare_set(f"failure/{failure.kind}", "", json.dumps(asdict(failure)))
        self.call()
        if failure.kind in ("peer", "timeout"):
            time.sleep(CLAIM_WAIT_S)
        kind = next(kind for kind in KINDS if self._store.check([f"failure/{kind}"]))
        first = Failure(**json.loads(self._store.get(f"failure/{kind}")))
        if first.kind not in ("peer", "timeout"):
            return first, []
        if first.rank == self._rank:
            self._wait(lambda: not self.silent(), ROLL_WAIT_S)
            self._store.set("failure/silent", json.dumps(self.silent() or self._without("failure/of")))
        self._wait(lambda: self._store.check(["failure/silent"]), ROLL_WAIT_S + CLAIM_WAIT_S)
        silent = json.loads(self._store.get("failure/silent")) if self._store.check(["failure/silent"]) else []
        return first, silent

    def _without(self, what: str) -> list[int]:
        keys = {rank: f"{what}/{rank}" for rank in range(self._world)}
        if self._store.check(list(keys.values())):
            return []
        return [rank for rank, key in keys.items() if not self._store.check([key])]

    def _wait(self, happened: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not happened() and time.monotonic() < deadline:
            time.sleep(0.1)


def claimed(roll: Roll | None, failure: Failure) -> tuple[Failure, list[int] | None]:
    """``Roll.claim``, or this rank's own failure where there is no other rank, or (None) none can be asked."""
    if roll is None:
        return failure, []
    try:
        return roll.claim(failure)
    except LostPeers:
        return failure, None
