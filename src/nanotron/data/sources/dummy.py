"""Dummy data: random tokens for trying out layouts and speed, the same on every layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from nanotron.data.order.permutation import derive_key
from nanotron.data.order.windows import Window


class DummySource:
    """Uniformly random rows; row `index` depends on (seed, stage, index) and on nothing else."""

    name = "dummy"

    def __init__(self, seed: int, stage: str, sequence_length: int, vocab_size: int) -> None:
        self._key = derive_key("dummy", seed, stage)
        self._sequence_length = sequence_length
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return 2**62

    def window(self, index: int) -> Window:
        """S+1 tokens drawn by a counter-based generator keyed by the index."""
        generator = np.random.Generator(np.random.Philox(key=[self._key, index]))
        tokens = generator.integers(self._vocab_size, size=self._sequence_length + 1, dtype=np.int64)
        return Window(tokens, starts=None)

    def fingerprint(self) -> dict[str, Any]:
        """The vocabulary: the tokens depend on it."""
        return {"vocab_size": self._vocab_size}
