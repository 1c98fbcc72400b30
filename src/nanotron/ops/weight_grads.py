"""The meeting point of layers, which compute weight gradients, and buckets, which hold them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


class WeightGrads:
    """Where the weight gradients of one chunk go: into flat gradient buffers, at once or when the schedule says W.

    ``into`` maps a weight to the view of its gradient buffer that it accumulates into; a weight that is not in it gets
    its gradient from autograd as usual. ``ready(weight)`` is called after each contribution.
    """

    def __init__(self) -> None:
        self.into: dict[Tensor, Tensor] = {}
        self.ready: Callable[[Tensor], None] = lambda weight: None
        self.defer = False
        self._jobs: list[Callable[[], None]] = []

    def add(self, weight: Tensor, accumulate: Callable[[Tensor], None]) -> None:
        """Have ``accumulate(buffer)`` add this microbatch's gradient of ``weight``: now, or when the job is run."""
        if self.defer:
            self._jobs.append(partial(self._run, weight, accumulate))
        else:
            self._run(weight, accumulate)

    def take(self) -> list[Callable[[], None]]:
        """The jobs deferred since the last call, oldest first; each must be run exactly once."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def _run(self, weight: Tensor, accumulate: Callable[[Tensor], None]) -> None:
        with torch.no_grad():  # a deferred job runs outside of backward
            accumulate(self.into[weight])
        self.ready(weight)
