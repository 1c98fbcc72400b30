"""`nanotron plan` from its command line: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nanotron.check import examine
from nanotron.cli import app
from nanotron.plan.hardware import find_cluster
from nanotron.plan.layouts import changed, is_legal
from nanotron.plan.predict import Planner
from tests.plan.configs import small


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    small(dp=2, tp=2, pp=2, dtype="bfloat16", micro_batch=1, accumulation=2).save_as_yaml(path)
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
    too_much = ("--override", "tokens.micro_batch_size=2048", "--override", "tokens.sequence_length=2048")
    code, output = run(config_file, *too_much)
    assert code == 3, output
    assert "does not fit: pipeline rank" in output
    assert "Cheapest changes that make it fit" in output
    assert "micro_batch_size=1024" in output


def test_search_writes_a_config_that_checks(config_file: Path, tmp_path: Path) -> None:
    best = tmp_path / "best.yaml"
    batch_of_two = ("--override", "tokens.batch_accumulation_per_replica=1")
    code, output = run(config_file, *batch_of_two, "--search", "--nodes", 1, "--gpus-per-node", 2, "-o", best)
    assert code == 0, output
    config = examine(best, nproc=2, files=False).config
    assert config.global_batch_size == 2
    assert "legal layouts" in output


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
    plain, again = planner.plan(small(layers=8)), planner.plan(small(layers=8, recompute=True))
    assert again.worst.memory.activations < 0.6 * plain.worst.memory.activations
    assert again.step_seconds > plain.step_seconds
