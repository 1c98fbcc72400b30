"""Updates of flat shards: a constant number of kernels per bucket, whatever the number of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanotron.ops.host_memory import host_memory
from nanotron.optim.buckets import Bucket, Buckets
from nanotron.parallel.params import Box, ParamSpec


class StateEntry(NamedTuple):
    """One box of optimizer state; ``kind`` is "master" or the name of a moment, ``tensor`` a view of the state."""

    kind: str
    spec: ParamSpec
    box: Box
    tensor: Tensor
    writes: bool
    """This rank's copy is the one a checkpoint keeps."""


class Shard(NamedTuple):
    """The part of one bucket that this replica updates."""

    bucket: Bucket
    master: Tensor
    """Weights in update precision: a view of the bucket's own for float32 and float64, a copy for half precision."""
    moments: dict[str, Tensor]
    """What the rule keeps, by name; with ``"ema"``, the average of the weights, where there is one."""

    @property
    def grad(self) -> Tensor:
        """Its gradient in update precision, where the master weights are: a copy only where that is elsewhere, or
        another one, so it may be overwritten.
        """
        return self.bucket.grad_shard.to(self.master)

    def at(self, home: torch.device) -> Shard:
        """The same where its moments are: weights that are their own masters are not."""
        return self if self.master is not self.bucket.weight_shard else self._replace(master=self.master.to(home))


class Step(NamedTuple):
    """What one update is made with. The tensors are 0-dim and never read by the host."""

    lr: float
    grad_scale: Tensor
    """What gradients are to be divided by, so that clipping costs no pass of its own."""
    found_inf: Tensor
    """Nonzero turns the update into nothing."""
    updates: Tensor
    """Updates made, with this one."""


class Rule:
    """How an optimizer moves weights; each bucket names its own (``GroupKey.optimizer``)."""

    moment_names: tuple[str, ...] = ()
    needs_all = False
    """Whether an update has to see all of its shards at once."""

    def update(self, shards: Sequence[Shard], step: Step) -> None:
        """Move the shards' master weights and moments."""
        raise AssertionError("each rule has its own update")


