"""Other layouts of the same run: which are legal, and how to write them down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from nanotron.config.rules import RULES
from nanotron.pipeline.custom import find_problems

if TYPE_CHECKING:
    from nanotron.config import Config

Change = Mapping[str, Any]
"""Dotted keys and their new values."""


def changed(config: Config, change: Change) -> Config:
    """The config with some keys replaced; stages are balanced anew. It shares all other sections with the first one."""
    other = copy(config)
    for name, value in {**change, "parallelism.pp_layers": None}.items():
        *sections, key = name.split(".")
        holder: Any = other
        for section in sections:
            own = copy(getattr(holder, section))
            setattr(holder, section, own)
            holder = own
        setattr(holder, key, value)
    return other


def sharded_more(config: Config, per_node: int) -> Iterator[Change]:
    """Higher ZeRO stages, those that send least first: shards within a node (hybrid) before shards over all."""
    layout, stage = config.parallelism, config.optimizer.zero_stage
    on_a_node = per_node // (layout.tp * layout.context_parallel_size)
    ep = layout.expert_parallel_size
    hybrid = [on_a_node] if 1 < on_a_node < layout.dp and layout.dp % on_a_node == on_a_node % ep == 0 else []
    for higher in range(stage + 1, 4) if layout.dp * layout.context_parallel_size > 1 else ():
        for shards in [*(hybrid if higher > 1 else []), None]:
            yield {"optimizer.zero_stage": higher, "parallelism.dp_shard": shards}


def is_legal(config: Config) -> bool:
    """Whether the trainer would accept the layout."""
    return config.tokens.batch_accumulation_per_replica >= 1 and not layout_problems(config)


def layout_problems(config: Config) -> list[str]:
    """Why the trainer would not accept the layout: rules between keys, and what the schedule needs."""
    layout, counts = config.parallelism, {config.tokens.batch_accumulation_per_replica}
    found = [f"{key}: {text}" for rule in RULES for key, text in rule.ask(config)]
    for microbatches in counts.union(config.ramp_microbatches.values()):
        found += find_problems(layout.pp_engine, layout.pp, layout.pp_virtual_stages, microbatches)
    return found


def written(change: Change) -> str:
    """`tp=4, pp=2`: a change as a person would say it; what is left to its default goes without saying."""
    said = {name.rpartition(".")[2]: value for name, value in change.items() if value is not None}
    return ", ".join(f"{name}={_plain(value)}" for name, value in said.items())


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
