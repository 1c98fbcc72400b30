"""Which layers each pipeline stage holds; what a config may ask for is among its rules (config/rules.py)."""

from __future__ import annotations

from collections.abc import Sequence


def split_layers(
    layer_costs: Sequence[float],
    num_stages: int,
    *,
    embed_cost: float = 0.0,
    head_cost: float = 0.0,
    ranks: Sequence[int] | None = None,
) -> list[tuple[int, int]]:
    """Cut the layers into num_stages ranges [lo, hi) so that the most loaded rank has as little as can be.

    ``ranks[stage]`` is who holds a stage (None: one stage each). A batch takes at least as long as its most loaded rank
    works; how a rank's load lies in its several stages matters less, so that is levelled second.

    Every stage gets at least one layer; the first also pays for the embedding, the last for the head. Where layers cost
    the same, handing each one to the rank that is then least loaded is optimal. Among equals the later stage takes
    it: later stages keep fewer microbatches alive. Where they do not, single layers then change sides of a cut for as
    long as that takes something from the most loaded rank.
    """
    num_layers = len(layer_costs)
    assert num_layers >= num_stages, f"{num_layers} layers for {num_stages} stages"
    holders = range(num_stages) if ranks is None else ranks
    ends = [0.0] * num_stages
    ends[0] += embed_cost
    ends[-1] += head_cost
    counts = _dealt_out(sum(layer_costs) / num_layers, num_layers, ends, holders)
    return _ranges(counts if len(set(layer_costs)) == 1 else _moved(counts, layer_costs, ends, holders))


def _dealt_out(cost: float, num_layers: int, ends: Sequence[float], holders: Sequence[int]) -> list[int]:
    """Layers of each stage when all cost the same."""
    stages = range(len(ends))
    costs = [cost + end for end in ends]
    loads = {rank: sum(costs[stage] for stage in stages if holders[stage] == rank) for rank in set(holders)}
    counts = [1] * len(ends)
    for _ in range(num_layers - len(ends)):
        stage = min(stages, key=lambda stage: (loads[holders[stage]], costs[stage], -stage))
        counts[stage] += 1
        costs[stage] += cost
        loads[holders[stage]] += cost
    return counts


def _moved(
    counts: Sequence[int], layer_costs: Sequence[float], ends: Sequence[float], holders: Sequence[int]
) -> list[int]:
    """The counts after moving layers over cuts, one at a time, as long as the ranks' loads become more level."""

    def loads(counts: Sequence[int]) -> list[float]:
        totals = dict.fromkeys(holders, 0.0)
        for (lo, hi), end, rank in zip(_ranges(counts), ends, holders, strict=True):
            totals[rank] += sum(layer_costs[lo:hi]) + end
        return sorted(totals.values(), reverse=True)

    best = list(counts)
    while True:
        moves = [
            [count + (stage == to) - (stage == source) for stage, count in enumerate(best)]
            for source in range(len(best))
            for to in (source - 1, source + 1)
            if best[source] > 1 and 0 <= to < len(best)
        ]
        better = min(moves, key=loads, default=best)
        if loads(better) >= loads(best):
            return best
        best = better


def stage_layers(
    layer_costs: Sequence[float],
    num_stages: int,
    pp_layers: Sequence[int] | None = None,
    *,
    embed_cost: float = 0.0,
    head_cost: float = 0.0,
    ranks: Sequence[int] | None = None,
) -> list[tuple[int, int]]:
    """Layer range [lo, hi) of every stage: the user's `parallelism.pp_layers` when given, else balanced by cost."""
    if pp_layers is None:
        return split_layers(layer_costs, num_stages, embed_cost=embed_cost, head_cost=head_cost, ranks=ranks)
    assert (len(pp_layers), sum(pp_layers)) == (num_stages, len(layer_costs)), f"{pp_layers} for {num_stages} stages"
    return _ranges(pp_layers)


def _ranges(counts: Sequence[int]) -> list[tuple[int, int]]:
    """[3, 2] -> [(0, 3), (3, 5)]."""
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]