class Optimizer:
    """Shards with master weights and moments, the update count, state entries for checkpoints.

    ``rules``: by the name that parameters have for the one that updates them. ``ema_decay``: how much of an
    exponential moving average of the weights stays at each update; None: there is none. ``home``: where moments, and
    the master weights of half precision, are kept and updated; None: beside the weights.
    """

    def __init__(
        self,
        buckets: Buckets,
        rules: Mapping[str, Rule],
        *,
        ema_decay: float | None = None,
        home: torch.device | None = None,
    ) -> None:
        self._buckets, self._rules, self._ema_decay = buckets, rules, ema_decay
        device = buckets.all[0].weight_shard.device
        self._home = home or device
        self._elsewhere = self._home != device
        self._shards = [self._shard(bucket) for bucket in buckets.all]
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        """Updates made, those skipped for a non-finite gradient not counted."""

    def step(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Update every shard's weights, and leave them in the buckets for the gather.

        ``grad_scale`` divides the gradients, a nonzero ``found_inf`` leaves the update out; 0-dim tensors both.
        """
        self.updates += 1
        found_inf = found_inf.float()
        step = Step(lr, *(number.to(self._home) for number in (grad_scale, found_inf, self.updates)))
        for name, rule in self._rules.items():
            for shards in self._at_once(name, rule):
                at_home = [shard.at(self._home) for shard in shards]
                rule.update(at_home, step)
                for shard in at_home:
                    if self._ema_decay is not None:
                        moves = (1.0 - self._ema_decay) * (1.0 - step.found_inf)
                        shard.moments["ema"].lerp_(shard.master, moves.to(shard.master.dtype))
                    if shard.master is not shard.bucket.weight_shard:
                        shard.bucket.weight_shard.copy_(shard.master)
        self.updates -= found_inf

    def _at_once(self, name: str, rule: Rule) -> list[list[Shard]]:
        """The shards that a rule updates in one call: all, or one by one where each has to be copied for it."""
        shards = [shard for shard in self._shards if shard.bucket.key.optimizer == name]
        copied = any(shard.bucket.grad_shard.dtype != shard.master.dtype for shard in shards)
        apart = self._elsewhere or (copied and not rule.needs_all)
        return [[shard] for shard in shards] if apart or not shards else [shards]

    def load_masters_from_weights(self) -> None:
        """Start the master weights from the weights, after initialisation or a weights-only load."""
        for shard in self._shards:
            if shard.master.dtype != shard.bucket.weight_shard.dtype:
                shard.master.copy_(shard.bucket.weight_shard)
        self.start_average()

    def start_average(self) -> None:
        """Have the average of the weights, if there is one, begin with what they are."""
        for shard in self._shards if self._ema_decay is not None else ():
            shard.moments["ema"].copy_(shard.master)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the average, if there is one, in the weights' place meanwhile; a collective."""
        self._buckets.wait_gather()  # of the last update
        if self._ema_decay is None:
            yield
            return
        kept = [shard.bucket.weight_shard.clone() for shard in self._shards]
        self._put([shard.moments["ema"] for shard in self._shards])
        yield
        self._put(kept)

    def _put(self, weights: Sequence[Tensor]) -> None:
        for shard, values in zip(self._shards, weights, strict=True):
            shard.bucket.weight_shard.copy_(values)
        self._buckets.start_gather()
        self._buckets.wait_gather()

    def flat_state(self) -> Iterator[tuple[str, Bucket, Tensor]]:
        """All optimizer state of this rank: kind, bucket, and what is kept of its ``shard``."""
        for shard in self._shards:
            for kind, flat in shard.moments.items():
                yield kind, shard.bucket, flat
            if shard.master.dtype != shard.bucket.weight_shard.dtype:
                yield "master", shard.bucket, shard.master

    def state(self) -> Iterator[StateEntry]:
        """The same, as boxes of global tensors."""
        for kind, bucket, flat in self.flat_state():
            for spec, box, view in bucket.boxes(flat, bucket.shard):
                yield StateEntry(kind, spec, box, view, bucket.writes)

    def masters(self) -> Iterator[tuple[Bucket, Tensor]]:
        """The weights in update precision that this rank's norms count: each bucket's ``norm_shard``."""
        for shard in self._shards:
            bucket = shard.bucket
            if bucket.key.counted:
                yield bucket, shard.master[bucket.norm_part]

    def _shard(self, bucket: Bucket) -> Shard:
        weights = bucket.weight_shard
        names = [*self._rules[bucket.key.optimizer].moment_names, *["ema"] * (self._ema_decay is not None)]
        master = weights  # unless they are of half precision
        if weights.dtype != (precision := torch.promote_types(weights.dtype, torch.float32)):
            master = self._kept(weights, precision).copy_(weights)
        moments = {name: self._kept(master).zero_() for name in names}
        return Shard(bucket, master, moments)

    def _kept(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a shard's state."""
        if not self._elsewhere:
            return torch.empty_like(like, dtype=dtype)
        size = torch.empty((), dtype=dtype or like.dtype).element_size() * like.numel()
        return host_memory(size, {like.device.type}).view(dtype or like.dtype)


class AdamW(Rule):
    """Adam with decoupled weight decay (arXiv 1711.05101), bias-corrected."""

    moment_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, *, beta1: float, beta2: float, eps: float) -> None:
        self._settings: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "eps": eps}

    def update(self, shards: Sequence[Shard], step: Step) -> None:
        for (lr_scale, weight_decay), alike in by_setting(shards):
            grads, grad_scale = _gradients(alike, step)
            # What is behind torch.optim.AdamW(fused=True); the class would import torch._dynamo (seconds per rank).
            torch._fused_adamw_(
                [shard.master for shard in alike],
                grads,
                [shard.moments["exp_avg"] for shard in alike],
                [shard.moments["exp_avg_sq"] for shard in alike],
                [],
                [step.updates] * len(alike),
                lr=step.lr * lr_scale,
                weight_decay=weight_decay,
                amsgrad=False,
                maximize=False,
                grad_scale=grad_scale,
                found_inf=step.found_inf,
                **self._settings,
            )


class SGD(Rule):
    """Plain stochastic gradient descent, without momentum; weight decay is added to the gradient."""

    def update(self, shards: Sequence[Shard], step: Step) -> None:
        for (lr_scale, weight_decay), alike in by_setting(shards):
            grads, grad_scale = _gradients(alike, step)
            torch._fused_sgd_(
                [shard.master for shard in alike],
                grads,
                [],
                weight_decay=weight_decay,
                momentum=0.0,
                lr=step.lr * lr_scale,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                grad_scale=grad_scale,
                found_inf=step.found_inf,
            )


def by_setting(shards: Sequence[Shard]) -> Iterator[tuple[tuple[float, float], list[Shard]]]:
    """The shards that share what multiplies the learning rate, and weight decay."""
    settings: dict[tuple[float, float], list[Shard]] = {}
    for shard in shards:
        settings.setdefault((shard.bucket.key.lr_scale, shard.bucket.key.weight_decay), []).append(shard)
    yield from settings.items()


def _gradients(shards: Sequence[Shard], step: Step) -> tuple[list[Tensor], Tensor | None]:
    """The shards' gradients, and what the fused kernels divide them by: a float32 number, all that they take."""
    grads = [shard.grad for shard in shards]
    if grads[0].dtype != torch.float64:
        return grads, step.grad_scale.float()
    torch._foreach_div_(grads, step.grad_scale)  # which would round every gradient to float32
    return grads, None
