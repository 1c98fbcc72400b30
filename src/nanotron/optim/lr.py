"""The learning rate: a pure function of how many updates have been made."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi, sqrt
from typing import Protocol


class LRStep(Protocol):
    """The learning rate from an update on."""

    @property
    def step(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...


class LRSchedule(Protocol):
    """The resolved keys of ``optimizer.learning_rate_scheduler``; steps are counted in updates, from 1."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def lr_warmup_steps(self) -> int: ...
    @property
    def lr_warmup_style(self) -> str: ...
    @property
    def lr_decay_style(self) -> str: ...
    @property
    def lr_decay_steps(self) -> int: ...
    @property
    def lr_decay_starting_step(self) -> int: ...
    @property
    def min_decay_lr(self) -> float: ...
    @property
    def lr_rewarm_steps(self) -> int: ...
    @property
    def lr_steps(self) -> Sequence[LRStep]: ...


def learning_rate(schedule: LRSchedule, update: int) -> float:
    """LR of the ``update``-th update (1, 2, …): warm-up, plateau, decay, floor, or once more with re-warm (WSD).

        peak        ________                           ________
                   /        \\                         /        \\
                  /          \\__   linear | cosine   /          \\__
        floor    /              \\__ | 1-sqrt ______/              \\__
              warmup  start  start + decay         rewarm

    An inverse-sqrt decay goes on as 1/√update to the end, and steps are what the list of them says.
    """
    peak, floor, start = schedule.learning_rate, schedule.min_decay_lr, schedule.lr_decay_starting_step
    warmup, style, length = schedule.lr_warmup_steps, schedule.lr_decay_style, schedule.lr_decay_steps
    if update <= warmup:
        return peak if schedule.lr_warmup_style == "constant" else peak * update / warmup
    if style == "steps":
        return [peak, *(each.learning_rate for each in schedule.lr_steps if each.step <= update)][-1]
    if update < start:
        return peak
    if style == "inverse-sqrt":
        return max(floor, peak * sqrt(max(1, start) / update))
    if update > start + length and schedule.lr_rewarm_steps:
        rewarm = schedule.lr_rewarm_steps
        place = (update - start - length - 1) % (rewarm + start - warmup + length) + 1  # in its cycle, from 1
        if place <= rewarm:
            return floor + (peak - floor) * place / rewarm
        return learning_rate(schedule, warmup + place - rewarm)
    if update >= start + length:
        return floor
    progress = (update - start) / length
    remaining = {"linear": 1 - progress, "cosine": (1 + cos(pi * progress)) / 2, "1-sqrt": 1 - sqrt(progress)}
    return floor + (peak - floor) * remaining[style]
