"""AdamW and SGD on flat shards: a constant number of kernels per bucket, whatever the number of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanotron.optim.buckets import Bucket, Buckets
from nanotron.parallel.params import Box, ParamSpec


class StateEntry(NamedTuple):
    """One box of optimizer state; ``kind`` is "master", "exp_avg" or "exp_avg_sq", ``tensor`` a view of the state."""

    kind: str
    spec: ParamSpec
    box: Box
    tensor: Tensor
    writes: bool
    """This rank's copy is the one a checkpoint keeps."""


class _Shard(NamedTuple):
    """The part of one bucket that this replica updates."""

    bucket: Bucket
    master: Tensor
    """Weights in update precision: a view of the bucket's own for float32 and float64, a copy for half precision."""
    moments: dict[str, Tensor]


class Optimizer:
    """What AdamW and SGD share: shards with master weights, the update count, state entries for checkpoints.

    ``grad_scale`` divides the gradients inside the fused kernels (so clipping costs no pass of its own), and a nonzero
    ``found_inf`` turns the update into nothing. Both are 0-dim tensors, never read by the host.
    """

    moment_names: tuple[str, ...] = ()

    def __init__(self, buckets: Buckets, *, weight_decay: float) -> None:
        self._buckets, self._weight_decay = buckets, weight_decay
        self._shards = [self._shard(bucket) for bucket in buckets.all]
        self.updates = torch.zeros((), dtype=torch.float32, device=buckets.all[0].weight_shard.device)
        """Updates made, those skipped for a non-finite gradient not counted."""

    def step(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Update every shard's weights, and leave them in the buckets for the gather."""
        self.updates += 1
        found_inf = found_inf.float()
        for (decay, lr_scale), shards in self._by_setting().items():
            grads = [shard.bucket.grad_shard.to(shard.master.dtype) for shard in shards]
            scale: Tensor | None = grad_scale.float()  # all that the fused kernels take
            if grads[0].dtype == torch.float64:  # where it would round every gradient to float32
                torch._foreach_div_(grads, grad_scale)
                scale = None
            self._update(shards, grads, lr * lr_scale, self._weight_decay if decay else 0.0, scale, found_inf)
        self.updates -= found_inf
        for shard in self._shards:
            if shard.master.dtype != shard.bucket.weight_shard.dtype:
                shard.bucket.weight_shard.copy_(shard.master)

    def load_masters_from_weights(self) -> None:
        """Start the master weights from the weights, after initialisation or a weights-only load."""
        for shard in self._shards:
            if shard.master.dtype != shard.bucket.weight_shard.dtype:
                shard.master.copy_(shard.bucket.weight_shard)

    def state(self) -> Iterator[StateEntry]:
        """All optimizer state of this rank, as boxes of global tensors."""
        for shard in self._shards:
            bucket = shard.bucket
            states = dict(shard.moments)
            if shard.master.dtype != bucket.weight_shard.dtype:
                states["master"] = shard.master
            for kind, flat in states.items():
                for spec, box, view in bucket.boxes(flat, bucket.shard):
                    yield StateEntry(kind, spec, box, view, bucket.writes)

    def masters(self) -> Iterator[tuple[Bucket, Tensor]]:
        """The weights in update precision that this rank's norms count: each bucket's ``norm_shard``."""
        for shard in self._shards:
            bucket = shard.bucket
            if bucket.key.counted:
                yield bucket, shard.master[bucket.norm_part]

    def _shard(self, bucket: Bucket) -> _Shard:
        weights = bucket.weight_shard
        master = weights.to(torch.promote_types(weights.dtype, torch.float32))  # itself when the dtype is equal
        return _Shard(bucket, master, {name: torch.zeros_like(master) for name in self.moment_names})

    def _by_setting(self) -> dict[tuple[bool, float], list[_Shard]]:
        settings: dict[tuple[bool, float], list[_Shard]] = {}
        for shard in self._shards:
            setting = (shard.bucket.key.decay, shard.bucket.key.lr_scale)
            settings.setdefault(setting, []).append(shard)
        return settings

    def _update(
        self,
        shards: Sequence[_Shard],
        grads: list[Tensor],
        lr: float,
        weight_decay: float,
        grad_scale: Tensor | None,
        found_inf: Tensor,
    ) -> None:
        raise AssertionError("each optimizer has its own update")


class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv 1711.05101), bias-corrected."""

    moment_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, buckets: Buckets, *, weight_decay: float, beta1: float, beta2: float, eps: float) -> None:
        super().__init__(buckets, weight_decay=weight_decay)
        self._settings: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "eps": eps}

    def _update(
        self,
        shards: Sequence[_Shard],
        grads: list[Tensor],
        lr: float,
        weight_decay: float,
        grad_scale: Tensor | None,
        found_inf: Tensor,
    ) -> None:
        # The operator behind torch.optim.AdamW(fused=True); the class would import torch._dynamo (seconds per rank).
        torch._fused_adamw_(
            [shard.master for shard in shards],
            grads,
            [shard.moments["exp_avg"] for shard in shards],
            [shard.moments["exp_avg_sq"] for shard in shards],
            [],
            [self.updates] * len(shards),
            lr=lr,
            weight_decay=weight_decay,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
            **self._settings,
        )


class SGD(Optimizer):
    """Plain stochastic gradient descent, without momentum; weight decay is added to the gradient."""

    def _update(
        self,
        shards: Sequence[_Shard],
        grads: list[Tensor],
        lr: float,
        weight_decay: float,
        grad_scale: Tensor | None,
        found_inf: Tensor,
    ) -> None:
        torch._fused_sgd_(
            [shard.master for shard in shards],
            grads,
            [],
            weight_decay=weight_decay,
            momentum=0.0,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
