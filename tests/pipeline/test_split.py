"""Which layers a stage gets."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotron.errors import ConfigError
from nanotron.pipeline.split import split_layers, stage_layers


def costs_of(cuts: list[tuple[int, int]], layer: float, embed: float, head: float) -> list[float]:
    costs = [(hi - lo) * layer for lo, hi in cuts]
    costs[0] += embed
    costs[-1] += head
    return costs


@given(
    st.integers(1, 10).flatmap(lambda stages: st.tuples(st.integers(stages, 12), st.just(stages))),
    st.floats(0, 5),
    st.floats(0, 5),
)
def test_no_other_split_has_a_cheaper_worst_stage(sizes: tuple[int, int], embed: float, head: float) -> None:
    layers, stages = sizes
    cuts = split_layers(layers, stages, layer_cost=1.0, embed_cost=embed, head_cost=head)
    assert [lo for lo, _ in cuts] == [0, *(hi for _, hi in cuts[:-1])]
    assert cuts[-1][1] == layers
    assert all(lo < hi for lo, hi in cuts)
    every_split = (
        list(zip([0, *inner], [*inner, layers], strict=True)) for inner in combinations(range(1, layers), stages - 1)
    )
    best = min(max(costs_of(split, 1.0, embed, head)) for split in every_split)
    assert max(costs_of(cuts, 1.0, embed, head)) == pytest.approx(best)


def test_an_expensive_head_leaves_the_last_stage_fewer_layers() -> None:
    assert split_layers(8, 2, layer_cost=1, embed_cost=0, head_cost=2) == [(0, 5), (5, 8)]
    assert split_layers(5, 2, layer_cost=1, embed_cost=0, head_cost=0) == [(0, 2), (2, 5)]


def test_users_own_split_is_taken_or_refused_with_the_key() -> None:
    assert stage_layers(5, 2, [4, 1]) == [(0, 4), (4, 5)]
    for wrong, part in [([5], "lists 1 stages"), ([5, 0], "without a layer"), ([2, 2], "sums to 4")]:
        with pytest.raises(ConfigError, match=rf"parallelism.pp_layers=.*{part}"):
            stage_layers(5, 2, wrong)
    with pytest.raises(ConfigError, match="num_hidden_layers=3"):
        stage_layers(3, 4)
