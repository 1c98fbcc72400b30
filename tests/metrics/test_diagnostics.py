"""Norms of every parameter, and who works longest: the same on every layout, and nothing in ordinary steps."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nanotron.config import Config
from nanotron.data.feed import Feed
from nanotron.metrics.sinks import read_rows
from nanotron.parallel.mesh import Mesh
from nanotron.training.control import Outcome
from nanotron.training.topology import mesh_axes, parameter_specs
from nanotron.training.trainer import train
from tests.parity.cases import Case
from tests.parity.run import config_of, prepare, to_walk
from tests.pool import Pool
from tests.structure.counters import Collectives

SLEEP_S = 0.25  # long beside the work of a microbatch
BASE = {"layers": 3, "family": "qwen2", "steps": 2}
LAYOUTS = [
    Case(dp=2, zero_stage=1, **BASE),
    Case(tp=2, tp_mode="REDUCE_SCATTER", recompute_layer=True, **BASE),
    Case(dp=2, tp=2, zero_stage=0, **BASE),
    Case(dp=2, pp=2, schedule="1f1b", zero_stage=1, tied=True, **BASE),
    Case(tp=4, dtype="float64", **BASE),
]


def measured(case: Case, **keys: Any) -> Config:
    """The case's config; everything is measured in every second step unless ``keys`` say otherwise."""
    config = config_of(case)
    keys = {"log_level": 1, "log_detail_interval": 2, "straggler_interval": None} | keys
    return replace(config, metrics_logging=replace(config.metrics_logging, **keys))


def steps(rank: int, world: int, case: Case, keys: dict[str, Any], late: int | None = None) -> list[Any]:
    """Each step's outcome and collectives on this rank; rank ``late`` sleeps in every forward of the last step."""
    config = measured(case, **keys)
    mesh = Mesh(mesh_axes(config), rank)
    training = prepare(config, mesh)
    feed = Feed(config, mesh, device=torch.device("cpu"))
    told = []
    for update in range(1, case.steps + 1):
        batches = [to_walk(batch, case) for batch in feed.step(update).microbatches]
        if rank == late and update == case.steps:
            training.chunks[0].register_forward_pre_hook(lambda module, inputs: time.sleep(SLEEP_S))
        with Collectives() as collectives, mock.patch("time.perf_counter", unhindered(time.perf_counter)):
            outcome = training.step(update, batches).read()
        told.append((outcome, collectives.calls))
    feed.close()
    return told


def unhindered(clock: Callable[[], float]) -> Callable[[], float]:
    """A clock that stands still while this thread could run and no processor is free, where Linux says so."""
    waited = Path("/proc/thread-self/schedstat")  # "nanoseconds on a processor, nanoseconds waiting for one, times"

    def now() -> float:
        before = after = waited.read_text().split()[1]
        while True:
            time, before, after = clock(), after, waited.read_text().split()[1]
            if before == after:  # else this thread had to wait in between, before or after the time was taken
                return time - int(after) * 1e-9

    return now if waited.exists() else clock


@pytest.fixture(scope="module")
def one_device(pool: Pool) -> dict[Case, Outcome]:
    """The second step's outcome on one device, by case."""
    cases = {case.same_numbers() for case in LAYOUTS}
    return {case: pool.run(1, steps, case, {})[0][1][0] for case in cases}


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_norms_are_those_of_one_device(pool: Pool, one_device: dict[Case, Outcome], case: Case) -> None:
    expected = one_device[case.same_numbers()].diagnostics
    ranks = pool.run(case.world, steps, case, {})
    for (first, _), (second, _) in ranks:
        assert first.diagnostics == {}
        assert second.diagnostics.keys() == expected.keys()
        for key, value in expected.items():
            assert second.diagnostics[key] == pytest.approx(value, rel=1e-5 if case.dtype == "float32" else 1e-9), key


