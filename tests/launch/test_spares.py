"""Ranks that no replica needs, and replicas that come and go: the rows and the curve stay those of one layout."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from nanotron.launch import codes
from nanotron.report.facts import health
from nanotron.report.run import read_run
from tests.commands import Command, nanotron
from tests.launch.test_run import wait_for_steps

CONFIG = """
general: {project: tiny, seed: 1, timeout_s: 60}
parallelism: {dp: auto, tp: 2}
model:
  dtype: float32
  model_config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64, vocab_size: 64}
tokens: {sequence_length: 16, train_steps: 6, micro_batch_size: 1, global_batch_size: 4}
optimizer: {learning_rate_scheduler: {learning_rate: 1.0e-2, min_decay_lr: 1.0e-3}}
checkpoints: {checkpoints_path: run, checkpoint_interval: 100000}
data_stages: [{name: main, start_training_step: 1, data: {dataset: null}}]
"""


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["lm_loss"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_with_as_many_replicas_as_there_are_ranks_and_its_curve_does_not_tell(tmp_path: Path) -> None:
    for name in ("elastic", "plain"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.yaml").write_text(CONFIG)
    for ranks, last in ((4, 2), (3, 4), (5, 6)):
        done = nanotron(tmp_path / "elastic", "train", "x.yaml", "--nproc", ranks, "--smoke", last)
        assert done.returncode == codes.DONE, done.stderr
        told = f"parallelism.dp: auto is {ranks // 2}; of {ranks} ranks 1 wait as spares"
        assert (told in done.stdout + done.stderr) == (ranks % 2 == 1)
    plain = nanotron(
        tmp_path / "plain", "train", "x.yaml", "--override=parallelism.dp=1", "--override=parallelism.tp=1"
    )
    assert plain.returncode == codes.DONE, plain.stderr
    assert losses(tmp_path / "elastic") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    rows = [json.loads(line) for line in (tmp_path / "elastic/run/metrics.jsonl").read_text().splitlines()]
    layouts = {row["step"]: row["layout"] for row in rows if "layout" in row}
    assert layouts == {1: "dp 2 · tp 2", 3: "tp 2", 5: "dp 2 · tp 2"}
    assert ("from step 3 on: tp 2; before: dp 2 · tp 2", False) in list(health(read_run(tmp_path / "elastic/run")))


def test_a_spare_ends_with_the_code_of_the_run_that_it_waits_for(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(CONFIG)
    done = nanotron(tmp_path, "train", "x.yaml", "--nproc", 3, "--override=general.run_dir=x.yaml/inside")
    assert done.returncode == codes.USER_MISTAKE
    assert done.stderr.count("x.yaml/inside") == 1, done.stderr
    running = Command(tmp_path, "train", "x.yaml", "--nproc", 3, "--override=tokens.train_steps=1000000")
    wait_for_steps(tmp_path, running)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate()
    assert running.returncode == codes.PREEMPTED, errors
