"""`model.compile`: what it compiles, when, and that it goes on bit for bit. Its numbers on layouts: tests/parity."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from nanotron.checkpoint.resume import find_resume
from nanotron.config import Config, get_config_from_dict
from nanotron.data.feed import Feed
from nanotron.launch import codes, place
from nanotron.models.families import flops_per_step
from nanotron.ops.experts import weighted_swiglu
from nanotron.ops.fused import eager, fused
from nanotron.parallel.mesh import Mesh
from nanotron.training import init_or_resume
from nanotron.training.init_or_resume import pays_to_compile, settle_compile
from nanotron.training.step import Training
from nanotron.training.trainer import train
from tests.checkpoint.runs import different, mesh_of, values_of
from tests.checkpoint.runs import run as train_in
from tests.commands import nanotron
from tests.parity.cases import Case
from tests.parity.run import config_of
from tests.pool import Pool

FUNCTIONS = 6
"""rms_norm, add_and_norm, queries_and_keys, swiglu; softmax_and_log_z, logit_gradient."""
CASE = Case(rows=2, compile=True)
"""All tests here, and two of parity's, need the same kernels: what costs is the compiler that makes them."""


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
    config = config_of(replace(CASE, layers=layers, recompute_layer=recompute))
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


@pytest.mark.parametrize(("layers", "recompute"), [(3, True), pytest.param(1, False, marks=pytest.mark.nightly)])
def test_each_function_is_compiled_once_whatever_the_number_of_layers_and_steps(
    pool: Pool, layers: int, recompute: bool
) -> None:
    assert pool.run(1, compiled_graphs, layers, recompute) == [Compiled(FUNCTIONS, FUNCTIONS)]


def graphs_for_rows(rank: int, world: int, numbers: Sequence[int]) -> tuple[int, bool]:
    """Graphs compiled for an expert's SwiGLU over so many rows in turn, and whether its numbers are the eager ones."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()  # type: ignore[no-untyped-call]
    counters.clear()
    equal = True
    for rows in numbers:
        gate_up = torch.linspace(-2, 2, rows * 64, dtype=torch.float64).view(rows, 64)
        weight = torch.linspace(0, 1, rows, dtype=torch.float64)
        results = []
        for fuse in (eager, fused):
            leaves = [gate_up.clone().requires_grad_(), weight.clone().requires_grad_()]
            out = fuse(weighted_swiglu)(*leaves)
            results.append((out, *torch.autograd.grad(out.sum(), leaves)))
        equal &= all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*results, strict=True))
    return counters["stats"]["unique_graphs"], equal


def test_what_experts_compute_is_compiled_once_whatever_the_number_of_rows(pool: Pool) -> None:
    assert pool.run(1, graphs_for_rows, (5, 64, 1, 0, 32, 2, 1000)) == [(1, True)]


def run_of(case: Case, folder: Path) -> Config:
    """A run of four steps that saves the second and the last."""
    config = config_of(replace(case, steps=4))
    return replace(config, checkpoints=replace(config.checkpoints, checkpoints_path=str(folder), checkpoint_interval=2))


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["lm_loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_forked_ranks_compile_say_so_go_on_bit_for_bit_and_have_the_losses_of_one_that_does_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_of(replace(CASE, dp=2), run).save_as_yaml(tmp_path / "tiny.yaml")
    straight = nanotron(tmp_path, "train", "tiny.yaml")
    assert straight.returncode == codes.DONE, straight.stdout + straight.stderr
    lines = [line for line in straight.stdout.splitlines() if "] compil" in line]
    assert "compiling in the first step" in lines[0]
    assert "s by the end of step 1" in lines[1]
    assert len(lines) == 2, "a later step compiled too"
    shutil.move(run / "4", tmp_path / "straight")
    resumed = nanotron(tmp_path, "train", "tiny.yaml")
    assert resumed.returncode == codes.DONE, resumed.stdout + resumed.stderr
    assert different(run / "4", tmp_path / "straight") == []
    eager = run_of(replace(CASE, compile=False), tmp_path / "eager")
    assert train(eager, Mesh(), torch.device("cpu")) == codes.DONE
    assert losses(run) == pytest.approx(losses(tmp_path / "eager"), rel=1e-5)
    assert len(losses(run)) == 4


def settled(rank: int, world: int, folder: str, able: Sequence[bool]) -> bool | str:
    """What ``auto`` becomes in a run that goes on from the newest step of a folder, on ranks that are able or not."""
    config = get_config_from_dict(values_of(folder, (world, 1, 1)))
    assert config.model.compile == "auto"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(init_or_resume, "has_compiler", lambda device: able[rank])
        patched.setattr(init_or_resume, "FLOPS_OF_A_LONG_RUN", 0)
        settle_compile(config, mesh_of(config, rank), torch.device("cpu"), find_resume(folder, None))
    return config.model.compile


def test_auto_is_on_in_a_long_run_where_every_rank_has_a_compiler(tmp_path: Path, pool: Pool) -> None:
    assert settled(0, 1, str(tmp_path), [True]) is True
    assert settled(0, 1, str(tmp_path), [False]) is False
    assert pool.run(2, settled, str(tmp_path), (True, False)) == [False, False]


def test_compiling_pays_on_a_cpu_for_ranks_that_have_enough_to_do(tmp_path: Path) -> None:
    for world in (1, 2):
        config = get_config_from_dict(values_of(tmp_path, (world, 1, 1)))
        model, length = config.model.model_config, config.tokens.sequence_length
        of_a_step = flops_per_step(model, num_samples=config.global_batch_size, sequence_length=length) / world
        for steps, pays in ((8, False), (ceil(1e15 / of_a_step) - 1, False), (ceil(1e15 / of_a_step), True)):
            config.tokens.train_steps = steps
            assert pays_to_compile(config, torch.device("cpu")) is pays
        config.tokens.train_steps = 8
        assert pays_to_compile(config, torch.device("cuda"))


def test_a_resumed_run_compiles_as_it_began_whatever_auto_would_mean_now(tmp_path: Path) -> None:
    assert train_in(0, 1, values_of(tmp_path)) == codes.DONE
    state = tmp_path / "8" / "state.json"
    recorded = json.loads(state.read_text())
    assert recorded["compile"] is False
    assert "compile: false" in (tmp_path / "8" / "config.yaml").read_text()
    assert settled(0, 1, str(tmp_path), [True]) is False
    state.write_text(json.dumps(recorded | {"compile": True}))
    assert settled(0, 1, str(tmp_path), [False]) is True


def test_what_is_written_is_not_decided_anew() -> None:
    for written in (True, False):
        config = config_of(replace(CASE, compile=written))
        settle_compile(config, Mesh(), torch.device("cpu"), None)
        assert config.model.compile is written


@pytest.mark.parametrize("lacks", [None, "triton", "gcc", "Python.h"])
def test_a_gpu_needs_triton_and_each_device_a_compiler_and_pythons_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str | None
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(place, "find_spec", lambda name: None if name == lacks else name)
    monkeypatch.setattr(place.shutil, "which", lambda name: name if name == "gcc" != lacks else None)
    monkeypatch.setattr(place.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    if lacks != "Python.h":
        (tmp_path / "Python.h").touch()
    assert place.has_compiler(torch.device("cuda")) is (lacks is None)
    monkeypatch.setenv("CXX", "gcc")
    assert place.has_compiler(torch.device("cpu")) is (lacks not in ("gcc", "Python.h"))
    assert place.has_compiler(torch.device("mps")) is False