def test_every_parameter_counts_once(one_device: dict[Case, Outcome]) -> None:
    for case, outcome in one_device.items():
        columns = outcome.diagnostics
        grads = [value for key, value in columns.items() if key.startswith("grad_norm/")]
        assert len(grads) == len(parameter_specs(config_of(case)))
        assert sum(value**2 for value in grads) ** 0.5 == pytest.approx(outcome.grad_norm, rel=1e-6)


def test_norms_and_ratios_are_those_of_the_tensors() -> None:
    case = Case(layers=2, dtype="float64")
    config = measured(case, log_detail_interval=1)
    training = prepare(config, Mesh())
    feed = Feed(config, Mesh(), device=torch.device("cpu"))
    weights = training.chunks[0].weights
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    batches = [to_walk(batch, case) for batch in feed.step(1).microbatches]
    outputs = []
    training.chunks[0].layers[1].register_forward_hook(lambda block, inputs, output: outputs.append(output[0].detach()))
    columns = training.step(1, batches).read().diagnostics
    feed.close()
    for name, weight in weights.items():
        assert columns[f"weight_norm/{name}"] == pytest.approx(float(before[name].norm()), rel=1e-9)
        ratio = float((weight.detach() - before[name]).norm() / before[name].norm())
        assert columns[f"update_ratio/{name}"] == pytest.approx(ratio, rel=1e-9)
    tokens = torch.cat([output.flatten(0, 1) for output in outputs])
    assert columns["activation_norm/layers.1"] == pytest.approx(float(tokens.norm() / len(tokens) ** 0.5), rel=1e-9)


def test_a_measured_step_makes_one_more_all_reduce_and_others_none(pool: Pool) -> None:
    case = Case(dp=2, tp=2, layers=2, steps=2)
    for told in pool.run(4, steps, case, {"straggler_interval": 2}):
        (_, ordinary), (_, detailed) = told
        assert detailed - ordinary == {("all_reduce", (0, 1, 2, 3)): 1}
        assert ordinary["all_reduce", (0, 1, 2, 3)] == 1
    for told in pool.run(4, steps, case, {"log_level": 0, "straggler_interval": None}):
        (_, first), (_, second) = told
        assert first == second


@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.parametrize("layout", [{"dp": 3}, {"pp": 3}, {"tp": 4}], ids=str)
def test_the_rank_that_works_longest_is_named(pool: Pool, layout: dict[str, int], late: int) -> None:
    case = Case(layers=3, steps=2, **layout)
    keys = {"log_level": 0, "straggler_interval": 2}
    for (first, _), (second, _) in pool.run(case.world, steps, case, keys, late):
        assert first.diagnostics == {}
        assert second.diagnostics["slowest_rank"] == late
        slept = 1e3 * SLEEP_S * case.accumulation
        found = second.diagnostics
        assert found["slowest_rank_ms"] >= slept
        assert second.diagnostics["slowest_rank_ms"] - second.diagnostics["median_rank_ms"] > slept / 2, (
            "others only waited"
        )
        assert second.diagnostics["fullest_rank_gib"] > 0


def test_a_run_records_what_its_measured_steps_tell(tmp_path: Path) -> None:
    config = measured(Case(layers=1, steps=2))
    config = replace(
        config,
        general=replace(config.general, run_dir=str(tmp_path)),
        checkpoints=replace(config.checkpoints, checkpoints_path=str(tmp_path), save_final_state=False),
        tokens=replace(config.tokens, train_steps=2),
    )
    assert train(config, Mesh(), torch.device("cpu")) == 0
    first, second = read_rows(tmp_path / "metrics.jsonl")
    assert not any(key.startswith("weight_norm/") for key in first)
    assert {key for key in second if key.startswith("weight_norm/")} == {
        f"weight_norm/{name}" for name in parameter_specs(config)
    }


def test_measuring_imports_no_compiler() -> None:
    script = (
        "import sys, torch\n"
        "from nanotron.training.diagnostics import _Waits\n"
        "before = set(sys.modules)\n"
        "with _Waits(torch.device('cpu')):\n"
        "    torch.ones(2).sum()\n"
        "print(len(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10, "seconds on every rank, in the middle of a run"
