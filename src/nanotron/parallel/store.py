"""The store through which ranks tell each other things, and calls to it that end.

torch's store waits as long as the kernel does: over a link that is down a quarter of an hour, deaf to signals. So each
call is made by a thread of its own, and given up on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, Protocol


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, value: str, /) -> bytes: ...


class LostPeers(RuntimeError):
    """This rank waited for others in vain; ``ranks`` names them, as far as they are known."""

    def __init__(self, what: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(what)
        self.ranks = list(ranks)


class LostStore(LostPeers):
    """The store's connection is broken: whoever held it is gone."""


class BoundedStore:
    """A store whose calls end within ``timeout_s``. Raises LostPeers then, and LostStore when the connection breaks.

    ``get`` and ``multi_get`` are for keys that are there: they would hold the connection against every other thread of
    this rank.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._free = threading.Lock()

    def set(self, key: str, value: str, /) -> None:
        self._make(self._store.set, key, value)

    def get(self, key: str, /) -> bytes:
        return bytes(self._make(self._store.get, key))

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return list(self._make(self._store.multi_get, keys))

    def check(self, keys: list[str], /) -> bool:
        return bool(self._make(self._store.check, keys))

    def delete_key(self, key: str, /) -> bool:
        return bool(self._make(self._store.delete_key, key))

    def add(self, key: str, amount: int, /) -> int:
        return int(self._make(self._store.add, key, amount))

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        return bytes(self._make(self._store.compare_set, key, expected, value))

    def _make(self, call: Callable[..., Any], *arguments: Any) -> Any:
        deadline = time.monotonic() + self._timeout_s
        answer: Future[Any] = Future()

        def make() -> None:
            try:
                answer.set_result(call(*arguments))
            except Exception as error:
                answer.set_exception(error)
            finally:
                self._free.release()

        with suppress(FutureTimeoutError):
            if self._free.acquire(timeout=self._timeout_s):  # calls behind one that hangs do not pile up
                threading.Thread(target=make, daemon=True, name="store").start()
                return _result(answer, deadline - time.monotonic())
        raise LostPeers(f"the store of the ranks timed out: no answer within {self._timeout_s:g} s")


def _result(answer: Future[Any], seconds: float) -> Any:
    try:
        return answer.result(seconds)
    except (RuntimeError, ConnectionError) as error:  # torch's DistNetworkError is a RuntimeError
        raise LostStore(f"the store of the ranks is gone ({error})") from error
