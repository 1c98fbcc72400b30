"""The meeting point of layers, which compute weight gradients, and buckets, which hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

Accumulate = Callable[[Tensor, bool], None]
"""(buffer, first): adds a gradient to the buffer, or, if it is the first one there, writes over what the buffer had."""


class WeightGrads:
    """Where the weight gradients of one chunk go: into buffers, at once or when the schedule says W.

    A weight that is bound to no buffer gets its gradient from autograd as usual.
    """

    def __init__(self) -> None:
        self._buffers: dict[Tensor, Callable[[], Tensor]] = {}
        self._contributed: dict[Tensor, Callable[[Tensor], None]] = {}
        self._is_first: dict[Tensor, Callable[[Tensor], bool]] = {}
        self._deferring = False
        self._jobs: list[Callable[[], None]] = []

    def bind(
        self,
        weight: Tensor,
        buffer: Callable[[], Tensor],
        contributed: Callable[[Tensor], None] = lambda weight: None,
        is_first: Callable[[Tensor], bool] = lambda weight: False,
    ) -> None:
        """Have ``weight``'s gradient accumulate into ``buffer()``; ``contributed(weight)`` follows each addition.

        ``is_first(weight)`` is asked before one: whether nothing has been added yet, so what is there means nothing.
        """
        self._buffers[weight], self._contributed[weight], self._is_first[weight] = buffer, contributed, is_first

    def __contains__(self, weight: Tensor) -> bool:
        return weight in self._buffers

    def add(self, weight: Tensor, accumulate: Accumulate) -> None:
        """Have ``accumulate`` add this microbatch's gradient of ``weight``: now, or when the job is run."""
        if self._deferring:
            self._jobs.append(partial(self.add_now, weight, accumulate))
        else:
            self.add_now(weight, accumulate)

    def add_now(self, weight: Tensor, accumulate: Accumulate) -> None:
        """Run ``accumulate``, and say that the weight has had a contribution."""
        with torch.no_grad():  # a deferred job runs outside of backward
            buffer = self._buffers[weight]()  # which may be a new one
            accumulate(buffer, self._is_first[weight](weight))
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


def add(buffer: Tensor, addend: Tensor, first: bool) -> None:
    """Add to a buffer, or, if it is the first addend, write over what the buffer had."""
    if first:
        buffer.copy_(addend)
    else:
        buffer.add_(addend)
