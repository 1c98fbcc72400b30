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
        self._bound: dict[Tensor, tuple[Callable[[], Tensor], Callable[[], None], Callable[[], bool]]] = {}
        self._deferring = False
        self._jobs: list[Callable[[], None]] = []

    def bind(
        self,
        weight: Tensor,
        buffer: Callable[[], Tensor],
        contributed: Callable[[], None] = lambda: None,
        is_first: Callable[[], bool] = lambda: False,
    ) -> None:
        """Have ``weight``'s gradient accumulate into ``buffer()``; ``contributed()`` follows each addition.

        ``is_first()`` is asked before one: whether nothing has been added yet, so what is there means nothing.
        """
        self._bound[weight] = buffer, contributed, is_first

    def __contains__(self, weight: Tensor) -> bool:
        return weight in self._bound

    def add(self, weight: Tensor, accumulate: Accumulate) -> None:
        """Have ``accumulate`` add this microbatch's gradient of ``weight``: now, or when the job is run."""
        if self._deferring:
            later = torch.no_grad()(self.add_now)  # as in the backward that it is deferred from
            self._jobs.append(partial(later, weight, accumulate))
        else:
            self.add_now(weight, accumulate)

    def add_now(self, weight: Tensor, accumulate: Accumulate) -> None:
        """Run ``accumulate`` inside a backward, and say that the weight has had a contribution."""
        buffer, contributed, is_first = self._bound[weight]
        accumulate(buffer(), is_first())  # the buffer may be a new one
        contributed()

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
