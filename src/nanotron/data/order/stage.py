"""One data stage: sample n of it, a pure function of (data seed, stage name, n); or, of streams, the next samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nanotron.data.order.blend import RESOLUTION, Blend
from nanotron.data.order.permutation import Indices, derive_key, permute, permute_in_blocks
from nanotron.data.order.skips import Skips
from nanotron.data.order.windows import IndexedSource, Window
from nanotron.data.sources.stream import StreamSource
from nanotron.errors import ConfigError


class Stage:
    """A blend of sources, each visited in a new order every epoch.

    sample  ->  its number n, if some are skipped
    n  ->  (source, turn) by the blend  ->  (epoch, place) = divmod(turn, windows)  ->  window by the permutation
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[IndexedSource],
        weights: Sequence[float] | None = None,
        *,
        seed: int,
        shuffle_block: int | None = None,
        repeat: bool = True,
        skips: Skips | None = None,
    ) -> None:
        """Weights default to the sources' windows, so that one epoch of all of them is seen at the same time."""
        self.skips = skips or Skips()
        self.name = name
        self.sources = list(sources)
        self.source_names = [source.name for source in sources]
        self.blend = Blend(_weights_by_length(sources) if weights is None else weights)
        self._seed = seed
        self._shuffle_block = shuffle_block
        self.num_samples: int | None = None
        """How many samples there are before a source is exhausted; None: sources are repeated for ever."""
        if not repeat:
            self.num_samples = self.skips.stay(
                self.blend.samples_before_exhaustion([len(source) for source in sources])
            )

    def locate(self, samples: Indices) -> tuple[Indices, Indices]:
        """For each sample: its source and its window in that source."""
        owners, turns = self.blend.locate(self.skips.numbers(samples))
        windows = np.empty_like(turns)
        lengths = np.array([len(source) for source in self.sources], dtype=np.int64)
        epochs, places = np.divmod(turns, lengths[owners])
        for owner, epoch in sorted(set(zip(owners.tolist(), epochs.tolist(), strict=True))):
            chosen = np.flatnonzero((owners == owner) & (epochs == epoch))
            windows[chosen] = self._order(owner, epoch, places[chosen])
        return owners.astype(np.int64), windows

    def _order(self, owner: int, epoch: int, places: Indices) -> Indices:
        key = derive_key("order", self._seed, self.name, owner, epoch)
        length = len(self.sources[owner])
        if self._shuffle_block is None:
            return permute(places, length, key)
        return permute_in_blocks(places, length, key, self._shuffle_block)

    def rows(self, first: int, count: int) -> list[Window]:
        """Samples first … first + count - 1."""
        owners, windows = self.locate(np.arange(first, first + count, dtype=np.int64))
        return [
            self.sources[owner].window(window) for owner, window in zip(owners.tolist(), windows.tolist(), strict=True)
        ]

    def taken(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples each source gave."""
        return self.skips.taken(self.blend, num_samples)

    def epochs(self, num_samples: int) -> list[int]:
        """How many times each source has been gone through after `num_samples` samples."""
        reached = self.blend.taken(self.skips.end(num_samples))
        return [turns // len(source) for turns, source in zip(reached, self.sources, strict=True)]


class StreamStage:
    """A blend of streams. Rows exist in one global order and come out of it once, all of them, on every reader."""

    num_samples = None  # only the streams themselves know, when they end

    def __init__(
        self,
        name: str,
        sources: Sequence[StreamSource],
        weights: Sequence[float] | None = None,
        *,
        skips: Skips | None = None,
    ) -> None:
        self.name = name
        self.skips = skips or Skips()
        self.sources = list(sources)
        self.source_names = [source.name for source in sources]
        self.blend = Blend(weights if weights is not None else [1.0] * len(sources))
        self._next_sample = 0

    def rows(self, first: int, count: int) -> list[Window]:
        """The next `count` samples; `first` says which they are. What is skipped is read too, and left out."""
        assert first == self._next_sample, f"sample {first} of a stream that is at sample {self._next_sample}"
        stay = set(self.skips.numbers(np.arange(first, first + count, dtype=np.int64)).tolist())
        numbers = np.arange(self.skips.end(first), self.skips.end(first + count), dtype=np.int64)
        owners, _ = self.blend.locate(numbers)
        read = [(number, self.sources[owner].next()) for number, owner in zip(numbers.tolist(), owners, strict=True)]
        self._next_sample = first + count
        return [window for number, window in read if number in stay]

    def state_dict(self) -> dict[str, Any]:
        """The positions after the rows read so far."""
        return {"next_sample": self._next_sample, "sources": [source.state_dict() for source in self.sources]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the positions that state_dict gave."""
        self._next_sample = state["next_sample"]
        for source, position in zip(self.sources, state["sources"], strict=True):
            source.load_state_dict(position)

    def check_positions(self, state: dict[str, Any]) -> None:
        """Raise ConfigError where a result of state_dict is of other streams; on every rank, reader or not."""
        positions = state["sources"]
        if [set(source.state_dict()) for source in self.sources] != [set(position) for position in positions]:
            raise ConfigError(
                f"the checkpoint's positions of stage {self.name!r} are of {len(positions)} streams, shuffled or not, "
                "and do not fit those that the config names now; put them and data.shuffle_block back, or begin the "
                "stage under another name"
            )

    def taken(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples each source gave."""
        return self.skips.taken(self.blend, num_samples)


def _weights_by_length(sources: Sequence[IndexedSource]) -> list[float]:
    """Each source's number of windows, raised for the smallest to what the blend's resolution can express."""
    lengths = [len(source) for source in sources]
    least = 2 * sum(lengths) / RESOLUTION
    return [max(length, least) for length in lengths]
