"""What would make a layout fit that does not: small changes, tried one, two and three at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from nanotron.config.rules import divisors
from nanotron.plan.layouts import Change, changed, is_legal, sharded_more
from nanotron.plan.predict import Plan, Planner

if TYPE_CHECKING:
    from nanotron.config import Config

TRIALS = 30  # combinations of one size; those that cost no devices come first


class Fix(NamedTuple):
    """A change with which the layout fits, and what it then costs."""

    change: Change
    plan: Plan

    @property
    def device_seconds(self) -> float:
        """Of a step: what the change is paid in."""
        return self.plan.step_seconds * self.plan.config.parallelism.world_size


def cheapest_fixes(planner: Planner, config: Config, count: int = 3) -> list[Fix]:
    """The cheapest changes that make the config fit; combinations are tried only while too few are found."""
    single = [change for change in _changes(config, planner.cluster.per_node) if is_legal(changed(config, change))]
    fixes: list[Fix] = []
    for size in (1, 2, 3):
        for parts in islice(combinations(single, size), TRIALS):
            merged: dict[str, Any] = {}
            for part in parts:
                merged |= part
            if len(merged) < sum(map(len, parts)) or any(fix.change.items() <= merged.items() for fix in fixes):
                continue  # two of them change one key, or fewer changes were enough
            other = changed(config, merged)
            if is_legal(other) and planner.fits(other):
                fixes.append(Fix(merged, planner.plan(other)))
        if len(fixes) >= count:
            break
    return sorted(fixes, key=lambda fix: fix.device_seconds)[:count]


def _changes(config: Config, per_node: int) -> Iterator[Change]:
    """Single changes that may save memory, for the same global batch; the last ones take more devices."""
    layout, tokens = config.parallelism, config.tokens
    rows, accumulation = tokens.micro_batch_size, tokens.batch_accumulation_per_replica
    if not layout.recompute_layer:
        yield {"parallelism.recompute_layer": "selective"}
    if layout.recompute_layer is not True:
        yield {"parallelism.recompute_layer": True}
    if layout.tp > 1 and not layout.sequence_parallel:
        yield {"parallelism.tp_mode": "REDUCE_SCATTER"}
    if config.loss_chunk is None and tokens.sequence_length > 1024:
        yield {"model.loss_chunk": 1024}
    yield from sharded_more(config, per_node)
    if layout.pp_engine != "1f1b" and layout.pp > 1:
        yield {"parallelism.pp_engine": "1f1b", "parallelism.pp_virtual_stages": 1}
    if rows % 2 == 0:
        yield {"tokens.micro_batch_size": rows // 2, "tokens.batch_accumulation_per_replica": accumulation * 2}
    if moe := config.model.model_config.moe_config:
        for ep in divisors(layout.dp):
            if ep > layout.expert_parallel_size and moe.num_experts % (ep * layout.tp) == 0:
                yield {"parallelism.expert_parallel_size": ep}
    for axis in ("tp", "pp", "context_parallel_size"):
        size = getattr(layout, axis)
        if layout.dp % 2 == 0:
            yield {
                f"parallelism.{axis}": size * 2,
                "parallelism.dp": layout.dp // 2,
                "tokens.batch_accumulation_per_replica": accumulation * 2,
            }
        yield {f"parallelism.{axis}": size * 2}
    if accumulation % 2 == 0:
        yield {"parallelism.dp": layout.dp * 2, "tokens.batch_accumulation_per_replica": accumulation // 2}
