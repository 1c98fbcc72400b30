"""Finds the fastest layout that fits: all legal ones, most promising first, until none left can be faster.

A layout without bubble and without communication is an upper bound on its speed, and cheap: it needs only the counts of
one chunk, which many layouts share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from nanotron.config.rules import divisors
from nanotron.plan.layouts import Change, changed, is_legal, sharded_more
from nanotron.plan.predict import Plan, Planner

if TYPE_CHECKING:
    from nanotron.config import Config

MICRO_BATCHES = (1, 2, 4, 8)
SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2))
LEAST_TOKENS = 4096  # of a row, on a rank: shorter rows are not cut over cp, nor those of micro-batches of several
BEST = 10


class Candidate(NamedTuple):
    """A legal layout and the least time that a step could take with it."""

    change: Change
    config: Config
    least_seconds: float


class Fastest(NamedTuple):
    """The fastest layouts, the fastest first."""

    best: list[tuple[Change, Plan]]
    num_legal: int
    num_planned: int


def search(
    planner: Planner, config: Config, num_devices: int, tell: Callable[[str], None] = lambda line: None
) -> Fastest:
    """The fastest layouts of a run over this many devices, with its global batch and sequence length.

    A layout that does not fit at ZeRO stage 1 is tried at the stages that shard more and send more. Stage 0, which
    saves nothing and sends more, is tried on the winners only. `tell` is told again and again how far the search is.
    """
    candidates: list[Candidate] = []
    for change, other in legal_layouts(planner, config, num_devices):
        candidates.append(Candidate(change, other, planner.least_seconds(other)))
        tell(f"{len(candidates)} legal layouts found so far")
    best: list[tuple[Change, Plan]] = []
    num_planned = 0
    for candidate in sorted(candidates, key=lambda candidate: candidate.least_seconds):
        if candidate.least_seconds >= _worst(best):
            break
        fitting = _fitting(planner, candidate, _worst(best))
        if fitting is not None:
            num_planned += 1
            best = _with(best, fitting, planner.plan(changed(config, fitting)))
            seconds = best[0][1].step_seconds
            tell(f"{num_planned} of at most {len(candidates)} layouts planned; best so far: {seconds:.3g} s a step")
    for change, _ in list(best):
        without = {**change, "optimizer.zero_stage": 0, "parallelism.dp_shard": None}
        other = changed(config, without)
        if other.parallelism.dp > 1 and planner.fits(other):
            num_planned += 1
            best = _with(best, without, planner.plan(other))
    return Fastest(best, len(candidates), num_planned)


def _fitting(planner: Planner, candidate: Candidate, worst: float) -> Change | None:
    """The first way to shard the candidate that fits, if a step may take less than ``worst``."""
    ways = [(way, changed(candidate.config, way)) for way in _ways(planner, candidate)]
    ways = [(way, config) for way, config in ways if planner.may_fit(config)]
    fast = [planner.least_seconds(config) < worst for _, config in ways]
    while fast and not fast[-1]:
        fast.pop()  # whether these fit makes no difference
    first = next((place for place, _ in enumerate(fast) if planner.fits(ways[place][1])), None)
    return ways[first][0] if first is not None and fast[first] else None


def _ways(planner: Planner, candidate: Candidate) -> Iterator[Change]:
    """The candidate at ZeRO stage 1, and sharded more."""
    yield candidate.change
    for more in sharded_more(candidate.config, planner.cluster.per_node):
        if is_legal(changed(candidate.config, more)):
            yield {**candidate.change, **more}


def _worst(best: Sequence[tuple[Change, Plan]]) -> float:
    """The step's time that a layout has to beat."""
    return best[-1][1].step_seconds if len(best) == BEST else inf


def _with(best: list[tuple[Change, Plan]], change: Change, plan: Plan) -> list[tuple[Change, Plan]]:
    return sorted([*best, (change, plan)], key=lambda found: found[1].step_seconds)[:BEST]


def legal_layouts(planner: Planner, config: Config, num_devices: int) -> Iterator[tuple[Change, Config]]:
    """Every legal layout: tp within a node, pp, cp, ep, schedule, micro-batch, recompute; dp is the other devices."""
    layers, batch = config.model.model_config.num_hidden_layers, config.global_batch_size
    cuts = [(1, config.parallelism.cp_mode)]
    cuts += product(range(2, config.tokens.sequence_length // LEAST_TOKENS + 1), ("ALL_GATHER", "ALL_TO_ALL"))
    sizes = [
        (num_devices // (tp * pp * cp), ep, tp, pp, cp, cp_mode)
        for tp in divisors(planner.cluster.per_node)
        for pp in divisors(num_devices)
        for cp, cp_mode in cuts
        if pp <= layers and num_devices % (tp * pp * cp) == 0
        for ep in _expert_ranks(config, num_devices // (tp * pp * cp), tp, planner.cluster.per_node // (tp * cp))
    ]
    for (dp, ep, tp, pp, cp, cp_mode), rows, recompute in product(sizes, MICRO_BATCHES, (False, "selective", True)):
        if cp > 1 and rows > 1:
            continue
        for schedule, chunks in SCHEDULES if pp > 1 else SCHEDULES[:1]:
            change = {
                "parallelism.dp": dp,
                "parallelism.expert_parallel_size": ep,
                "parallelism.tp": tp,
                "parallelism.pp": pp,
                "parallelism.context_parallel_size": cp,
                "parallelism.cp_mode": cp_mode,
                "parallelism.pp_engine": schedule,
                "parallelism.pp_virtual_stages": chunks,
                "parallelism.tp_mode": "REDUCE_SCATTER" if tp > 1 else "ALL_REDUCE",
                "parallelism.recompute_layer": recompute,
                "optimizer.zero_stage": 1,
                "parallelism.dp_shard": None,
                "tokens.micro_batch_size": rows,
                "tokens.batch_accumulation_per_replica": batch // (rows * dp),
            }
            if batch % (rows * dp) == 0 and is_legal(other := changed(config, change)):
                yield change, other


def _expert_ranks(config: Config, dp: int, tp: int, on_a_node: int) -> set[int]:
    """How many replicas may share the experts: one, all that can on a node, and all that can anywhere."""
    moe = config.model.model_config.moe_config
    legal = [ep for ep in divisors(dp) if moe is not None and moe.num_experts % (ep * tp) == 0] or [1]
    return {1, max((ep for ep in legal if ep <= on_a_node), default=1), max(legal)}
