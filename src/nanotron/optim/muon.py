"""Muon (arXiv 2502.16982): the momentum of a matrix, made orthogonal by Newton-Schulz iterations, is its update.

    gradient shards ─► momentum, of each shard ─► whole matrices to their owners (owners.py) ─► Newton-Schulz
    weight shards   ◄─ decay, minus lr · update ◄─ shards, back ◄─────────────────────────────┘

Whatever the layout, the iterations see the whole matrix, so the update is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from nanotron.optim.optimizer import Rule, Shard, Step
from nanotron.optim.owners import Owners
from nanotron.parallel.mesh import Mesh

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x³ and x⁵ in an iteration: steepest at 0, and it keeps what is near 1 within about 0.7 and 1.2."""
_EPS = 1e-7
_AT_ONCE = 1 << 26  # elements, so that many matrices take no more memory than a large one


class Muon(Rule):
    """Muon for the matrices of a rank's pipeline stage."""

    moment_names = ("momentum",)
    needs_all = True

    def __init__(
        self,
        mesh: Mesh,
        *,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        scale: Literal["match_rms", "spectral"],
        ns_dtype: torch.dtype,
    ) -> None:
        self._mesh, self._momentum, self._nesterov = mesh, momentum, nesterov
        self._ns_steps, self._scale, self._ns_dtype = ns_steps, scale, ns_dtype
        self._owners: Owners | None = None

    def update(self, shards: Sequence[Shard], step: Step) -> None:
        if self._owners is None:  # the first time: what the ranks hold stays as it is
            cost = partial(newton_schulz_flops, steps=self._ns_steps)
            self._owners = Owners([shard.bucket for shard in shards], self._mesh, cost)
        directions = [self._direction(shard, step) for shard in shards]
        wholes = self._owners.collect([direction.to(self._ns_dtype) for direction in directions])
        for shape, whole in wholes.items():
            for part in torch.split(whole, max(1, _AT_ONCE // (shape[0] * shape[1]))):
                part.copy_(newton_schulz(part, self._ns_steps)).mul_(update_scale(shape, self._scale))
        self._owners.give_back(wholes, directions)
        for shard, direction in zip(shards, directions, strict=True):
            lr, keep = step.lr * shard.bucket.key.lr_scale, (1.0 - step.found_inf).to(direction.dtype)
            shard.master.mul_(1.0 - lr * shard.bucket.key.weight_decay * keep)
            shard.master.addcmul_(direction, keep, value=-lr)

    def _direction(self, shard: Shard, step: Step) -> Tensor:
        """The shard's momentum after this gradient, in the gradient's memory; nothing moves where ``found_inf``."""
        grad, momentum = shard.grad, shard.moments["momentum"]
        grad.div_(step.grad_scale.to(grad.dtype)).masked_fill_(step.found_inf > 0, 0.0)
        momentum.lerp_(grad, ((1.0 - step.found_inf) * (1.0 - self._momentum)).to(grad.dtype))
        return grad.lerp_(momentum, self._momentum) if self._nesterov else grad.copy_(momentum)


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """About the nearest orthogonal matrix to each: [k, m, n] -> [k, m, n], all singular values near 1."""
    linear, cubic, quintic = COEFFICIENTS
    norms = torch.linalg.vector_norm(
        matrices, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(matrices.dtype, torch.float32)
    )
    x: Tensor = (matrices / norms.clamp(min=_EPS)).to(matrices.dtype)
    x = x.mT if matrices.shape[-2] > matrices.shape[-1] else x  # the smaller square
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


def newton_schulz_flops(shape: tuple[int, int], steps: int) -> int:
    """Of one matrix."""
    small, large = sorted(shape)
    return steps * (4 * small * small * large + 2 * small**3)


def update_scale(shape: tuple[int, int], scale: Literal["match_rms", "spectral"]) -> float:
    """What an orthogonal update of a matrix is multiplied by.

    ``match_rms``: its elements are as large as AdamW's usually are, 0.2 in the root mean square, so that learning rate
    and weight decay can be AdamW's. ``spectral``: it changes outputs as much at every width (arXiv 2310.17813).
    """
    rows, columns = shape
    return 0.2 * sqrt(max(rows, columns)) if scale == "match_rms" else sqrt(max(1.0, rows / columns))
