"""The training loop of the peers that have none of their own: microbatches, clipping, AdamW in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.shapes import BETAS, CLIP, EPS, LEARNING_RATE, WEIGHT_DECAY

Loss = Callable[[Tensor, Tensor], Tensor]  # tokens and labels, each [b, s] -> their mean


def logits_loss(model: Callable[[Tensor], Tensor]) -> Loss:
    """The cross entropy of a model that returns logits, taken in float32 as every trainer does."""

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())

    return loss


def in_dtype(module: nn.Module, options: dict[str, Any]) -> AbstractContextManager[object]:
    """Give the weights the dtype that was asked for; what comes back surrounds every forward."""
    if options.get("precision") == "autocast":
        return torch.autocast("cpu", getattr(torch, options["dtype"]))
    module.to(getattr(torch, options["dtype"]))
    return nullcontext()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """The optimizer of everybody."""
    return torch.optim.AdamW(parameters, LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, fused=True)


def training_step(
    loss: Loss,
    parameters: Iterable[nn.Parameter],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    around_forward: AbstractContextManager[object] | None = None,
    not_last: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Callable[[], float]:
    """A function that makes one step; ``not_last`` surrounds all microbatches but the last, as DDP's no_sync does."""
    weights = list(parameters)
    optimizer = adamw(weights)
    precision = around_forward or nullcontext()

    def step() -> float:
        losses = []
        for index, (tokens, labels) in enumerate(batches):
            with not_last() if index + 1 < len(batches) else nullcontext():
                with precision:
                    part = loss(tokens, labels) / len(batches)
                part.backward()
                losses.append(part.detach())
        norm = nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return float(torch.stack(losses).sum())

    return step
