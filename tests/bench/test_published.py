"""Runs that others published, planned as what is known of their software and network says."""

from __future__ import annotations

from math import log

import pytest

from bench import published
from bench.published import ALL_REDUCE_IN_V05, NANOTRON, NetworkOfV05, kendall_tau, layers_in_v05, planners, rows
from nanotron.plan.counting import Traffic
from nanotron.plan.hardware import find_cluster


def bus_bandwidth(nodes: int) -> float:
    """GB/s of the bus in an all-reduce of 256 MB."""
    cluster = NetworkOfV05(find_cluster("h100", 8).device, 8)
    sent = 2 * (8 * nodes - 1) / (8 * nodes) * 256e6
    return sent / cluster.collective_seconds("all_reduce", 256e6, 1, 8 * nodes, 8) / 1e9


def distance() -> float:
    """Of the predicted bandwidths from the measured ones, as a mean of logarithms."""
    return sum(abs(log(bus_bandwidth(nodes) / rate)) for nodes, rate in ALL_REDUCE_IN_V05.items()) / 6


def test_the_network_of_nanotrons_runs_is_as_near_to_its_measurements_as_a_hop_can_bring_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best = distance()
    assert best < log(1.25)
    assert bus_bandwidth(64) == pytest.approx(ALL_REDUCE_IN_V05[64], rel=0.05)
    for other in (75e-6, 95e-6):
        monkeypatch.setattr(published, "HOP_IN_V05", other)
        assert distance() > best


def test_stages_are_cut_where_v05_cuts_them() -> None:
    found = {(row.name, row.pp): layers_in_v05(row) for row in rows() if row.source == NANOTRON}
    assert found["1.34B", 2] == [11, 5]  # the head weighs as much as four layers: after ten, rank 0 has half, no more
    assert found["8.86B", 4] == [9, 9, 8, 6]
    assert all(
        sum(layers) == {"1.34B": 16, "3.57B": 28, "8.86B": 32, "80B": 80}[name] for (name, _), layers in found.items()
    )


def test_zero_1_is_exchanged_as_in_v05_and_nothing_hides_it() -> None:
    row = next(row for row in rows() if (row.name, row.dp) == ("1.34B", 8))
    cluster = find_cluster("h100", 8)
    theirs, ours = planners(cluster)[NANOTRON], planners(cluster)[published.MEGATRON]
    ours.cluster = theirs.cluster
    config = published.config_of(row)
    as_theirs, as_ours = theirs.plan(config), ours.plan(config)
    traffic, plain = as_theirs.ranks[0].traffic, as_ours.ranks[0].traffic
    assert traffic[Traffic("all_reduce", "dp", "bytes")] > plain[Traffic("reduce_scatter", "dp", "bytes")] > 0
    assert traffic[Traffic("reduce_scatter", "dp", "bytes")] == 0
    assert traffic[Traffic("all_gather", "dp", "calls")] == 1
    assert traffic[Traffic("all_gather", "dp", "bytes")] == plain[Traffic("all_gather", "dp", "bytes")]
    assert as_theirs.exposed_seconds >= as_theirs.axis_seconds["dp"] > as_ours.exposed_seconds
    assert as_theirs.update_seconds > as_ours.update_seconds  # a copy for each replica's shard of each tensor


def test_kendalls_tau_of_known_orders() -> None:
    assert kendall_tau([(1, 10), (2, 20), (3, 30)]) == 1
    assert kendall_tau([(1, 30), (2, 20), (3, 10)]) == -1
    assert kendall_tau([(1, 10), (2, 30), (3, 20)]) == pytest.approx(1 / 3)
