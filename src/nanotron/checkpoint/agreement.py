"""How ranks agree through the store: each says something, rank 0 answers all of them.

No collective is involved, so a writer thread may do this while the main thread trains. Values are JSON.
The store is polled and never waited on: a blocking ``get`` would hold the store's connection against the main thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Protocol

POLL_S = (0.002, 0.25)  # first and longest pause between two looks


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...


class LocalStore:
    """The store of a run of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self._values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self._values[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str, /) -> bool:
        return self._values.pop(key, None) is not None

    def add(self, key: str, amount: int, /) -> int:
        self.set(key, str(int(self._values.get(key, b"0")) + amount))
        return int(self._values[key])


class Agreement:
    """Questions that every rank of ``world`` puts in the same order; every rank makes one for each ``topic``."""

    def __init__(self, topic: str, rank: int, world: int, store: Store | None, *, timeout_s: float = 3600.0) -> None:
        assert store is not None or world == 1, "several ranks need a store to agree through"
        self._rank, self._world, self._timeout_s = rank, world, timeout_s
        self._store: Store = store if store is not None else LocalStore()
        begun = self._store.add(f"{topic}/begun/{rank}", 1)  # the same on every rank: all begin their topics in order
        self._topic = f"{topic}/{begun}"
        self._answered: list[str] = []

    def decide(self, question: str, value: Any, decision: Callable[[list[Any]], Any]) -> Any:
        """Give ``value``; rank 0 calls ``decision`` with the values in rank order; every rank returns its result.

        A question is put once. Raises TimeoutError, on every rank, that names those which said nothing, and
        RuntimeError on the others when the decision itself raises on rank 0.
        """
        key = f"{self._topic}/{question}"
        self._store.set(f"{key}/from/{self._rank}", json.dumps(value))
        if self._rank == 0:
            self._answer(key, decision)
        self._await([f"{key}/answer"], 2 * self._timeout_s)
        answer = json.loads(self._store.get(f"{key}/answer"))
        if "missing" in answer:
            raise TimeoutError(answer["missing"])
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer["decision"]

    def _answer(self, key: str, decision: Callable[[list[Any]], Any]) -> None:
        keys = [f"{key}/from/{rank}" for rank in range(self._world)]
        try:
            self._await(keys, self._timeout_s)
        except TimeoutError as error:
            self._store.set(f"{key}/answer", json.dumps({"missing": str(error)}))
            return
        values = [json.loads(self._store.get(key)) for key in keys]
        for old in [*keys, *self._answered]:  # every rank has read the earlier answers
            self._store.delete_key(old)
        self._answered = [f"{key}/answer"]
        try:
            decided = decision(values)
        except BaseException as error:
            self._store.set(f"{key}/answer", json.dumps({"failed": f"rank 0: {type(error).__name__}: {error}"}))
            raise
        self._store.set(f"{key}/answer", json.dumps({"decision": decided}))

    def _await(self, keys: list[str], timeout_s: float) -> None:
        deadline, pause = time.monotonic() + timeout_s, POLL_S[0]
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = [key.rsplit("/", 1)[-1] for key in keys if not self._store.check([key])]
                who = "rank 0" if missing == ["answer"] else f"rank {', '.join(missing)}"
                raise TimeoutError(f"{who} did not answer within {timeout_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, POLL_S[1])
