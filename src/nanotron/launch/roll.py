"""Who is there and who failed, as far as the ranks have told the launcher's store, which outlives any of them.

    roll/called            some rank wants to know who is still there
    roll/<rank>            that rank's watch has answered: it is neither dead nor stopped nor cut off
    beat/<rank>            its last sign of life, of several in ``general.heartbeat_s``, as JSON: where its main thread
                           is
    failure/<kind>         the first failure of each kind, as JSON
    failure/of/<rank>      that rank has failed, and says so
    failure/silent         the ranks that said nothing when the first failure's rank called the roll, as JSON

A rank that others waited for until they gave up, though it lives, is ``stuck``: one of them tells so in its place.

Every call ends within seconds, also when the store is out of reach: whoever asks here is about to leave.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nanotron.launch.failures import KINDS, Failure
from nanotron.parallel.store import BoundedStore, LostPeers, Store

STORE_WAIT_S = 5.0
CLAIM_WAIT_S = 1.0  # how long a rank that lost a peer, or waited in vain, waits for that peer's own account
ROLL_WAIT_S = 4.0  # watches look about once a second


@dataclass(frozen=True)
class Beat:
    """A sign of life: a count, and where a rank's main thread is (``waits``: for others)."""

    count: int
    host: str
    at: str
    waits: bool
    where: dict[str, Any]

    def __str__(self) -> str:
        what = ", ".join(f"{name} {value}" for name, value in self.where.items())
        return f"{what}, " * bool(what) + ("waits at " if self.waits else "at ") + self.at


def stuck(rank: int, beat: Beat, why: str) -> Failure:
    """That a rank did not go on, as another one tells it."""
    return Failure(
        rank, "stuck", f"lives, but did not go on: {why}", host=beat.host, where={**beat.where, "at": beat.at}
    )


class Pulse:
    """Which of some ranks have given no sign of life for too long, as one of them sees it."""

    def __init__(self, ranks: Sequence[int], silence_s: float) -> None:
        self._ranks, self.silence_s = ranks, silence_s
        self.beats: dict[int, Beat] = {}
        """The last ones seen."""
        self._new_at: dict[int, float] = {}  # rank -> when its beat was last seen to be another one, monotonic

    def look(self, roll: Roll) -> dict[int, float]:
        """Rank -> seconds of its silence, when one is silent for too long: of all that are for half of that."""
        now, before = time.monotonic(), self.beats
        self.beats = roll.beats(self._ranks)
        for rank, beat in self.beats.items():
            if rank not in before or beat.count != before[rank].count:
                self._new_at[rank] = now
        silences = {rank: now - at for rank, at in self._new_at.items() if now - at > self.silence_s / 2}
        return silences if any(silence > self.silence_s for silence in silences.values()) else {}

    def begin_again(self) -> None:
        """Forget how long others have been silent: this process was stopped itself, perhaps together with them."""
        self._new_at = dict.fromkeys(self._new_at, time.monotonic())


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

    def beat(self, beat: Beat) -> None:
        """Give a sign of life."""
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        """The last sign of life of these ranks, all or none: those of a run that begins are not there yet."""
        keys = [f"beat/{rank}" for rank in ranks]
        found = self._store.multi_get(keys) if self._store.check(keys) else []
        return {rank: Beat(**json.loads(text)) for rank, text in zip(ranks, found, strict=False)}

    def hosts(self, ranks: Sequence[int]) -> list[str]:
        """Where these ranks are, when all of them have given a sign of life."""
        try:
            return sorted({beat.host for beat in self.beats(ranks).values()})
        except LostPeers:
            return []

    def tell_lost(self, lost: Failure) -> bool:
        """Tell the failure of a rank that cannot; whether this rank was the first to do so."""
        told = json.dumps(asdict(lost))
        return self._store.compare_set(f"failure/{lost.kind}", "", told) == told.encode()

    def lost(self) -> Failure | None:
        """What was told of a rank that gives no sign of life, or does not go on."""
        kinds = [kind for kind in ("lost", "stuck") if self._store.check([f"failure/{kind}"])]
        return self._told(kinds[0]) if kinds else None

    def _told(self, kind: str) -> Failure:
        return Failure(**json.loads(self._store.get(f"failure/{kind}")))

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
        first = self._told(kind)
        if first.kind not in ("peer", "timeout"):
            return first, []
        if first.rank == self._rank:
            self._wait(lambda: not self.silent(), ROLL_WAIT_S)
            silent = self.silent()
            if not silent and first.kind == "timeout":
                self._blame_busy(first)
            self._store.set("failure/silent", json.dumps(silent or self._without("failure/of")))
        self._wait(lambda: self._store.check(["failure/silent"]), ROLL_WAIT_S + CLAIM_WAIT_S)
        if self._store.check(["failure/stuck"]):
            return self._told("stuck"), []
        silent = json.loads(self._store.get("failure/silent")) if self._store.check(["failure/silent"]) else []
        return first, silent

    def _blame_busy(self, waited: Failure) -> None:
        """Of ranks that live and have not failed, tell of the first that does not wait itself, if one does not."""
        beats = self.beats(range(self._world))
        busy = [rank for rank in self._without("failure/of") if rank in beats and not beats[rank].waits]
        if busy:
            self.tell_lost(stuck(busy[0], beats[busy[0]], f"rank {waited.rank} waited in vain ({waited.error})"))

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
