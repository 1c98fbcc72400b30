"""The meeting point of layers, which compute weight gradients, and buckets, which hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor


class WeightGrads:
    """Where the weight gradients of one chunk go: into buffers, at once or when the schedule says W.

    A weight that is bound to no buffer gets its gradient from autograd as usual.
    """

    def __init__(self) -> None:
        self._buffers: dict[Tensor, Callable[[], Tensor]] = {}
        self._contributed: dict[Tensor, Callable[[Tensor], None]] = {}
        self._deferring = False
        self._jobs: list[Callable[[], None]] = []

    def bind(
        self, weight: Tensor, buffer: Callable[[], Tensor], contributed: Callable[[Tensor], None] = lambda weight: None
    ) -> None:
        """Have ``weight``'s gradient accumulate into ``buffer()``; ``contributed(weight)`` follows each addition."""
        self._buffers[weight], self._contributed[weight] = buffer, contributed

    def __contains__(self, weight: Tensor) -> bool:
        return weight in self._buffers

    def add(self, weight: Tensor, accumulate: Callable[[Tensor], None]) -> None:
        """Have ``accumulate(buffer)`` add this microbatch's gradient of ``weight``: now, or when the job is run."""
        if self._deferring:
            self._jobs.append(partial(self.add_now, weight, accumulate))
        else:
            self.add_now(weight, accumulate)

    def add_now(self, weight: Tensor, accumulate: Callable[[Tensor], None]) -> None:
        """Run ``accumulate(buffer)``, and say that the weight has had a contribution."""
        with torch.no_grad():  # a deferred job runs outside of backward
            accumulate(self._buffers[weight]())
        self._contributed[weight](weight)

    @contextmanager
    def deferring(self, wanted: bool = True) -> Iterator[None]:
        """Keep the gradients computed inside as jobs, if wanted."""
        self._deferring = wanted
        try:
            yield
        finally:
            self._deferring = False

    def take(self) -> list[Callable[[], None]]:
        """The jobs deferred since the last call, oldest first; each must be run exactly once."""
        jobs, self._jobs = self._jobs, []
        return jobs
