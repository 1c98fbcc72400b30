"""The learning rate: a pure function of how many updates have been made."""

from __future__ import annotations

from math import cos, pi, sqrt
from typing import Protocol


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


def learning_rate(schedule: LRSchedule, update: int) -> float:
    """LR of the ``update``-th update (1, 2, …): warm-up, plateau, decay, floor.

        peak        ________
                   /        \\
                  /          \\__   linear | cosine | 1-sqrt
        floor    /              \\__________
              warmup  start  start + decay steps
    """
    peak, floor = schedule.learning_rate, schedule.min_decay_lr
    if update <= schedule.lr_warmup_steps:
        return peak if schedule.lr_warmup_style == "constant" else peak * update / schedule.lr_warmup_steps
    if update < schedule.lr_decay_starting_step:
        return peak
    if update >= schedule.lr_decay_starting_step + schedule.lr_decay_steps:
        return floor
    progress = (update - schedule.lr_decay_starting_step) / schedule.lr_decay_steps
    remaining = {"linear": 1 - progress, "cosine": (1 + cos(pi * progress)) / 2, "1-sqrt": 1 - sqrt(progress)}
    return floor + (peak - floor) * remaining[schedule.lr_decay_style]
