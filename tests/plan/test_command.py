"""`nanotron plan` from its command line: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nanotron.check import examine
from nanotron.cli import app
from nanotron.config import BatchRampArgs, Config
from nanotron.models.specs import StageModules
from nanotron.plan import command
from nanotron.plan.counting import Traffic
from nanotron.plan.fixes import cheapest_fixes
from nanotron.plan.hardware import find_cluster
from nanotron.plan.layouts import changed, is_legal
from nanotron.plan.measure import measure_chunk
from nanotron.plan.predict import Planner
from nanotron.plan.search import Fastest
from nanotron.plan.text import fixes_text, plan_text, search_text
from nanotron.training.topology import pipeline_schedule
from tests.plan.configs import small

CONTEXT = "parallelism.context_parallel_size"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    small(dp=2, tp=2, pp=2, layers=2, dtype="bfloat16", micro_batch=1, accumulation=2).save_as_yaml(path)
    return path


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_layout_that_fits_is_described_and_exits_0(config_file: Path) -> None:
    code, output = run(config_file)
    assert code == 0, output
    for word in ("dp 2 · pp 2 (1f1b) · tp 2", "moments", "bubble", "all_reduce", "tokens/s", "MFU", "It fits"):
        assert word in output


def test_a_layout_that_does_not_fit_exits_3_with_changes_that_fit(config_file: Path) -> None:
    too_much = ("--override", "tokens.micro_batch_size=4096", "--override", "tokens.sequence_length=2048")
    code, output = run(config_file, *too_much)
    assert code == 3, output
    assert "does not fit: pipeline rank" in output
    assert "Cheapest changes that make it fit" in output
    assert "micro_batch_size=2048" in output


def test_search_writes_a_config_that_checks_and_says_how_far_it_is(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SOON_S", 0.0)
    monkeypatch.setattr(command, "LINE_S", 0.0)
    best = tmp_path / "best.yaml"
    batch_of_two = ("--override", "tokens.batch_accumulation_per_replica=1")
    code, output = run(config_file, *batch_of_two, "--search", "--nodes", 1, "--gpus-per-node", 2, "-o", best)
    assert code == 0, output
    config = examine(best, nproc=2, files=False).config
    assert config.global_batch_size == 2
    assert "\n1 legal layouts found so far\n" in f"\n{output}"
    assert re.search(r"\n1 of at most \d+ layouts planned; best so far: \S+ s a step\n", output)


def test_a_batch_that_grows_is_planned_stage_by_stage_and_for_the_whole_run(config_file: Path) -> None:
    ramp = ("--override", "tokens.batch_ramp=[{global_batch_size: 2, steps: 3}]")
    batch = ("--override", "tokens.batch_accumulation_per_replica=null", "--override", "tokens.global_batch_size=16")
    (_, plain), (code, output) = run(config_file, *batch), run(config_file, *batch, *ramp)
    assert code == 0, output
    found = re.search(r"before them 3 steps of 2: 1 micro-batches, ([\d.]+) ms each \(bubble 4\d.\d%\)", output)
    assert found, output
    assert "9.73K tokens in 5 steps" in output  # (3 · 2 + 2 · 16) · 256
    assert "20.5K tokens in 5 steps" in plain
    hours = [float(re.search(r"([\d.e-]+) device-hours", text)[1]) for text in (plain, output)]  # type: ignore[index]
    step = float(re.search(r"step +([\d.]+) ms", plain)[1])  # type: ignore[index]
    assert hours[1] / hours[0] == pytest.approx((3 * float(found[1]) + 2 * step) / (5 * step), rel=0.02)


def test_a_layout_that_a_ramps_batches_do_not_divide_by_is_not_legal() -> None:
    config = small(pp=2, layers=4, accumulation=8, schedule="interleaved_1f1b")  # 16 samples, two at once
    config.tokens.global_batch_size = 16
    config.tokens.batch_ramp = [BatchRampArgs(global_batch_size=8, steps=1)]
    assert is_legal(config)
    assert not is_legal(changed(config, {"parallelism.dp": 8, "tokens.batch_accumulation_per_replica": 1}))
    config.tokens.batch_ramp[0].global_batch_size = 2  # one microbatch, where the schedule takes two at a time
    assert not is_legal(config)


def test_a_layout_with_more_heads_than_tp_allows_is_not_legal() -> None:
    config = small()
    assert is_legal(changed(config, {"parallelism.tp": 8}))
    assert not is_legal(changed(config, {"parallelism.tp": 3}))
    assert not is_legal(changed(config, {"parallelism.pp": 5}))


@pytest.fixture(scope="module")
def planner() -> Planner:
    """One for all: it measures what layouts share once."""
    return Planner(find_cluster("h100", 8))


def test_replicas_share_optimizer_state_and_nothing_else(planner: Planner) -> None:
    (one,), (eight,) = planner.memories(small()), planner.memories(small(dp=8))
    assert eight.moments == pytest.approx(one.moments / 8, rel=0.01)
    assert (eight.parameters, eight.activations) == pytest.approx((one.parameters, one.activations), rel=0.01)


def test_recomputation_keeps_less_and_computes_more(planner: Planner) -> None:
    plain, selective, whole = (planner.plan(small(layers=8, recompute=each)) for each in (False, "selective", True))
    assert selective.worst.memory.activations < 0.7 * plain.worst.memory.activations
    assert whole.worst.memory.activations < 0.9 * selective.worst.memory.activations
    assert plain.step_seconds < selective.step_seconds < whole.step_seconds
    assert ", selective recompute\n" in plan_text(selective)


@pytest.mark.parametrize("recompute", [False, "selective", True])
def test_a_gradient_leaves_before_the_weight_gradients_unless_layers_are_recomputed(recompute: bool | str) -> None:
    assert pipeline_schedule(small(pp=2, recompute=recompute)).sends_before_weights is not bool(recompute)


def test_context_parallelism_is_planned_over_its_own_links(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    small(dp=2, cp=4, tp=2, dtype="bfloat16", micro_batch=1).save_as_yaml(path)
    code, output = run(path)
    assert code == 0, output
    assert "tp 2 (ALL_REDUCE) · cp 4 (ALL_GATHER), zero stage 1" in output
    lines = [line.split() for line in output.splitlines()]
    assert ["cp", "4", "links", "all_gather", "32"] in [line[:5] for line in lines]  # of 4 layers, 4 × there and back
    assert ["dp+cp", "8", "network", "all_gather", "2"] in [line[:5] for line in lines]


@pytest.mark.parametrize("mode", ["ALL_GATHER", "ALL_TO_ALL"])
def test_attention_over_cut_rows_is_as_much_work_as_over_whole_ones(mode: str) -> None:
    one, part = (
        measure_chunk(small(cp=cp, cp_mode=mode), StageModules(range(1), embed=False, head=False), "accelerator")
        for cp in (1, 4)
    )
    assert 4 * part.forward["attention"] == pytest.approx(one.forward["attention"], rel=1e-9)


def test_cutting_rows_is_among_what_makes_them_fit() -> None:
    config = small(sequence=1024, hidden=128, micro_batch=1, accumulation=1, layers=2, recompute=True)
    planner = Planner(find_cluster("h100", 8))
    whole, part = (planner.memories(changed(config, {CONTEXT: cp}))[0].total for cp in (1, 2))
    device = replace(planner.cluster.device, memory_bytes=(whole + part) // 2)
    planner.cluster = replace(planner.cluster, device=device)
    assert {CONTEXT: 2} in [fix.change for fix in cheapest_fixes(planner, config)]


def test_the_table_of_a_search_says_how_rows_are_cut() -> None:
    plan = Planner(find_cluster("h100", 8)).plan(small(cp=4, cp_mode="ALL_TO_ALL", layers=1))
    lines = search_text(Fastest([({}, plan)], 1, 1)).splitlines()
    assert lines[2].split()[:3] == ["dp", "cp", "tp"]
    assert lines[3].split()[:4] == ["1", "4", "a", "1"]
    assert lines[-1] == "cp: g with cp_mode ALL_GATHER, a with ALL_TO_ALL"


@pytest.mark.parametrize(("stage", "dp_shard"), [(2, None), (3, 4)], ids=["2", "3 on nodes"])
def test_shards_are_among_what_makes_a_layout_fit(stage: int, dp_shard: int | None) -> None:
    config = small(dp=8, hidden=512, sequence=64, micro_batch=1, accumulation=1, layers=6, recompute=True)
    more = {"optimizer.zero_stage": stage, "parallelism.dp_shard": dp_shard}
    planner = just_enough_for(changed(config, more))
    assert not planner.fits(config)
    fixes = cheapest_fixes(planner, config, count=99)
    assert more in [fix.change for fix in fixes]
    assert f"zero_stage={stage}" in fixes_text(fixes)


def just_enough_for(config: Config) -> Planner:
    """A planner of two nodes of devices on which this layout fits, and nothing larger."""
    planner = Planner(find_cluster("h100", 4))
    device = replace(planner.cluster.device, memory_bytes=planner.memories(config)[0].total * 1.001)
    planner.cluster = replace(planner.cluster, device=device)
    return planner


def test_a_plan_says_what_every_micro_batch_sends_of_whole_blocks(planner: Planner) -> None:
    one, three = (planner.plan(small(dp=8, pp=2, zero=zero, accumulation=8)) for zero in (1, 3))
    assert "ZeRO 3: each of 8 micro-batches sends a pipeline stage's gradients and gathers its weights" in plan_text(
        three
    )
    assert "ZeRO 1:" not in plan_text(one)
    sent = Traffic("reduce_scatter", "dp", "bytes")
    assert 7 * one.ranks[0].traffic[sent] < three.ranks[0].traffic[sent] < 8 * one.ranks[0].traffic[sent]
    assert three.step_seconds > one.step_seconds


def test_hybrid_sharding_keeps_gathers_on_a_node_and_sums_copies_between_nodes(planner: Planner) -> None:
    plan = planner.plan(changed(small(dp=16, zero=3), {"parallelism.dp_shard": 8}))
    axes = {(key.kind, key.axis) for key in plan.worst.traffic}
    assert {("all_gather", "dp_shard"), ("reduce_scatter", "dp_shard"), ("all_reduce", "dp_copies")} <= axes
    whole = planner.plan(small(dp=16, zero=3))
    for kept in ("parameters", "gradients", "moments"):
        assert getattr(plan.worst.memory, kept) == pytest.approx(2 * getattr(whole.worst.memory, kept), rel=0.01)
    assert "zero: 3 of 8 is stage 3 with dp_shard 8" in search_text(Fastest([({}, plan)], 1, 1))
