"""The peers on several processes do the same work as ours, cut in the same way; and how first steps are watched."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.contenders import PLAIN, RING, SUBJECTS, Contender, Subject, ours
from bench.first_step import (
    STARTERS,
    Failed,
    Run,
    Starter,
    descendants,
    proportional_set_size,
    ranks_below,
    table,
    watch,
)
from bench.ours import config_of, trainer_of
from bench.peers.loop import logits_loss, training_step
from bench.peers.pipelining import layers_of_stages
from bench.plain import whole_model
from bench.runner import Running
from bench.shapes import SHAPES, Shape
from bench.work import microbatches
from nanotron.metrics.record import step_line
from nanotron.parallel.comm import all_reduce_
from nanotron.parallel.mesh import Mesh
from nanotron.training.step import Training
from nanotron.training.topology import layers_of_stages as our_layers_of_stages
from tests.pool import Pool


@pytest.mark.parametrize("shape", ["reference", "wide", "long"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_peers_pipeline_is_cut_as_ours(schedule: str, shape: str) -> None:
    asked = {"shape": asdict(SHAPES[shape]), "dtype": "float32", "layout": {"pp": 2, "pp_engine": schedule}}
    ours = [hi - lo for lo, hi in our_layers_of_stages(config_of(asked))]
    assert layers_of_stages(SHAPES[shape], schedule, 2) == ours


def losses(contender: Contender, folder: Path, *, world: int = 2, shape: Shape = SHAPES["tiny"]) -> list[float]:
    """Of four steps on some processes, with what this interpreter has installed."""
    running = Running(replace(contender, environment=None), Subject("", [], world=world), shape, folder)
    try:
        running.wait_ready()
        return running.make_steps(4)["losses"]
    finally:
        running.close()


def as_shipped(subject: str, word: str) -> list[Contender]:
    """The subject's contenders of such a name, without their doubles."""
    found = [one for one in SUBJECTS[subject].contenders if one.name.startswith(word) and not one.batch_policy]
    assert len(found) > 1
    return found


def started_untrained_and_learnt(found: list[float]) -> bool:
    """The same tokens at every step: from ln 128 down."""
    return found[0] == pytest.approx(4.852, abs=0.1) and found == sorted(found, reverse=True)


@pytest.mark.nightly  # each contender is two interpreters, and none of it is ours
def test_dtensor_trains_the_same_however_it_cuts_the_stream_and_the_logits(tmp_path: Path) -> None:
    first, *others = [losses(one, tmp_path) for one in as_shipped("tp2", "DTensor")]
    assert started_untrained_and_learnt(first)
    for other in others:
        assert other == pytest.approx(first, rel=1e-5)


@pytest.mark.nightly
def test_ring_attention_trains_as_whole_rows_do(tmp_path: Path) -> None:
    whole = losses(PLAIN, tmp_path, world=1)
    assert started_untrained_and_learnt(whole)
    assert losses(RING, tmp_path) == pytest.approx(whole, rel=1e-5)
    ours_whole = losses(ours(), tmp_path, world=1)
    for one in SUBJECTS["cp2"].contenders:
        if one.module == "bench.ours":
            assert losses(one, tmp_path) == pytest.approx(ours_whole, rel=1e-5), one.name


@pytest.mark.nightly  # it imports all of FSDP2
def test_fsdp2_makes_our_losses_from_our_weights(pool: Pool) -> None:
    for theirs, mine in pool.run(2, losses_of_fsdp2_and_ours):
        assert theirs[0] == pytest.approx(mine[0], rel=1e-6)
        assert theirs == pytest.approx(mine, rel=1e-4)  # it lets norms decay, by 1e-4 a step
        assert started_untrained_and_learnt(theirs)


PLAIN_NAMES = {
    "layers": "blocks",
    "attn.": "",
    "mlp.": "",
    "attn_norm.weight": "norms.0",
    "mlp_norm.weight": "norms.1",
    "norm.weight": "norm",
}
"""Parts of our names, and what stands there in the plain model's."""


