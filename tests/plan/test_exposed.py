"""What of a step's exchange of gradients and weights the planner takes to hide behind computing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanotron.plan.counting import Traffic
from nanotron.plan.hardware import find_cluster
from nanotron.plan.predict import Plan, Planner
from tests.plan.configs import small


def planned(zero: int, pp: int, network: float = 0.8) -> tuple[Planner, Plan]:
    """A plan of 16 replicas of a pipeline, each stage's on two nodes, with several buckets."""
    planner = Planner(replace(find_cluster("h100", 8), network_efficiency=network))
    config = small(dp=16, pp=pp, zero=zero, dtype="bfloat16", micro_batch=32, layers=8)
    config.model.ddp_bucket_cap_mb = 1
    return planner, planner.plan(config)


def one_call(planner: Planner, plan: Plan, kind: str) -> float:
    """Seconds of a mean collective over replicas, on the rank that waits longest for it."""
    seconds = []
    for rank in plan.ranks:
        calls, num_bytes = (rank.traffic[Traffic(kind, "dp", what)] for what in ("calls", "bytes"))
        seconds.append(planner.cluster.collective_seconds(kind, num_bytes, calls, 16, 8) / calls)
    return max(seconds)


@pytest.mark.parametrize(("zero", "kinds"), [(0, ["all_reduce"]), (1, ["reduce_scatter", "all_gather"])])
def test_all_but_a_bucket_of_gradients_and_one_of_weights_hide_where_there_is_time(zero: int, kinds: list[str]) -> None:
    planner, plan = planned(zero, pp=2)
    buckets = sum(one_call(planner, plan, kind) for kind in kinds)
    others = plan.axis_seconds["world"] + one_call(planner, plan, "all_reduce")  # the control word; targets' count
    assert plan.axis_seconds["dp"] > 3 * buckets
    assert buckets * 0.5 < plan.exposed_seconds <= buckets + others + 1e-9


@pytest.mark.parametrize("zero", [0, 1])
def test_no_more_hides_than_a_backward_and_a_forward_take(zero: int) -> None:
    _, plan = planned(zero, pp=1, network=1e-4)
    assert plan.axis_seconds["dp"] > plan.pipeline_seconds
    hidden = plan.axis_seconds["dp"] - plan.exposed_seconds
    assert 0 < hidden < plan.pipeline_seconds
