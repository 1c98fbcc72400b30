"""`model.compile`: what it compiles, when, and that it goes on bit for bit. Its numbers on layouts: tests/parity."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from nanotron.config import get_config_from_dict
from nanotron.data.feed import Feed
from nanotron.launch import codes
from nanotron.parallel.mesh import Mesh
from nanotron.training.step import Training
from tests.checkpoint.runs import different, run, values_of
from tests.pool import Pool

FUNCTIONS = 6
"""rms_norm, add_and_norm, queries_and_keys, swiglu; softmax_and_log_z, logit_gradient."""


class Compiled(NamedTuple):
    """Graphs compiled so far, after the first and after the third step."""

    first: int
    third: int


def compiled_graphs(rank: int, world: int, layers: int, recompute: bool) -> Compiled:
    """Train three steps of a model of so many layers, in a process that has compiled nothing yet."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()  # type: ignore[no-untyped-call]
    counters.clear()
    values = values_of("unused", parallelism__recompute_layer=recompute)
    values["model"]["compile"] = True
    values["model"]["model_config"]["num_hidden_layers"] = layers
    config = get_config_from_dict(values)
    mesh = Mesh()
    training = Training(config, mesh, "cpu")
    training.initialize()
    feed = Feed(config, mesh, device=torch.device("cpu"))
    graphs = []
    for update in (1, 2, 3):
        training.step(update, feed.step(update).microbatches).read()
        graphs.append(counters["stats"]["unique_graphs"])
    feed.close()
    return Compiled(graphs[0], graphs[2])


@pytest.mark.parametrize("recompute", [False, True])
def test_each_function_is_compiled_once_whatever_the_number_of_layers_and_steps(pool: Pool, recompute: bool) -> None:
    found = [pool.run(1, compiled_graphs, layers, recompute)[0] for layers in (1, 3)]
    assert found == [Compiled(FUNCTIONS, FUNCTIONS)] * 2


def test_a_compiled_run_that_stopped_goes_on_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    values = values_of(tmp_path / "run", (1, 2, 1), checkpoints__checkpoint_interval=2, model__compile=True)
    values["tokens"]["train_steps"] = 4
    assert pool.run(2, run, values) == [codes.DONE] * 2
    shutil.move(tmp_path / "run" / "4", tmp_path / "straight")
    assert pool.run(2, run, values) == [codes.DONE] * 2
    assert different(tmp_path / "run" / "4", tmp_path / "straight") == []


CONFIG = """
general: {project: tiny, seed: 1}
parallelism: {dp: 2}
model:
  dtype: float32
  model_config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64, vocab_size: 64}
tokens: {sequence_length: 16, train_steps: 3, micro_batch_size: 1, batch_accumulation_per_replica: 2}
optimizer: {learning_rate_scheduler: {learning_rate: 1.0e-3}}
checkpoints: {checkpoint_interval: 100000}
data_stages: [{name: main, start_training_step: 1, data: {dataset: null}}]
"""


def losses_and_lines(folder: Path, name: str, *, compile: bool) -> tuple[list[float], list[str]]:
    """Train with two forked ranks: the losses, and the lines that speak of compiling."""
    (folder / "tiny.yaml").write_text(CONFIG)
    overrides = [f"--override=model.compile={compile}", f"--override=checkpoints.checkpoints_path={name}"]
    command = [sys.executable, "-m", "nanotron.cli", "train", "tiny.yaml", *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == codes.DONE, done.stdout + done.stderr
    losses = [json.loads(line)["lm_loss"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return losses, [line for line in done.stdout.splitlines() if "compil" in line]


def test_forked_ranks_compile_say_so_and_have_the_losses_of_those_that_do_not(tmp_path: Path) -> None:
    compiled, lines = losses_and_lines(tmp_path, "first", compile=True)
    eager, none = losses_and_lines(tmp_path, "second", compile=False)
    assert compiled == pytest.approx(eager, rel=1e-5)
    assert len(compiled) == 3
    assert not none
    assert "compiling in the first step" in lines[0]
    assert "s by the end of step 1" in lines[1]
    assert len(lines) == 2, "a later step compiled too"
