"""How close a step's routers came to another choice: where scores nearly tie, rounding alone may flip a route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nanotron.models import experts
from nanotron.training.step import Training


class NearTies:
    """Of each layer, the smallest relative gap between a score that was chosen and the best that was not."""

    def __init__(self) -> None:
        self._layer, self._gaps = "", dict[str, float]()

    def take(self, layers: Sequence[int]) -> list[float]:
        """Of this rank's tokens since the last call; infinite in layers that it does not have."""
        gaps = [self._gaps.get(f"layers.{layer}", torch.inf) for layer in layers]
        self._gaps.clear()
        return gaps

    def enter(self, layer: str) -> None:
        self._layer = layer

    def choose(self, scores: Tensor, top_k: int, **groups: Any) -> Tensor:
        """As ``ops.experts.choose``, with its gap noted."""
        gap = min(self._gaps.get(self._layer, torch.inf), smallest_gap(scores, top_k, **groups))
        self._gaps[self._layer] = gap
        return CHOOSE(scores, top_k, **groups)


CHOOSE = experts.choose


@contextmanager
def near_ties(training: Training) -> Iterator[NearTies]:
    """Watch the routers of a rank."""
    ties = NearTies()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(experts, "choose", ties.choose))
        for block in (block for chunk in training.chunks for block in chunk.layers):
            if isinstance(block.mlp, experts.MoE):
                enter = block.mlp.router.register_forward_pre_hook(
                    lambda router, inputs, name=block.name: ties.enter(name)
                )
                stack.callback(enter.remove)
        yield ties


def smallest_gap(scores: Tensor, top_k: int, *, groups: int, top_k_groups: int, best_of_group: int) -> float:
    """Over tokens, of the choice of experts, and of that of groups before it; relative to what was chosen."""
    found = [torch.inf]
    if groups > 1:
        by_group = scores.unflatten(-1, (groups, -1))
        strength = by_group.topk(best_of_group, -1).values.sum(-1)
        found.append(_gap(strength, top_k_groups))
        kept = torch.zeros_like(strength, dtype=torch.bool).scatter(-1, strength.topk(top_k_groups, -1).indices, True)
        scores = by_group.where(kept[..., None], -torch.inf).flatten(-2)
    return min(*found, _gap(scores, top_k))


def _gap(scores: Tensor, top_k: int) -> float:
    if top_k == scores.shape[-1]:
        return torch.inf
    best = scores.topk(top_k + 1, -1).values
    last, next_ = best[..., top_k - 1], best[..., top_k]
    return float(((last - next_) / last.abs()).min())
