"""How experts are used, as a run tells it: columns, the file of the loads, and routers that have collapsed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotron.config import Config, get_config_from_dict
from nanotron.metrics.experts import LOADS_FILE, STEPS, ExpertUse
from nanotron.metrics.record import Metrics
from nanotron.parallel.mesh import Mesh
from tests.checkpoint.runs import run, sparse_values_of, values_of
from tests.pool import Pool


def config_of(**changes: Any) -> Config:
    """Four layers of which layers 1 and 3 have four experts, two for each token."""
    values = values_of("unused", **changes)
    values["model"]["model_config"]["moe_config"] = {"num_experts": 4, "top_k": 2, "layers": [1, 3]}
    values["tokens"]["train_steps"] = 1000
    return get_config_from_dict(values)


EVEN = {"load": [50.0] * 8, "entropy": [100 * math.log(4), 50 * math.log(4)]}  # of 100 tokens


def test_the_layer_with_the_busiest_expert_is_told_and_in_some_steps_every_layer(tmp_path: Path) -> None:
    experts = ExpertUse(config_of(), tmp_path, start_step=0)
    vectors = {**EVEN, "load": [50.0, 50, 50, 50, 75, 75, 45, 5]}
    told = experts.step(4, vectors)
    columns = {"expert_load": 1.5, "expert_load_layer": 3, "router_entropy": pytest.approx(0.75), "dropped_tokens": 0}
    assert (told.columns, told.loads, told.collapses) == (columns, None, [])
    told = experts.step(5, vectors)
    columns |= {"expert_load/layers.1": 1.0, "expert_load/layers.3": 1.5}
    columns |= {"router_entropy/layers.1": pytest.approx(1.0), "router_entropy/layers.3": pytest.approx(0.5)}
    assert told.columns == columns
    assert told.loads == {"step": 5, "layers.1": "100 100 100 100", "layers.3": "150 150 90 10"}


@pytest.mark.parametrize(("interval", "steps"), [(None, [1, 5, 10]), (4, [1, 4, 8]), (1, list(range(1, 12)))])
def test_loads_are_recorded_200_times_in_a_run_or_as_often_as_is_asked(
    tmp_path: Path, interval: int | None, steps: list[int]
) -> None:
    config = config_of()
    config.metrics_logging.expert_interval = interval
    experts = ExpertUse(config, tmp_path, start_step=0)
    assert [step for step in range(1, 12) if experts.step(step, EVEN).loads] == steps


COLLAPSED = [
    ([50.0, 50, 50, 50, 100, 70, 30, 0], "1 of 4 experts get no token, and expert 0 gets 100% of all tokens"),
    ([50.0, 50, 50, 50, 24, 80, 48, 48], "0 of 4 experts get no token, and expert 1 gets 80% of all tokens"),
    ([50.0, 50, 50, 50, 0, 66, 66, 68], "1 of 4 experts get no token, and expert 3 gets 68% of all tokens"),
]


@pytest.mark.parametrize(("load", "what"), COLLAPSED)
def test_a_router_that_stays_collapsed_is_named_once(tmp_path: Path, load: list[float], what: str) -> None:
    experts = ExpertUse(config_of(), tmp_path, start_step=0)
    bad = {**EVEN, "load": load}
    for step in range(1, STEPS):
        assert experts.step(step, bad).collapses == []
    assert experts.step(STEPS, EVEN).collapses == []  # it was no more than a phase
    told = {step: experts.step(step, bad).collapses for step in range(STEPS + 1, 4 * STEPS)}
    named = (
        f"step {2 * STEPS}: the router of layer 3 has collapsed, since {STEPS} steps: {what}, where 50% would be even"
    )
    assert {step: lines for step, lines in told.items() if lines} == {2 * STEPS: [named]}


@pytest.mark.parametrize("load", [[4.0, 4, 4, 0] * 2, [74.0, 74, 26, 26] * 2, [60.0, 66, 73, 1] * 2])
def test_few_tokens_or_some_unevenness_are_no_collapse(tmp_path: Path, load: list[float]) -> None:
    experts = ExpertUse(config_of(), tmp_path, start_step=0)
    assert not any(experts.step(step, {**EVEN, "load": load}).collapses for step in range(1, 3 * STEPS))


TOLD = ("expert_load", "router_entropy", "dropped_tokens", "balance_loss", "router_z_loss")


def rows_of(folder: Path) -> list[dict[str, float]]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key.startswith(TOLD)} for line in lines]


def test_a_run_tells_the_same_of_its_experts_on_any_layout(pool: Pool, tmp_path: Path) -> None:
    layouts = {"one": ((1, 1, 1), 1), "shared": ((2, 2, 1), 2)}
    for name, (layout, ep) in layouts.items():
        values = sparse_values_of(tmp_path / name, layout, ep, checkpoints__save_final_state=False)
        values["model"]["dtype"] = "float64"
        values["parallelism"]["tp_mode"] = "REDUCE_SCATTER"
        values["tokens"]["train_steps"] = 3
        assert set(pool.run(layout[0] * layout[1], run, values)) == {0}
    one, shared = (rows_of(tmp_path / name) for name in layouts)
    assert [row.keys() for row in one] == [row.keys() for row in shared]
    for row, other in zip(one, shared, strict=True):
        assert other == pytest.approx(row, rel=1e-12)
        assert row["dropped_tokens"] == 0
        assert 1 < row["expert_load"] == max(row["expert_load/layers.1"], row["expert_load/layers.2"]) <= 4
        assert 0.9 < row["router_entropy"] < 1
        assert row["balance_loss"] > 0.01 * 2 * 0.9  # of two layers, weighted; 1 is even
        assert row["router_z_loss"] > 0
    assert (tmp_path / "one" / LOADS_FILE).read_bytes() == (tmp_path / "shared" / LOADS_FILE).read_bytes()
    first = json.loads((tmp_path / "one" / LOADS_FILE).read_text().splitlines()[0])
    assert first.keys() == {"step", "layers.1", "layers.2"}
    assert sum(map(int, first["layers.1"].split())) == pytest.approx(800, abs=4)


def test_a_dense_run_keeps_no_loads_of_an_earlier_run_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / LOADS_FILE).write_text('{"step": 1, "layers.1": "100 100"}\n')
    Metrics(get_config_from_dict(values_of("unused")), Mesh(), tmp_path, device=torch.device("cpu")).close()
    assert not (tmp_path / LOADS_FILE).exists()
