"""One row per step: console, metrics.jsonl, TensorBoard and Weights & Biases tell the same numbers."""

import json
import logging
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanotron.check import check
from nanotron.config import BatchRampArgs, Config, get_config_from_dict
from nanotron.errors import ConfigError
from nanotron.logging import human_duration
from nanotron.metrics.record import Metrics
from nanotron.parallel.mesh import Mesh
from nanotron.report.facts import health
from nanotron.report.run import read_run

LOSS = 5.512345678901234


def config(**logging_keys: Any) -> Config:
    return get_config_from_dict(
        {
            "general": {"run": "unit"},
            "model": {
                "dtype": "float32",
                "model_config": {
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "vocab_size": 256,
                },
            },
            "tokens": {
                "sequence_length": 32,
                "micro_batch_size": 8,
                "batch_accumulation_per_replica": 1,
                "train_steps": 100,
            },
            "optimizer": {"learning_rate_scheduler": {"learning_rate": 3e-4}},
            "logging": logging_keys,
        }
    )


def values(step: int, **more: Any) -> dict[str, Any]:
    return {
        "lm_loss": LOSS / step,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "time_per_iteration_ms": 500.0,
        "num_samples": 8,
        "num_tokens": 256,
        "consumed_samples": 8 * step,
        "consumed_tokens": 256 * step,
        "stage": "main",
        **more,
    }


def record(folder: Path, steps: range, *, start_step: int = 0, mesh: Mesh | None = None, **logging_keys: Any) -> None:
    metrics = Metrics(config(**logging_keys), mesh or Mesh(), folder, device=torch.device("cpu"), start_step=start_step)
    for step in steps:
        metrics.log(step, values(step))
    metrics.close()


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_row_holds_the_loss_at_full_precision_and_the_derived_rates(tmp_path: Path) -> None:
    record(tmp_path, range(1, 2))
    (row,) = rows(tmp_path)
    assert row["lm_loss"] == LOSS
    assert row["time_per_iteration_ms"] == 500
    assert row["tokens_per_sec"] == row["tokens_per_sec_per_device"] == 512
    assert row["model_tflops_per_device"] == pytest.approx(150_994_944 / 0.5 / 1e12, rel=1e-12)
    assert row["memory_gib"] > 0
    assert row["stage"] == "main"
    assert "mfu" not in row, "a CPU's peak is unknown, so it has no MFU"


def test_rates_are_per_device_of_the_whole_mesh(tmp_path: Path) -> None:
    record(tmp_path, range(1, 2), mesh=Mesh({"pp": 2, "dp": 2}))
    (row,) = rows(tmp_path)
    assert row["tokens_per_sec_per_device"] == row["tokens_per_sec"] / 4


def test_ranks_other_than_zero_write_nothing(tmp_path: Path) -> None:
    record(tmp_path, range(1, 3), mesh=Mesh({"pp": 2}, rank=1), tensorboard=True)
    assert list(tmp_path.iterdir()) == []


def test_resuming_takes_back_the_rows_after_the_resumed_step(tmp_path: Path) -> None:
    record(tmp_path, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lm_lo')  # a kill in the middle of a line
    record(tmp_path, range(4, 6), start_step=3)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_resumed_metrics_file_is_byte_identical_to_the_uninterrupted_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("nanotron.metrics.record.memory_gib", lambda device: 0.25)
    monkeypatch.setattr("nanotron.metrics.record.time", SimpleNamespace(time=lambda: 1.7e9))
    for folder in (tmp_path / "whole", tmp_path / "resumed"):
        record(folder, range(1, 6))
    record(tmp_path / "resumed", range(3, 6), start_step=2)
    whole, resumed = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed


def test_each_start_says_where_it_went_on_and_how_many_steps_it_took_back(tmp_path: Path) -> None:
    def starts() -> list[tuple[int, int, str]]:
        lines = map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines())
        return [(line["step"], line["taken_back"], line["layout"]) for line in lines]

    record(tmp_path, range(1, 6))
    record(tmp_path, range(4, 8), start_step=3, mesh=Mesh({"pp": 2}))
    record(tmp_path, range(8, 9), start_step=7)
    assert starts() == [(1, 0, "one process"), (4, 2, "pp 2"), (8, 0, "one process")]
    record(tmp_path, range(1, 2))
    assert starts() == [(1, 8, "one process")], "a run from the beginning has no earlier start"


def test_a_loss_that_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    metrics = Metrics(config(), Mesh(), tmp_path, device=torch.device("cpu"))
    metrics.log(1, values(1, lm_loss=float("nan")))
    metrics.close()
    assert rows(tmp_path)[0]["lm_loss"] is None


