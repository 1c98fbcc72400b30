"""The examples that a laptop can train are trained, for two steps, in one process."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nanotron.check import check
from nanotron.training.topology import parameter_specs
from tests.commands import nanotron

ROOT = Path(__file__).parents[2]
SMALL = [
    file
    for file in sorted((ROOT / "examples").glob("*.yaml"))
    if sum(spec.numel for spec in parameter_specs(check(file)).values()) < 10**7
]


def test_there_is_a_small_example() -> None:
    assert [file.name for file in SMALL] == [
        "config_long_context.yaml",
        "config_tiny_llama.yaml",
        "config_tiny_moe.yaml",
        "config_tiny_muon.yaml",
        "config_tiny_sharded.yaml",
    ]


@pytest.mark.parametrize("file", SMALL, ids=lambda file: file.name)
def test_a_small_example_trains(file: Path, tmp_path: Path) -> None:
    corpus = f"{{corpus: stdlib, folder: {ROOT / 'data' / 'python-bpe4096'}}}"  # prepared once for all tests
    overrides = [
        *(f"parallelism.{axis}=1" for axis in ("dp", "context_parallel_size", "expert_parallel_size", "tp", "pp")),
        *(["parallelism.dp_shard=1"] if check(file).parallelism.dp_shard else []),
        *("tokens.train_steps=2", "optimizer.learning_rate_scheduler.lr_warmup_steps=1"),
        *("tokens.batch_accumulation_per_replica=1", "general.threads_per_rank=1"),
        f"data_stages=[{{name: a, start_training_step: 1, data: {{dataset: {corpus}}}}}]",
    ]
    options = [f"--override={override}" for override in overrides]
    ran = nanotron(tmp_path, ROOT / "run_train.py", "--config-file", file, *options)
    assert ran.returncode == 0, ran.stderr
    run_dir = tmp_path / check(file).checkpoints.checkpoints_path
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert (run_dir / "2" / "index.json").exists()
    assert check(run_dir / "config.yaml", nproc=1) == check(run_dir / "2" / "config.yaml", nproc=1)


PLANNED = [
    pytest.param(file, marks=() if file.stem == "config_135m" else pytest.mark.nightly, id=file.name)
    for file in sorted((ROOT / "examples").glob("*.yaml"))
    if "# `nanotron plan`" in file.read_text()
]


def test_sizes_that_people_train_are_there_and_planned() -> None:
    assert [file.id for file in PLANNED] == ["config_135m.yaml", "config_1b.yaml", "config_8b.yaml", "config_moe.yaml"]


@pytest.mark.parametrize("file", PLANNED)
def test_an_example_says_what_its_plan_says(file: Path) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "write_reference.py"))
    (said,) = tool["PLANNED"].findall(file.read_text())
    assert said == tool["planned"](file), "`make reference` writes it anew"
    assert "It fits" in said


def run(folder: Path, *command: object) -> str:
    """Run a script in a folder with the prepared corpus; what it printed."""
    nanotron(ROOT, "tokenize", "--stdlib")  # unless it is there
    os.symlink(ROOT / "data" / "python-bpe4096", folder / "data" / "python-bpe4096")
    done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_the_walkthrough_goes_through_all_its_parts(tmp_path: Path) -> None:
    """With few steps each, so what it says of the model is little."""
    (tmp_path / "data").mkdir()
    script = ROOT / "examples" / "walkthrough" / "run.sh"
    said = run(tmp_path, "bash", script, "--override", "tokens.train_steps=2")
    assert said.count("iteration: 2 / 2") == 3
    assert "continue: 0 of 100 sums are right" in said
    assert "sft: " in said
    exported = tmp_path / "runs" / "walkthrough" / "exported"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in exported.iterdir()}


@pytest.mark.nightly
def test_a_family_a_schedule_and_a_data_source_of_others_train(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    said = run(tmp_path, sys.executable, "examples/extend/run.py", "--override", "tokens.train_steps=12")
    losses = [float(line.split("lm_loss: ")[1].split()[0]) for line in said.splitlines() if "lm_loss: " in line]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1.0
