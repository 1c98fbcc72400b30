"""Validation while training: the loss on held-out data, token-weighted, the same on every layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanotron.batch import IGNORED_LABEL, Batch
from nanotron.parallel.comm import all_reduce_

if TYPE_CHECKING:
    from nanotron.parallel.mesh import Mesh
    from nanotron.training.step import Training


def validation_loss(training: Training, batches: Iterator[list[Batch]], mesh: Mesh) -> Tensor | None:
    """Mean loss over the targets of all batches, every rank giving its replica's; None when there are no batches.

    It is that of the weights' average, where the optimizer keeps one; on the device, so the host need not wait for it.
    """
    with training.optimizer.averaged():
        return _loss(training, batches, mesh)


def _loss(training: Training, batches: Iterator[list[Batch]], mesh: Mesh) -> Tensor | None:
    total = torch.zeros(2, dtype=torch.float64, device=training.optimizer.updates.device)  # [loss sum, targets]
    num_batches = 0
    for microbatches in batches:
        num_batches += 1
        losses = training.pipeline.evaluate(microbatches)
        if mesh.coord("tp") == 0 and "lm" in losses:
            total[0] += losses["lm"].double()
        if mesh.coord("tp") == 0 and mesh.coord("pp") == 0:
            total[1] += torch.stack([(batch.labels != IGNORED_LABEL).sum() for batch in microbatches]).sum()
    if num_batches == 0:
        return None
    all_reduce_(total, mesh.world_group())
    return total[0] / total[1].clamp(min=1)
