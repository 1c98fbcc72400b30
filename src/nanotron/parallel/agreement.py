"""How ranks agree through the store: each says something, rank 0 answers all of them.

No collective is involved, so a writer thread may do this while the main thread trains. Values are JSON.
The store is polled and never waited on: a blocking ``get`` would hold the store's connection against the main thread.
Each question is as many calls on every rank, rank 0 among them, however many ranks there are.

A rank waits for others as long as they give signs of life, at most ``timeout_s`` from one to the next, and then names
those that are silent. A sign of life is a count in the store: of a rank that is ``at_work`` on files, where an hour may
be right, and of rank 0 while it waits for others in this way.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from nanotron.logging import get_logger
from nanotron.parallel.store import BoundedStore, LostPeers, Store

logger = get_logger(__name__)

POLL_S = (0.002, 0.25)  # first and longest pause between two looks
SIGNS_PER_TIMEOUT = 8
SAY_S = 60.0  # how long work may take before, and from one to the next time that, it is told


class Agreement:
    """Questions that every rank of ``world`` puts in the same order; every rank makes one for each ``topic``."""

    def __init__(self, topic: str, rank: int, world: int, store: Store | None, *, timeout_s: float = 600.0) -> None:
        assert store is not None or world == 1, "several ranks need a store to agree through"
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self._answered: list[str] = []
        if store is not None:
            self._store = BoundedStore(store, timeout_s)
            begun = self._store.add(f"{topic}/begun/{rank}", 1)  # the same on every rank: all begin topics in order
            self._topic = f"{topic}/{begun}"

    def decide(self, question: str, value: Any, decision: Callable[[list[Any]], Any], *, doing: str = "") -> Any:
        """Give ``value``; rank 0 calls ``decision`` with the values in rank order; every rank returns its result.

        A question is put once. ``doing`` says what the decision does, where that may take long. Raises LostPeers, on
        every rank, that names those which said nothing, and RuntimeError on the others when the decision itself raises
        on rank 0.
        """
        if self.world == 1:
            with self.at_work(doing):
                return _as_told(decision([_as_told(value)]))
        key = f"{self._topic}/{question}"
        self._store.set(f"{key}/from/{self.rank}", json.dumps(value))
        if self.rank == 0:
            self._answer(key, decision, doing)
        self._await({0: f"{key}/answer"})
        answer = json.loads(self._store.get(f"{key}/answer"))
        with suppress(LostPeers):  # rank 0, which has read it, may be gone
            self._store.delete_key(f"{key}/from/{self.rank}")
        if "missing" in answer:
            raise LostPeers(*answer["missing"])
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer["decision"]

    @contextmanager
    def at_work(self, doing: str) -> Iterator[None]:
        """While the block lasts the others wait for this rank, however long; when it lasts long, that is said."""
        ended = threading.Event()
        threading.Thread(target=self._give_signs, args=(doing, ended), daemon=True, name="signs").start()
        try:
            yield
        finally:
            ended.set()

    def _give_signs(self, doing: str, ended: threading.Event) -> None:
        began, said = time.monotonic(), 0
        while not ended.wait(min(self.timeout_s / SIGNS_PER_TIMEOUT, SAY_S)):
            seconds = time.monotonic() - began
            if doing and seconds // SAY_S > said:
                said = int(seconds // SAY_S)
                logger.warning(f"rank {self.rank} has been {doing} for {seconds:.0f} s: slow storage, or stuck")
            try:
                self._sign()
            except LostPeers:
                return  # nobody is left to wait for us

    def _sign(self) -> None:
        if self.world > 1:
            self._store.add(f"{self._topic}/signs/{self.rank}", 1)

    def _answer(self, key: str, decision: Callable[[list[Any]], Any], doing: str) -> None:
        keys = {rank: f"{key}/from/{rank}" for rank in range(self.world)}
        try:
            self._await(keys)
        except LostPeers as error:
            self._store.set(f"{key}/answer", json.dumps({"missing": [str(error), error.ranks]}))
            return
        values = [json.loads(value) for value in self._store.multi_get(list(keys.values()))]
        for old in self._answered:  # every rank has read the earlier answers
            self._store.delete_key(old)
        self._answered = [f"{key}/answer"]
        try:
            with self.at_work(doing):
                decided = decision(values)
        except BaseException as error:
            self._store.set(f"{key}/answer", json.dumps({"failed": f"rank 0: {type(error).__name__}: {error}"}))
            raise
        self._store.set(f"{key}/answer", json.dumps({"decision": decided}))

    def _await(self, keys: Mapping[int, str]) -> None:
        """Wait for the key of each rank. Raises LostPeers that names the ranks which are silent for too long."""
        began = looked = time.monotonic()
        signs: dict[int, tuple[int, float]] = {}  # rank -> its count, and when that was new
        pause = POLL_S[0]
        while not self._store.check(list(keys.values())):
            now = time.monotonic()
            if now - looked > self.timeout_s / SIGNS_PER_TIMEOUT:
                looked = now
                if self.rank == 0:
                    self._sign()
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                counts = {rank: self._store.add(f"{self._topic}/signs/{rank}", 0) for rank in missing}
                signs = {
                    rank: signs[rank] if rank in signs and signs[rank][0] == count else (count, now if signs else began)
                    for rank, count in counts.items()
                }
                silent = [rank for rank, (_, since) in signs.items() if now - since > self.timeout_s]
                if silent:
                    who = ", ".join(map(str, silent))
                    raise LostPeers(f"rank {who} did not answer within {self.timeout_s:g} s", silent)
            time.sleep(pause)
            pause = min(2 * pause, POLL_S[1])


def _as_told(value: Any) -> Any:
    """A value as it reaches others."""
    return json.loads(json.dumps(value))


def alone() -> Agreement:
    """The agreement of one process with itself."""
    return Agreement("alone", 0, 1, None)
