"""Which layers each pipeline stage holds."""

from __future__ import annotations

from collections.abc import Sequence

from nanotron.errors import ConfigError


def split_layers(
    num_layers: int,
    num_stages: int,
    *,
    layer_cost: float,
    embed_cost: float,
    head_cost: float,
    ranks: Sequence[int] | None = None,
) -> list[tuple[int, int]]:
    """Cut layers 0..num_layers-1 into num_stages ranges [lo, hi) so that the most loaded rank has as little as can be.

    ``ranks[stage]`` is who holds a stage (None: one stage each). A batch takes at least as long as its most loaded rank
    works; how a rank's load lies in its several stages matters less, so that is levelled second.

    Every stage gets at least one layer; the first also pays for the embedding, the last for the head. Layers cost
    the same, so handing each one to the rank that is then least loaded is optimal. Among equals the later stage takes
    it: later stages keep fewer microbatches alive.
    """
    if num_layers < num_stages:
        raise ConfigError(
            f"parallelism.pp gives {num_stages} stages, more than model.model_config.num_hidden_layers={num_layers}; "
            f"every stage needs a layer: use at most {num_layers} stages (pp × pp_virtual_stages)"
        )
    holders = range(num_stages) if ranks is None else ranks
    costs = [layer_cost] * num_stages
    costs[0] += embed_cost
    costs[-1] += head_cost
    loads = {rank: sum(costs[stage] for stage in range(num_stages) if holders[stage] == rank) for rank in set(holders)}
    counts = [1] * num_stages
    for _ in range(num_layers - num_stages):
        stage = min(range(num_stages), key=lambda stage: (loads[holders[stage]], costs[stage], -stage))
        counts[stage] += 1
        costs[stage] += layer_cost
        loads[holders[stage]] += layer_cost
    return _ranges(counts)


def stage_layers(
    num_layers: int,
    num_stages: int,
    pp_layers: Sequence[int] | None = None,
    *,
    layer_cost: float = 1.0,
    embed_cost: float = 0.0,
    head_cost: float = 0.0,
    ranks: Sequence[int] | None = None,
) -> list[tuple[int, int]]:
    """Layer range [lo, hi) of every stage: the user's `parallelism.pp_layers` when given, else balanced by cost."""
    if pp_layers is None:
        return split_layers(
            num_layers, num_stages, layer_cost=layer_cost, embed_cost=embed_cost, head_cost=head_cost, ranks=ranks
        )
    key = f"parallelism.pp_layers={list(pp_layers)}"
    if len(pp_layers) != num_stages:
        raise ConfigError(
            f"{key} lists {len(pp_layers)} stages, the pipeline has {num_stages}; give {num_stages} numbers"
        )
    if min(pp_layers) < 1:
        raise ConfigError(f"{key} leaves a stage without a layer; every stage needs at least one")
    if sum(pp_layers) != num_layers:
        raise ConfigError(
            f"{key} sums to {sum(pp_layers)}, not to model.model_config.num_hidden_layers={num_layers}; "
            f"make the numbers add up to {num_layers}"
        )
    return _ranges(pp_layers)


def _ranges(counts: Sequence[int]) -> list[tuple[int, int]]:
    """[3, 2] -> [(0, 3), (3, 5)]."""
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]
