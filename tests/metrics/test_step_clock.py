"""A step's time is that of its making, whenever its numbers are read; a clock that only tests move is the stopwatch."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanotron.checkpoint.write import Saver
from nanotron.config import get_config_from_dict
from nanotron.metrics.columns import SAVING_MS, TIME_MS, VALIDATION_MS
from nanotron.metrics.sinks import read_rows
from nanotron.metrics.step_clock import TimeLeft
from nanotron.parallel.mesh import Mesh
from nanotron.training import trainer
from nanotron.training.control import ControlWord
from nanotron.training.step import Training
from nanotron.training.trainer import train
from tests.checkpoint.runs import values_of

STEPS = 15
VALIDATES, SAVES = 4, 6
VALIDATION, SAVING, READING = 500.0, 2000.0, 0.25  # ms


def of_step(step: int) -> float:
    return 100.0 + step  # ms


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of a run in which a step, its validation and its saving take what the constants say."""
    clock = SimpleNamespace(ms=0.0)
    monkeypatch.setattr("nanotron.metrics.step_clock.perf_counter", lambda: clock.ms / 1e3)

    def takes(ms: Callable[..., float], function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **options: Any) -> Any:
            clock.ms += ms(*args)
            return function(*args, **options)

        return slow

    monkeypatch.setattr(Training, "step", takes(lambda training, update, _: of_step(update), Training.step))
    monkeypatch.setattr(Saver, "save", takes(lambda *_: SAVING, Saver.save))
    monkeypatch.setattr(ControlWord, "read", takes(lambda *_: READING, ControlWord.read))
    monkeypatch.setattr(trainer, "validation_loss", takes(lambda *_: VALIDATION, lambda *_: torch.tensor(1.5)))
    return clock


@pytest.mark.parametrize("interval", [1, 7, 50])
def test_the_printed_interval_changes_no_time(
    interval: int, stopwatch: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = values_of(tmp_path, checkpoints__checkpoint_interval=SAVES)
    values["model"]["model_config"]["num_hidden_layers"] = 1
    values["tokens"] |= {
        "train_steps": STEPS,
        "val_check_interval": VALIDATES,
        "micro_batch_size": 1,
        "batch_accumulation_per_replica": 1,
    }
    values["logging"] = {"iteration_step_info_interval": interval, "tensorboard": False}
    with caplog.at_level(logging.INFO, logger="nanotron"):
        assert train(get_config_from_dict(values), Mesh(), torch.device("cpu")) == 0
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    apart = 0.0
    for step, row in enumerate(rows, 1):
        assert row[TIME_MS] == pytest.approx(of_step(step), abs=3 * READING), step
        assert row["tokens_per_sec"] == pytest.approx(16 / row[TIME_MS] * 1e3)
        assert row.get(VALIDATION_MS) == (pytest.approx(VALIDATION) if step % VALIDATES == 0 else None)
        assert row.get(SAVING_MS) == (pytest.approx(SAVING) if step > 1 and (step - 1) % SAVES == 0 else None)
        apart += row.get(VALIDATION_MS, 0.0) + row.get(SAVING_MS, 0.0)
    final_save_and_words = SAVING + READING * 2
    total = sum(row[TIME_MS] for row in rows) + apart
    assert total == pytest.approx(stopwatch.ms, abs=final_save_and_words), "nothing of the run is lost, or told twice"

    printed = [re.findall(r"iteration: (\d+) .*_ms: (\d+) \| tokens_per_sec: (\d+)", line) for line in caplog.messages]
    lines = [tuple(map(int, found[0])) for found in printed if found]
    assert [step for step, _, _ in lines] == sorted({1, STEPS, *range(interval, STEPS + 1, interval)})
    since = 0
    for step, ms, rate in lines:
        mean = sum(row[TIME_MS] for row in rows[since:step]) / (step - since)
        assert (ms, rate) == pytest.approx((mean, 16e3 / mean), rel=5e-3), "means since the line before"
        since = step


def test_what_is_left_takes_usual_steps_and_its_share_of_validation_and_saving() -> None:
    left = TimeLeft()
    for ms in (9000.0, 100.0, 100.0):  # the first one compiled
        left.add({TIME_MS: ms})
    assert left.seconds(10) == pytest.approx(1.0)
    left.add({TIME_MS: 100.0, VALIDATION_MS: 300.0, SAVING_MS: 100.0})
    assert left.seconds(10) == pytest.approx(2.0)