def losses_of_fsdp2_and_ours(rank: int, world: int) -> tuple[list[float], list[float]]:
    """Of four steps, of the same weights."""
    from bench.peers.fsdp2 import reshard

    shape = SHAPES["tiny"]
    asked: dict[str, Any] = {"shape": asdict(shape), "dtype": "float32"}
    one = Training(config_of(asked), Mesh(), "cpu")
    one.initialize()
    plain = whole_model(shape, shape.num_hidden_layers)
    (chunk,), named = one.chunks, dict(plain.named_parameters())
    with torch.no_grad():
        for name, weight in chunk.weights.items():
            for part, its in PLAIN_NAMES.items():
                name = name.replace(part, its)
            named[name].copy_(weight.view(named[name].shape))
    reshard(plain, init_device_mesh("cpu", (world,)), torch.float32)
    step = training_step(logits_loss(plain), plain.parameters(), microbatches(shape, rank, world))
    training, batches = trainer_of(asked | {"layout": {"dp": world}})
    return (
        [float(all_reduce_(torch.tensor(step() / world), dist.group.WORLD)) for _ in range(4)],
        [training.step(update, batches).read().lm_loss for update in (1, 2, 3, 4)],
    )


@pytest.mark.nightly
def test_experts_train_the_same_shared_by_two_replicas_and_on_one_process_as_transformers_do(tmp_path: Path) -> None:
    subject = SUBJECTS["moe2"]
    two, one, peer = (c for c in subject.contenders if c.name in {"ours", "ours, one process", "transformers"})
    shape = replace(SHAPES["tiny"], **subject.shape)
    found = [losses(contender, tmp_path, shape=shape) for contender in (two, one, peer)]
    assert all(map(started_untrained_and_learnt, found))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.nightly
def test_both_pipelines_start_untrained_and_learn(tmp_path: Path) -> None:
    for one in as_shipped("pp2", "Schedule"):
        found = losses(one, tmp_path)
        assert started_untrained_and_learnt(found), one.name
        assert found[3] < found[0] - 0.05, one.name


def test_ranks_are_the_descendants_that_have_torch_loaded() -> None:
    rank = "import torch, sys; print('loaded', flush=True); sys.stdin.read()"
    launcher = (
        "import subprocess, sys\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1]])\n"
        "other.kill()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", launcher, rank], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "loaded\n"
        ranks = ranks_below(process.pid)
        assert len(descendants(process.pid)) == 2
        assert len(ranks) == 1
        resident = int(Path(f"/proc/{ranks[0]}/statm").read_text().split()[1]) * 4096
        assert 10e6 < proportional_set_size(ranks[0]) < 1.1 * resident
    finally:
        process.stdin.close()
        process.wait(30)


def test_a_run_that_fails_is_reported_with_its_last_lines() -> None:
    script = "print('step 1', flush=True); raise SystemExit('out of luck')"
    with pytest.raises(Failed, match=r"broken: exit code 1, 0 ranks seen(\n.*)*out of luck"):
        watch(Starter("broken", lambda steps, folder: [sys.executable, "-c", script], r"step (\d+)"), 2)


def test_the_lines_of_a_step_are_known() -> None:
    rates = ("consumed_tokens", "time_per_iteration_ms", "tokens_per_sec", "tokens_per_sec_per_device")
    row = dict.fromkeys((*rates, "lm_loss", "model_tflops_per_device", "memory_gib"), 1.0) | {"step": 12}
    ours = step_line(row, train_steps=20, batch_tokens=1, eta=1.0)
    torchtitan = "[titan] 2026-01-01 00:00:00,000 - root - INFO - step: 12  loss:  8.31777  grad_norm:  0.5  memory: 0"
    for starter, line in zip(STARTERS, (ours, ours, torchtitan), strict=True):
        found = re.search(starter.step, line)
        assert found is not None, starter.name
        assert found[1] == "12"


def test_the_table_of_first_steps_has_medians_over_runs_and_the_mean_and_the_largest_of_the_ranks() -> None:
    runs = [Run(seconds, 2 * seconds, [100_000_000, 300_000_000], 50_000_000) for seconds in (1.0, 2.0, 4.0)]
    _, line = table({"ours": runs})
    assert line.split() == ["ours", "2.0", "1.5", "–", "3.0", "4.0", "200", "300", "50"]