def test_a_full_disk_costs_no_row_and_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(config(), Mesh(), tmp_path, device=torch.device("cpu"))
    metrics.log(1, values(1))
    written = (tmp_path / "metrics.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (written + 100, hard))  # the next row fits in part
    try:
        for step in (2, 3):
            metrics.log(step, values(step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    metrics.log(4, values(4))
    metrics.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4], "what was refused follows when there is room"
    assert sum("cannot write" in line for line in caplog.messages) == 1, "said once, not at every step"


def test_a_line_that_a_crash_destroyed_does_not_keep_the_run_from_going_on(tmp_path: Path) -> None:
    record(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\0" * 40 + b"\n\xff\n3\n")
    record(tmp_path, range(3, 5), start_step=2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_the_step_line_shows_the_loss_with_six_digits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="nanotron"):
        record(tmp_path, range(1, 2))
    (line,) = [message for message in caplog.messages if message.startswith("iteration: ")]
    assert line.startswith(
        "iteration: 1 / 100 | consumed_tokens: 256 | time_per_iteration_ms: 500 | tokens_per_sec: 512 |"
    )
    assert " | global_batch_size: 256 | lm_loss: 5.51235 | grad_norm: 1.25 | lr: 0.0003 | " in line
    assert line.endswith(" | eta: 50s"), "99 steps of half a second are left"


def test_the_time_left_is_that_of_steps_as_large_as_they_will_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    growing = config()
    ramp = [BatchRampArgs(global_batch_size=8, steps=10), BatchRampArgs(global_batch_size=16, steps=10)]
    growing.tokens = replace(growing.tokens, batch_ramp=ramp, batch_accumulation_per_replica=8)
    metrics = Metrics(growing, Mesh(), tmp_path, device=torch.device("cpu"))
    with caplog.at_level(logging.INFO, logger="nanotron"):
        metrics.log(1, values(1))
    metrics.close()
    samples_left = 9 * 8 + 10 * 16 + 80 * 64
    seconds = 0.5 * samples_left / 8
    assert any(line.endswith(f" | eta: {human_duration(seconds)}") for line in caplog.messages)


def test_the_report_tells_where_steps_became_larger(tmp_path: Path) -> None:
    metrics = Metrics(config(), Mesh(), tmp_path, device=torch.device("cpu"))
    for step, samples in enumerate((8, 16, 32, 48), 1):
        metrics.log(step, values(step, consumed_samples=samples))
    metrics.close()
    told = [line for line, _ in health(read_run(tmp_path)) if "samples" in line]
    assert told == ["from step 3 on: 16 samples a step; before: 8 samples a step"]


def test_the_console_keeps_to_its_interval_but_every_step_is_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="nanotron"):
        record(tmp_path, range(1, 11), iteration_step_info_interval=4)
    shown = [int(message.split()[1]) for message in caplog.messages if message.startswith("iteration: ")]
    assert shown == [1, 4, 8]
    assert len(rows(tmp_path)) == 10


def test_tensorboard_holds_the_same_numbers_and_purges_on_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    record(tmp_path, range(1, 6), tensorboard=True)
    record(tmp_path, range(4, 6), start_step=3, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    for key in ("lm_loss", "tokens_per_sec", "memory_gib"):
        series = [(event.step, tensor_util.make_ndarray(event.tensor_proto).item()) for event in events.Tensors(key)]
        assert series == [(row["step"], np.float32(row[key])) for row in rows(tmp_path)]


def test_tensorboard_and_trackers_are_imported_only_when_asked_for(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from pathlib import Path
import test_record
test_record.record(Path({str(tmp_path)!r}), range(1, 3))
print([name for name in ("tensorboard", "wandb", "trackio") if name in sys.modules])
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"


class RecordedRun:
    """Stands in for a Weights & Biases run and keeps what it is given."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.finished = False

    def log(self, row: dict[str, Any], step: int) -> None:
        self.rows.append((step, row))

    def finish(self) -> None:
        self.finished = True
        if self.options["settings"].finish_timeout == 0:
            raise AssertionError("a server that is gone would be waited for")
        raise TimeoutError("Timed out finishing run.")


def test_weights_and_biases_gets_the_same_numbers_under_an_id_that_a_resumed_run_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[RecordedRun] = []

    def init(**options: Any) -> RecordedRun:
        runs.append(RecordedRun(**options))
        return runs[-1]

    class Settings(SimpleNamespace):
        finish_timeout = 0.0

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=Settings, Error=Exception))
    record(tmp_path, range(1, 3), wandb=True)
    record(tmp_path, range(3, 5), start_step=2, wandb=True)
    told = [(step, row) for run in runs for step, row in run.rows]
    assert told == [(row["step"], {key: row[key] for key in row if key != "step"}) for row in rows(tmp_path)]
    assert runs[0].options["id"] == runs[1].options["id"]
    assert all(run.finished for run in runs)
    assert {run.options["resume"] for run in runs} == {"allow"}
    assert [message for message in caplog.messages if "cannot write" in message] == 2 * [
        f"WeightsAndBiases cannot write (Timed out finishing run: what is not sent is kept in {tmp_path / 'wandb'}, "
        "for `wandb sync`); the run goes on"
    ]


def test_trackio_gets_the_same_numbers_under_a_name_that_a_resumed_run_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[RecordedRun] = []

    def init(**options: Any) -> RecordedRun:
        runs.append(RecordedRun(**options))
        return runs[-1]

    def finish() -> None:
        runs[-1].finished = True

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init, finish=finish))
    record(tmp_path, range(1, 3), trackio=True)
    record(tmp_path, range(3, 5), start_step=2, trackio=True)
    told = [(step, row) for run in runs for step, row in run.rows]
    assert told == [(row["step"], {key: row[key] for key in row if key != "step"}) for row in rows(tmp_path)]
    assert runs[0].options["name"] == runs[1].options["name"]
    assert runs[0].options["config"]["logging"]["trackio"] is True
    assert [run.options["resume"] for run in runs] == ["allow", "allow"]
    assert all(run.finished for run in runs)
    record(tmp_path / "another", range(1, 3), trackio=True)
    assert runs[2].options["name"] != runs[0].options["name"], "another run would be taken for a part of this one"


def test_what_trackio_refuses_is_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise ValueError("Self-hosted logging requires a write token: add it.\nMore.")

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    with pytest.raises(
        ConfigError, match=r"logging\.trackio: true, but Trackio takes no run \(Self-hosted .*: add it\);"
    ):
        record(tmp_path, range(1, 2), trackio=True)


def test_trackio_itself_keeps_the_rows_of_both_starts_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio", reason="the package trackio is not installed")
    code = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from pathlib import Path
import test_record
folder = Path({str(tmp_path)!r}) / "run"
test_record.record(folder, range(1, 3), trackio=True)
test_record.record(folder, range(3, 5), start_step=2, trackio=True)
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs(PROJECT)
print([[row["step"], row["lm_loss"]] for row in SQLiteStorage.get_logs(PROJECT, name)])
"""
    code = code.replace("PROJECT", repr(config().general.project))
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    (kept,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("[["))
    assert kept == [[row["step"], row["lm_loss"]] for row in rows(tmp_path / "run")]


def test_who_is_not_logged_in_is_told_at_the_start_and_a_resumed_run_goes_on_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wandb: None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where keys lie
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"logging\.wandb: true, but Weights & Biases takes no run \(No API key"):
        record(tmp_path / "run", range(1, 2), wandb=True)
    record(tmp_path / "run", range(2, 3), start_step=1, wandb=True)
    assert "the run goes on, and what is not sent is kept in" in caplog.text
    assert len(list(tmp_path.glob("run/wandb/offline-run-*/*.wandb"))) == 1


def test_a_config_that_asks_for_a_package_that_is_missing_is_the_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(wandb=True, trackio=True)
    asked.model.model_config.vocab_size = 4096
    asked.save_as_yaml(tmp_path / "run.yaml")
    monkeypatch.setattr("nanotron.check.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check(tmp_path / "run.yaml")
    assert [line.partition(": ")[2] for line in caught.value.problems] == [
        f"logging.{name}: true, but the package {name} is not installed; pip install {name}, or set it to false"
        for name in ("wandb", "trackio")
    ]
    monkeypatch.setattr("nanotron.check.find_spec", lambda name: "found")
    assert check(tmp_path / "run.yaml").logging.wandb


def test_goodput_counts_what_a_restart_took_and_the_steps_that_were_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.5]  # when the first step of half a second ends
    monkeypatch.setattr("nanotron.metrics.record.time", SimpleNamespace(time=lambda: now[0]))
    metrics = Metrics(config(), Mesh(), tmp_path, device=torch.device("cpu"))
    for step in range(1, 5):
        metrics.log(step, values(step))
        now[0] += 0.5
    now[0] = 110.0  # killed; it goes on from step 2
    resumed = Metrics(config(), Mesh(), tmp_path, device=torch.device("cpu"), start_step=2)
    for step in (3, 4):
        resumed.log(step, values(step))
    assert str(resumed._goodput) == "20.0% of 10s"
    metrics.close()
    resumed.close()


def test_the_slowest_rank_is_named_with_its_host_and_for_how_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = ["node1", "node1", "node2", "node2"]
    mesh = Mesh({"pp": 2, "tp": 2})
    metrics = Metrics(config(), mesh, tmp_path, device=torch.device("cpu"), hosts=hosts)
    work = {"slowest_rank_ms": 400.0, "median_rank_ms": 320.0, "fullest_rank": 0, "fullest_rank_gib": 1.5}
    with caplog.at_level(logging.INFO, logger="nanotron"):
        for step, rank in ((1, 0), (2, 3), (3, 3)):
            metrics.log(step, values(step, slowest_rank=rank, **work))
        assert "rank 3 (pp 1, tp 1) on node2, since step 2, worked longest" in caplog.messages[-1]
    metrics.close()
    assert [(row["slowest_host"], row["slowest_since"]) for row in rows(tmp_path)] == [
        ("node1", 1), ("node2", 2), ("node2", 2),
    ]  # fmt: skip
    (line,) = (line for line, _ in health(read_run(tmp_path)) if "slowest" in line)
    assert line.startswith("rank 3 on node2 was the slowest in 2 of 3 looks at all ranks")
    assert line.endswith("; at the end rank 3 on node2, since step 2")
