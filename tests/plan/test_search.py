"""`nanotron plan --search`: it finds what trying every layout finds, proposes shards, and measures little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest

from nanotron.config import Config, get_config_from_dict
from nanotron.config.document import parse
from nanotron.config.presets import starter
from nanotron.pipeline.communication import communication
from nanotron.plan import measure
from nanotron.plan import search as search_module
from nanotron.plan.hardware import find_cluster
from nanotron.plan.layouts import changed, is_legal, sharded_more
from nanotron.plan.memory import rank_memory
from nanotron.plan.predict import LONG, Plan, Planner
from nanotron.plan.search import SCHEDULES, legal_layouts, search
from nanotron.training.topology import pipeline_schedule
from tests.plan.configs import small


def preset(name: str, devices: int) -> Config:
    return get_config_from_dict(parse(starter(name, devices)).values)


def of_memory(num_bytes: float, per_node: int) -> Planner:
    """A planner of H100s that have so much memory."""
    cluster = find_cluster("h100", per_node)
    return Planner(replace(cluster, device=replace(cluster.device, memory_bytes=int(num_bytes))))


SIZES = {"dp": 4, "hidden": 512, "sequence": 128, "micro_batch": 1, "accumulation": 1, "dtype": "bfloat16"}


@pytest.fixture
def one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of one row, and two schedules: enough to search among."""
    monkeypatch.setattr(search_module, "MICRO_BATCHES", (1,))
    monkeypatch.setattr(search_module, "SCHEDULES", SCHEDULES[::2])


@pytest.mark.usefixtures("one_row")
def test_a_search_finds_what_trying_every_layout_finds() -> None:
    config, sharded = (small(**SIZES, layers=2, recompute=True, zero=stage) for stage in (1, 2))
    num_bytes = 1.001 * Planner(find_cluster("h100", 2)).memories(sharded)[0].total
    planner, found = of_memory(num_bytes, 2), list[Plan]()
    for _, other in legal_layouts(planner, config, 4):
        ways = (changed(other, way) for way in ({}, *sharded_more(other, 2)))
        plans = [planner.plan(way) for way in ways if is_legal(way)]
        for plan in plans:
            assert planner.least_seconds(plan.config) <= plan.pipeline_seconds * (1 + 1e-12)
            for rank in plan.ranks:
                assert planner.least_bytes(plan.config, rank.pp_rank) <= rank.memory.total
        found += [plan for plan in plans if plan.fits][:1]  # of the ways that fit, the one that sends least
    assert {plan.config.optimizer.zero_stage for plan in found} >= {1, 2}
    best = [plan for _, plan in search(of_memory(num_bytes, 2), config, 4).best if plan.config.optimizer.zero_stage]
    assert [plan.step_seconds for plan in best] == sorted(plan.step_seconds for plan in found)[: len(best)]


EXPERTS = {"num_experts": 4, "top_k": 2, "moe_intermediate_size": 256, "layers": [1, 2]}


LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pp": 2, "schedule": "zb_h1"},
    "recompute": {"pp": 2, "recompute": True},
    "experts": {"experts": EXPERTS, "ep": 2},
    "windows": {"tp": 2, "window": 32, "window_layers": [0, 3]},
}


