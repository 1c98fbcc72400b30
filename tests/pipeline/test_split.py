"""Which layers a stage gets."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotron.pipeline.schedules import Placement, loop, vee
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
    cuts = split_layers([1.0] * layers, stages, embed_cost=embed, head_cost=head)
    assert [lo for lo, _ in cuts] == [0, *(hi for _, hi in cuts[:-1])]
    assert cuts[-1][1] == layers
    assert all(lo < hi for lo, hi in cuts)
    every_split = (
        list(zip([0, *inner], [*inner, layers], strict=True)) for inner in combinations(range(1, layers), stages - 1)
    )
    best = min(max(costs_of(split, 1.0, embed, head)) for split in every_split)
    assert max(costs_of(cuts, 1.0, embed, head)) == pytest.approx(best)


@given(st.integers(1, 3), st.integers(0, 6), st.floats(0, 3), st.sampled_from([vee, loop]))
def test_no_other_split_has_a_less_loaded_worst_rank(ranks: int, more: int, head: float, place: Placement) -> None:
    stages, layers = 2 * ranks, 2 * ranks + more
    rank_of = {place(rank, chunk, ranks): rank for rank in range(ranks) for chunk in range(2)}
    holders = [rank_of[stage] for stage in range(stages)]

    def worst(split: list[tuple[int, int]]) -> float:
        costs = costs_of(split, 1.0, 0.1, head)
        return max(sum(cost for cost, holder in zip(costs, holders, strict=True) if holder == r) for r in range(ranks))

    every_split = (
        list(zip([0, *inner], [*inner, layers], strict=True)) for inner in combinations(range(1, layers), stages - 1)
    )
    cuts = split_layers([1.0] * layers, stages, embed_cost=0.1, head_cost=head, ranks=holders)
    assert worst(cuts) == pytest.approx(min(map(worst, every_split)))


def test_stages_that_lie_on_one_rank_share_its_load() -> None:
    in_a_vee = split_layers([1] * 9, 4, head_cost=1.4, ranks=[0, 1, 1, 0])
    assert [hi - lo for lo, hi in in_a_vee] == [3, 2, 3, 1]  # 5.4 and 5
    apart = split_layers([1] * 9, 4, head_cost=1.4)
    assert [hi - lo for lo, hi in apart] == [2, 3, 3, 1]  # in a vee 4.4 and 6


def test_an_expensive_head_leaves_the_last_stage_fewer_layers() -> None:
    assert split_layers([1] * 8, 2, head_cost=2) == [(0, 5), (5, 8)]
    assert split_layers([1] * 5, 2) == [(0, 2), (2, 5)]


def test_users_own_split_is_taken_as_it_is() -> None:
    assert stage_layers([1] * 5, 2, [4, 1]) == [(0, 4), (4, 5)]


@given(
    st.integers(2, 4).flatmap(
        lambda stages: st.tuples(st.just(stages), st.lists(st.sampled_from([1, 3]), min_size=stages, max_size=9))
    )
)
def test_layers_of_unequal_cost_are_levelled_as_far_as_single_moves_can(sizes: tuple[int, list[int]]) -> None:
    stages, layers = sizes
    cuts = split_layers(layers, stages)
    assert [lo for lo, _ in cuts] == [0, *(hi for _, hi in cuts[:-1])]
    assert cuts[-1][1] == len(layers)
    worst = max(sum(layers[lo:hi]) for lo, hi in cuts)
    for index, (lo, hi) in enumerate(cuts[:-1]):
        for cut in (hi - 1, hi + 1):
            if lo < cut < cuts[index + 1][1]:
                moved = [*cuts[:index], (lo, cut), (cut, cuts[index + 1][1]), *cuts[index + 2 :]]
                assert max(sum(layers[lo:hi]) for lo, hi in moved) >= worst


def test_a_stage_of_costly_layers_gets_fewer_of_them() -> None:
    assert split_layers([3, 3, 1, 1, 1, 1], 2) == [(0, 2), (2, 6)]
