"""Runs that stop and go on: bit for bit in the same layout, within rounding in another."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from nanotron.checkpoint.resume import newest_complete
from nanotron.launch import codes
from tests.checkpoint.runs import different, metrics_of, run, save_again, tensors_of, values_of
from tests.convert.models import save_hugging_face


def nanoset(folder: Path) -> str:
    """A token file as datatrove writes it: 30,000 tokens below 67 in documents of 50."""
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, 67, 30_000, dtype=np.uint16)
    tokens.tofile(folder / "00000_unshuffled.ds")
    np.arange(50, 30_001, 50, dtype=np.uint64).tofile(folder / "00000_unshuffled.ds.index")
    (folder / "00000_unshuffled.ds.metadata").write_text("test|2\n30000\n30 kT")
    return str(folder)


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("data", ["dummy", "nanoset"])
def test_a_run_that_stopped_goes_on_bit_for_bit(pool, tmp_path: Path, layout, data: str) -> None:
    world = layout[0] * layout[1] * layout[2]
    stages = [{"name": "only", "start_training_step": 1, "data": {"dataset": None, "seed": 5}}]
    if data == "nanoset":
        stages[0]["data"] = {"dataset": {"dataset_folder": nanoset(tmp_path / "data")}, "seed": 5}
    straight, stopped = (values_of(tmp_path / name, layout) for name in ("straight", "stopped"))
    for values in (straight, stopped):
        values["data_stages"] = stages
    assert pool.run(world, run, straight) == [codes.DONE] * world
    # the learning rate's plan is the whole run's, so the first half is a run that is told where to stop by its data
    pool.run(world, run_until, {**stopped}, 4)
    assert newest_complete(str(tmp_path / "stopped")) == f"{tmp_path}/stopped/4"
    assert pool.run(world, run, stopped) == [codes.DONE] * world
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "straight")
    assert different(tmp_path / "stopped" / "8", tmp_path / "straight" / "8") == []


def run_until(rank: int, world: int, values, step: int) -> int:
    """A run that a signal stops at ``step``."""
    from nanotron import trainer

    made = trainer.Run._make

    def make(self: trainer.Run, data: object) -> None:
        self.told_to_stop = self.step + 1 == step
        made(self, data)

    trainer.Run._make = make
    try:
        return run(rank, world, values)
    finally:
        trainer.Run._make = made


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of (dp, tp, pp) = (2, 2, 1) with ZeRO 1 that saved steps 4 and 8."""
    folder = tmp_path_factory.mktemp("runs") / "saved"
    assert pool.run(4, run, values_of(folder, (2, 2, 1))) == [codes.DONE] * 4
    return folder


OTHERS = [((1, 1, 1), 1), ((1, 2, 2), 1), ((4, 1, 1), 1), ((3, 1, 1), 1), ((1, 1, 4), 1), ((2, 2, 1), 0)]


@pytest.mark.parametrize(("layout", "zero"), OTHERS, ids=str)
def test_another_layout_goes_on_where_one_stopped(pool, saved: Path, tmp_path: Path, layout, zero: int) -> None:
    world = layout[0] * layout[1] * layout[2]
    values = values_of(
        tmp_path / "run", layout, checkpoints__resume_checkpoint_path=str(saved / "4"), optimizer__zero_stage=zero
    )
    assert pool.run(world, save_again, values, str(saved / "4"), str(tmp_path / "again")) == [[]] * world
    assert different(saved / "4", tmp_path / "again" / "1") == []
    assert any(name.startswith("exp_avg_sq/") for name in tensors_of(saved / "4"))
    assert pool.run(world, run, values) == [codes.DONE] * world
    for mine, theirs in zip(metrics_of(tmp_path / "run"), metrics_of(saved)[4:], strict=True):
        assert (mine["step"], mine["lr"], mine["consumed_samples"]) == (
            theirs["step"],
            theirs["lr"],
            theirs["consumed_samples"],
        )
        assert mine["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-5)


@pytest.mark.parametrize(("before", "after"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_dtype_may_change_on_resume(pool, tmp_path: Path, before: str, after: str) -> None:
    values = values_of(tmp_path, model__dtype=before, tokens__train_steps=4)
    assert pool.run(1, run, values) == [codes.DONE]
    values = values_of(tmp_path, model__dtype=after, tokens__train_steps=8)
    assert pool.run(1, run, values) == [codes.DONE]
    first, second = (json.loads((tmp_path / step / "index.json").read_text())["tensors"] for step in ("4", "8"))
    names = {"float32": "F32", "bfloat16": "BF16"}
    assert first["weight/norm.weight"]["dtype"] == names[before]
    assert second["weight/norm.weight"]["dtype"] == names[after]
    assert ("master/norm.weight" in second) == (after == "bfloat16")


def test_a_finished_run_has_nothing_left_to_train(pool, tmp_path: Path) -> None:
    values = values_of(tmp_path, tokens__train_steps=4)
    assert pool.run(1, run, values) == [codes.DONE]
    before = (tmp_path / "metrics.jsonl").read_text()
    assert pool.run(1, run, values) == [codes.DONE]
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 1)], ids=str)
def test_a_run_starts_from_a_hugging_face_model(pool, tmp_path: Path, layout) -> None:
    world = layout[0] * layout[1] * layout[2]
    original = save_hugging_face("llama", tmp_path / "hf")
    values = values_of(tmp_path / "run", layout, checkpoints__save_initial_state=True, tokens__train_steps=1)
    values["model"]["init_method"] = {"path": str(tmp_path / "hf")}
    values["model"]["model_config"] |= {"num_hidden_layers": 3}
    assert pool.run(world, run, values) == [codes.DONE] * world
    tensors = tensors_of(tmp_path / "run" / "0")
    weights = dict(original.named_parameters())
    assert torch.equal(torch.from_numpy(tensors["weight/embed.weight"]), weights["model.embed_tokens.weight"])
    fused = torch.from_numpy(tensors["weight/layers.2.mlp.gate_up.weight"][1])
    assert torch.equal(fused, weights["model.layers.2.mlp.up_proj.weight"])
