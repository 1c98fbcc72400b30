"""A store for threads of one process, as fast as a dict: torch's own would have to be imported first."""

from __future__ import annotations


class LocalStore:
    """What is used of ``torch.distributed.Store``."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self._values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self._values[key]

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return [self._values[key] for key in keys]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str, /) -> bool:
        return self._values.pop(key, None) is not None

    def add(self, key: str, amount: int, /) -> int:
        self.set(key, str(int(self._values.get(key, b"0")) + amount))
        return int(self._values[key])

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        if self._values.get(key, b"") == expected.encode():
            self.set(key, value)
        return self._values[key]
