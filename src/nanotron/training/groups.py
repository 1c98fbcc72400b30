"""What updates each parameter, and with which settings: ``optimizer.groups``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanotron.models.hf_nanotron_names import matching
from nanotron.models.specs import is_hidden
from nanotron.parallel.params import ParamSpec

if TYPE_CHECKING:
    from nanotron.config import OptimizerArgs


def grouped(specs: Mapping[str, ParamSpec], optimizer: OptimizerArgs) -> dict[str, ParamSpec]:
    """The parameters, updated as the optimizer's section says: its own settings, and those of groups that name them."""
    factory, highest = optimizer.optimizer_factory, optimizer.learning_rate_scheduler.learning_rate
    of: dict[str, dict[str, Any]] = {}
    for name, spec in specs.items():
        rule = "adamW" if factory.name == "muon" and not is_hidden(spec) else factory.name
        of[name] = {"learning_rate": None, "weight_decay": optimizer.weight_decay, "optimizer": rule}
    for group in optimizer.all_groups:
        for name in matching(specs, group.params):
            of[name] |= {key: said for key in of[name] if (said := getattr(group, key)) is not None}
    result = {}
    for name, (lr, weight_decay, rule) in ((name, tuple(said.values())) for name, said in of.items()):
        if lr is None:
            lr = factory.adam_learning_rate if factory.name == "muon" and rule == "adamW" else highest
        scale = specs[name].lr_scale * lr / highest
        result[name] = replace(specs[name], weight_decay=weight_decay, lr_scale=scale, optimizer=rule)
    return result