@pytest.mark.parametrize(("stage", "dp_shard"), [(1, None), (2, 2), (3, None)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_step_takes_less_than_its_bound(layout: str, stage: int, dp_shard: int | None) -> None:
    """On nodes of one device, where what blocks send takes longest."""
    planner = Planner(find_cluster("h100", 1))
    config = small(**{**SIZES, "accumulation": 4, "layers": 8} | LAYOUTS[layout], zero=stage)
    plan = planner.plan(changed(config, {"parallelism.dp_shard": dp_shard}))
    assert 0.5 * plan.pipeline_seconds < planner.least_seconds(plan.config) <= plan.pipeline_seconds * (1 + 1e-12)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_a_long_step_has_its_worst_moment_early(name: str, chunks: int, recompute: bool) -> None:
    planner = Planner(find_cluster("h100", 8))
    for pp in (2, 3, 8):
        config = small(pp=pp, layers=24, schedule=name, recompute=recompute, hidden=64, sequence=64)
        config = changed(config, {"parallelism.pp_virtual_stages": chunks})
        short, long = (
            changed(config, {"tokens.batch_accumulation_per_replica": rounds * pp}) for rounds in (LONG, 3 * LONG)
        )
        ends = communication(pipeline_schedule(long), 3 * LONG * pp)
        schedule, _, measured, states = planner._measured(long)
        for rank, memory in enumerate(planner.memories(long)):
            assert memory == rank_memory(long, schedule, rank, ends[rank], measured[rank], states[rank])
        assert len(planner._program(long, schedule)[0]) == len(planner._program(short, schedule)[0])


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("shards", [None, 2])
def test_blocks_are_measured_once_for_all_numbers_of_replicas_that_divide_them(stage: int, shards: int | None) -> None:
    """As far as bytes go; with the work, or where shards are padded, each number is measured for itself."""
    planner, changes = Planner(find_cluster("h100", 8)), {"parallelism.dp_shard": shards}
    config = changed(small(**{**SIZES, "dp": 4}, layers=2, zero=stage), changes)
    with mock.patch.object(measure, "measure_shared_chunk", side_effect=measure.measure_shared_chunk) as measured:
        for dp, times in ((4, 1), (8, 1), (6, 2)):
            other = changed(config, {"parallelism.dp": dp})
            found = planner._chunks(other, only_bytes=True)
            assert measured.call_count == times
            for (ours,), (its,) in zip(found, Planner(planner.cluster)._chunks(other), strict=True):
                works = {name: getattr(its, name) for name in ("forward", "backward", "weights", "first")}
                assert replace(ours, **works) == its
            measured.call_count = times  # what others measured does not count
        assert planner._chunks(other) == Planner(planner.cluster)._chunks(other)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("ep", "dp_shard"), [(2, None), (4, None), (2, 2)])
def test_experts_take_no_less_than_their_bound(ep: int, dp_shard: int | None, stage: int) -> None:
    config = small(**SIZES, layers=3, experts=EXPERTS, ep=ep, zero=stage)
    planner, shards = Planner(find_cluster("h100", 2)), dp_shard if stage > 1 else None
    config = changed(config, {"parallelism.dp_shard": shards})
    (memory,) = planner.memories(config)
    assert 0.4 * memory.total < planner.least_bytes(config, 0) <= memory.total


class Counted(NamedTuple):
    """A search's best layouts, and how often it measured chunks and states."""

    best: list[Plan]
    chunks: int
    states: int


def counted(planner: Planner, config: Config, devices: int, monkeypatch: pytest.MonkeyPatch) -> Counted:
    calls = Counter[str]()

    def counting(name: str) -> Callable[..., Any]:
        function = getattr(measure, name)

        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*args, **options)

        return call

    for name in ("_run", "measure_state"):
        monkeypatch.setattr(measure, name, counting(name))
    best = [plan for _, plan in search(planner, config, devices).best]
    return Counted(best, calls["_run"], calls["measure_state"])


@pytest.mark.usefixtures("one_row")
def test_a_search_shards_gradients_where_8b_has_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(Planner(find_cluster("h100", 4)), preset("8b", 8), 4, monkeypatch)
    assert {plan.config.optimizer.zero_stage for plan in found.best} == {1, 2}
    assert all(plan.fits for plan in found.best)
    assert found.chunks < 300
    assert found.states < 100


def test_a_search_cuts_long_rows_where_that_is_legal() -> None:
    config = small(sequence=16384, micro_batch=1, accumulation=1)
    planner = Planner(find_cluster("h100", 4))
    layouts = [other.parallelism for _, other in legal_layouts(planner, config, 4)]
    cuts = {(layout.context_parallel_size, layout.cp_mode) for layout in layouts}
    assert cuts == {(1, "ALL_GATHER"), *product((2, 4), ("ALL_GATHER", "ALL_TO_ALL"))}
    assert {layout.world_size for layout in layouts} == {4}


def test_70b_on_64_devices_is_fastest_with_sharded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among its best layouts: no stage below 3 fits without a pipeline."""
    planner, config = Planner(find_cluster("h100", 8)), preset("70b", 64)
    wanted = {(1, 2), (4, 1)}  # (pp, rows of a micro-batch)
    some = []
    for change, other in legal_layouts(planner, config, 64):
        layout = other.parallelism
        plain = (layout.tp, layout.context_parallel_size, layout.pp_engine) == (4, 1, "1f1b")
        if plain and layout.recompute_layer == "selective" and (layout.pp, other.tokens.micro_batch_size) in wanted:
            some.append((change, other))
    monkeypatch.setattr(search_module, "legal_layouts", lambda *_: some)
    best = [plan.config for _, plan in search(planner, config, 64).best]
    assert [(other.parallelism.pp, other.optimizer.zero_stage) for other in best] == [(1, 3), (4, 1)]
