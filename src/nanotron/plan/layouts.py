"""Other layouts of the same run: which are legal, and how to write them down."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from nanotron.config.rules import RULES
from nanotron.pipeline.custom import find_problems

if TYPE_CHECKING:
    from nanotron.config import Config

Change = Mapping[str, Any]
"""Dotted keys and their new values."""


def changed(config: Config, change: Change) -> Config:
    """The config with some keys replaced; stages are balanced anew."""
    other = deepcopy(config)
    for name, value in change.items():
        *sections, key = name.split(".")
        holder: Any = other
        for section in sections:
            holder = getattr(holder, section)
        setattr(holder, key, value)
    other.parallelism.pp_layers = None
    return other


def is_legal(config: Config) -> bool:
    """Whether the trainer would accept the layout."""
    return config.tokens.batch_accumulation_per_replica >= 1 and not layout_problems(config)


def layout_problems(config: Config) -> list[str]:
    """Why the trainer would not accept the layout: rules between keys, and what the schedule needs."""
    layout, microbatches = config.parallelism, config.tokens.batch_accumulation_per_replica
    found = [f"{key}: {text}" for rule in RULES for key, text in rule.ask(config)]
    return found + find_problems(layout.pp_engine, layout.pp, layout.pp_virtual_stages, microbatches)


def written(change: Change) -> str:
    """`tp=4, pp=2`: a change as a person would say it."""
    return ", ".join(f"{name.rpartition('.')[2]}={_plain(value)}" for name, value in change.items())


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
