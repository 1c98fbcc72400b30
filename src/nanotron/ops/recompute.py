"""Layers that are computed again in backward: from their input alone, or with what was multiplied still at hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, noop_context_fn

Result = TypeVar("Result")
Recompute = Literal[False, True, "selective"]
"""What a layer keeps for its backward: all (False), its input alone (True), or that and what its matmuls gave."""


class MatmulOutputs:
    """The results of a layer's matmuls, kept by its forward for when the layer is computed again.

    The last ones are not kept. Nothing in the layer needs their values in backward: computing it again ends where the
    last matmul has its input back.
    """

    def __init__(self) -> None:
        self._kept: deque[list[Tensor]] | None = None
        self._again = False

    def keep(self, results: Sequence[Tensor]) -> None:
        """Keep a matmul's results, after their collectives, if a layer's forward is under way that is to."""
        if self._kept is not None:
            self._kept.append([result.detach() for result in results])  # autograd makes the others point at the layer

    def recall(self) -> list[Tensor] | None:
        """The results of the next matmul of a layer that is computed again; None: there is none, multiply."""
        return self._kept.popleft() if self._kept is not None and self._again else None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What goes around a layer's forward, and what around its being computed again."""
        kept = deque[list[Tensor]]()
        return self._around(kept, again=False), self._around(kept, again=True)

    @contextmanager
    def _around(self, kept: deque[list[Tensor]], *, again: bool) -> Iterator[None]:
        self._kept, self._again = kept, again
        try:
            yield
        finally:
            self._kept = None
        if not again:
            kept.append([without_memory(result) for result in kept.pop()])


def without_memory(x: Tensor) -> Tensor:
    """A tensor of x's shape, to read which would fail."""
    return torch.empty_like(x, device="meta")


def recomputed(
    layer: Callable[..., Result], *inputs: Any, matmuls: MatmulOutputs | None = None, offload: bool = False
) -> Result:
    """``layer(*inputs)``, computed again in backward; given ``matmuls``, without multiplying again.

    ``offload``: keep the inputs in host memory meanwhile.
    """
    contexts = noop_context_fn if matmuls is None else matmuls.contexts
    with on_host() if offload else nullcontext():  # the inputs are saved here; what the layer saves is not kept
        result: Result = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return result


def on_host() -> AbstractContextManager[None]:
    """Keep what autograd saves inside in host memory, pinned where there is a device."""
    context: AbstractContextManager[None] = save_on_cpu(pin_memory=torch.accelerator.is_available())
    return context
