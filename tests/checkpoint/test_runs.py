"""Runs that stop and go on: bit for bit in the same layout, within rounding in another."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from nanotron.checkpoint.inspect import inspect_checkpoint
from nanotron.checkpoint.resume import newest_complete
from nanotron.checkpoint.storage import LocalFolder
from nanotron.checkpoint.write import Saver
from nanotron.config import get_config_from_dict
from nanotron.convert.exporting import export_hf
from nanotron.convert.importing import import_weights
from nanotron.data.tokenize.prepare import prepare_data
from nanotron.data.tokenize.tokenizer import END_OF_TEXT, save_tokenizer, train_bpe
from nanotron.errors import ConfigError
from nanotron.generate.decode import Decoder
from nanotron.generate.model import load_model
from nanotron.generate.sampling import Sampling
from nanotron.launch import codes
from nanotron.parallel.mesh import Mesh
from nanotron.training import trainer
from nanotron.training.control import ControlWord, Outcome
from tests.checkpoint.runs import (
    EXPERTS,
    different,
    metrics_of,
    run,
    save_again,
    sparse_values_of,
    tensors_of,
    values_of,
)
from tests.convert.models import save_hugging_face
from tests.generate.tiny import made, training_logits


def stage(dataset: dict[str, Any] | None) -> dict[str, Any]:
    return {"data_stages": [{"name": "only", "start_training_step": 1, "data": {"dataset": dataset, "seed": 5}}]}


def dummy(folder: Path) -> dict[str, Any]:
    return stage(None)


def nanoset(folder: Path) -> dict[str, Any]:
    """A token file as datatrove writes it: 30,000 tokens below 67 in documents of 50."""
    (folder / "data").mkdir(exist_ok=True)
    name = folder / "data" / "00000_unshuffled.ds"
    np.random.default_rng(0).integers(0, 67, 30_000, dtype=np.uint16).tofile(name)
    np.arange(50, 30_001, 50, dtype=np.uint64).tofile(f"{name}.index")
    Path(f"{name}.metadata").write_text("test|2\n30000\n30 kT")
    return stage({"dataset_folder": str(folder / "data")})


def hugging_face(folder: Path) -> dict[str, Any]:
    """A saved data set of texts in the digits of numbers, and a tokenizer that knows little more than bytes."""
    from datasets import Dataset

    texts = [f"{number} and {number * number}" for number in range(400)]
    if not (folder / "saved").exists():
        Dataset.from_dict({"text": texts}).save_to_disk(str(folder / "saved"))
        save_tokenizer(train_bpe(texts, 270), str(folder / "tokenizer"), eos=END_OF_TEXT)
    tokenizer = {"tokenizer_name_or_path": str(folder / "tokenizer")}
    shape = {**values_of(folder)["model"]["model_config"], "vocab_size": 270}
    model = {"model": {"dtype": "float32", "model_config": shape}}
    return {**stage({"hf_dataset_or_datasets": str(folder / "saved")}), **model, "tokenizer": tokenizer}


DATA = {"dummy": dummy, "nanoset": nanoset, "hugging face": hugging_face}


STOPPED = [("dummy", (2, 2, 1)), ("nanoset", (1, 1, 2)), ("nanoset", (2, 2, 1)), ("hugging face", (2, 1, 2))]
ALONE = [(data, layout) for data in DATA for layout in ((1, 1, 1), (2, 2, 1), (1, 1, 2))]


@pytest.mark.parametrize(
    ("data", "layout"),
    [*STOPPED, *(pytest.param(*each, marks=pytest.mark.nightly) for each in ALONE if each not in STOPPED)],
    ids=str,
)
def test_a_run_that_stopped_goes_on_bit_for_bit(pool, tmp_path: Path, layout, data: str) -> None:
    world = layout[0] * layout[1] * layout[2]
    straight, stopped = (values_of(tmp_path / name, layout) for name in ("straight", "stopped"))
    for values in (straight, stopped):
        values |= DATA[data](tmp_path)
    assert pool.run(world, run_in, str(tmp_path), straight) == [codes.DONE] * world
    assert pool.run(world, run_in, str(tmp_path), stopped, 4) == [codes.PREEMPTED] * world
    assert newest_complete(str(tmp_path / "stopped")) == f"{tmp_path}/stopped/4"
    assert pool.run(world, run_in, str(tmp_path), stopped) == [codes.DONE] * world
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "straight")
    assert different(tmp_path / "stopped" / "8", tmp_path / "straight" / "8") == []


def test_a_batch_that_grows_stops_anywhere_and_goes_on_here_bit_for_bit_and_elsewhere(pool, tmp_path: Path) -> None:
    ramp = {
        "tokens__batch_accumulation_per_replica": None,
        "tokens__global_batch_size": 12,
        "tokens__batch_ramp": [{"global_batch_size": 6, "steps": 3}],
    }
    straight = values_of(tmp_path / "straight", (2, 1, 1), **ramp)
    assert pool.run(2, run, straight) == [codes.DONE] * 2
    expected = metrics_of(tmp_path / "straight")
    assert [row["consumed_samples"] for row in expected] == [6, 12, 18, 30, 42, 54, 66, 78]
    assert [row["consumed_tokens"] for row in expected] == [16 * row["consumed_samples"] for row in expected]
    for stop, dp in ((2, 2), (3, 2), (2, 1), (3, 3)):  # within the ramp, and at its end
        folder = tmp_path / f"{stop} {dp}"
        values = values_of(folder, (2, 1, 1), **ramp, tokens__stop_after=stop)
        assert pool.run(2, run, values) == [codes.DONE] * 2
        assert pool.run(dp, run, values_of(folder, (dp, 1, 1), **ramp)) == [codes.DONE] * dp
        found = metrics_of(folder)
        assert [row["consumed_samples"] for row in found] == [row["consumed_samples"] for row in expected]
        if dp == 2:
            assert found == expected
            assert different(folder / "8", tmp_path / "straight" / "8") == []
        assert [row["lm_loss"] for row in found] == pytest.approx([row["lm_loss"] for row in expected], rel=1e-5)


def run_in(rank: int, world: int, folder: str, values: dict[str, Any], stop_at: int | None = None) -> int:
    """Run with ``folder`` as the working directory, its data prepared; a signal stops the run at a step."""
    made, before = trainer.Run._make, os.getcwd()

    def make(self: trainer.Run, data: Any) -> None:
        self.preempted = self.step + 1 == stop_at
        made(self, data)

    trainer.Run._make = make
    os.chdir(folder)
    try:
        prepare_data(get_config_from_dict(values))
        return run(rank, world, values)
    finally:
        trainer.Run._make = made
        os.chdir(before)


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of (dp, tp, pp) = (2, 2, 1) with ZeRO 1 that saved steps 4 and 8."""
    folder = tmp_path_factory.mktemp("runs") / "saved"
    assert pool.run(4, run, values_of(folder, (2, 2, 1))) == [codes.DONE] * 4
    return folder


OTHERS = [((1, 1, 1), 1), ((1, 2, 2), 1), ((4, 1, 1), 1), ((3, 1, 1), 1), ((1, 1, 4), 1), ((2, 2, 1), 0)]
OTHERS += [((4, 1, 1), 2), ((2, 1, 2), 3)]


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


def test_context_parallelism_leaves_no_trace_in_a_checkpoint_and_resumes_bit_for_bit(pool, tmp_path: Path) -> None:
    values = {cp: values_of(tmp_path / f"cp{cp}") for cp in (1, 2)}
    straight = values_of(tmp_path / "straight")
    for each in (values[2], straight):
        each["parallelism"]["context_parallel_size"] = 2
        each.update(nanoset(tmp_path))
        each["model"]["model_config"]["_use_doc_masking"] = True
    assert pool.run(2, run_in, str(tmp_path), straight) == [codes.DONE] * 2
    assert pool.run(2, run_in, str(tmp_path), values[2], 4) == [codes.PREEMPTED] * 2
    assert pool.run(2, run_in, str(tmp_path), values[2]) == [codes.DONE] * 2
    assert metrics_of(tmp_path / "cp2") == metrics_of(tmp_path / "straight")
    assert different(tmp_path / "cp2" / "8", tmp_path / "straight" / "8") == []
    saved, alone, back = str(tmp_path / "cp2" / "8"), tmp_path / "alone", tmp_path / "back"
    assert pool.run(1, save_again, values[1], saved, str(alone)) == [[]]
    assert pool.run(2, save_again, values[2], str(alone / "1"), str(back)) == [[]] * 2
    assert different(saved, alone / "1") == different(saved, back / "1") == []


def test_sharded_weights_go_on_bit_for_bit_and_move_to_any_stage(pool, tmp_path: Path) -> None:
    def values(folder: str, layout: tuple[int, int, int], stage: int, shards: int | None = None) -> dict[str, Any]:
        options = {"optimizer__zero_stage": stage, "parallelism__dp_shard": shards, "model__dtype": "bfloat16"}
        return values_of(tmp_path / folder, layout, **options)

    straight, stopped = (values(name, (4, 1, 1), 3, 2) for name in ("straight", "stopped"))
    assert pool.run(4, run_in, str(tmp_path), straight) == [codes.DONE] * 4
    assert pool.run(4, run_in, str(tmp_path), stopped, 3) == [codes.PREEMPTED] * 4
    assert pool.run(4, run_in, str(tmp_path), stopped) == [codes.DONE] * 4
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "straight")
    source = saved = tmp_path / "stopped" / "8"
    assert different(saved, tmp_path / "straight" / "8") == []
    moved = [((3, 1, 1), 3, None), ((2, 1, 2), 2, None), ((4, 1, 1), 2, 2), ((2, 2, 1), 3, None), ((1, 1, 1), 3, None)]
    for number, (layout, stage, shards) in enumerate([*moved, ((2, 1, 1), 0, None), ((4, 1, 1), 3, 2)]):
        options, target, world = values("unused", layout, stage, shards), tmp_path / str(number), math.prod(layout)
        assert pool.run(world, save_again, options, str(source), str(target)) == [[]] * world
        source = target / "1"
        assert different(saved, source) == [], f"(dp, tp, pp) = {layout}, stage {stage}"


def test_an_average_begins_with_the_weights_and_is_generated_from_and_exported(
    pool, saved: Path, tmp_path: Path
) -> None:
    values = values_of(tmp_path / "run", (2, 1, 1), optimizer__ema_decay=0.5, optimizer__zero_stage=3)
    assert pool.run(1, save_again, values_of("x", optimizer__ema_decay=0.5), str(saved / "4"), str(tmp_path / "begun"))
    begun = tensors_of(tmp_path / "begun" / "1")
    assert all(np.array_equal(begun[f"ema/{name}"], begun[f"weight/{name}"]) for name in names_of("weight", begun))
    assert pool.run(2, run, values) == [codes.DONE] * 2
    last = tensors_of(tmp_path / "run" / "8")
    assert not np.array_equal(last["ema/norm.weight"], last["weight/norm.weight"])

    config = get_config_from_dict(values_of("x"))
    for ema, kind in ((True, "ema"), (False, "weight")):
        model = load_model(str(tmp_path / "run" / "8"), config, Mesh(), torch.device("cpu"), ema=ema)
        assert all(np.array_equal(weight.detach(), last[f"{kind}/{name}"]) for name, weight in model.weights.items())
        export_hf(str(tmp_path / "run"), str(tmp_path / kind), ema=ema)
        exported = safetensors.torch.load_file(tmp_path / kind / "model.safetensors")
        assert np.array_equal(exported["lm_head.weight"], last[f"{kind}/head.weight"])
    for refused in (
        lambda: load_model(str(saved / "8"), config, Mesh(), torch.device("cpu"), ema=True),
        lambda: export_hf(str(saved), str(tmp_path / "none"), ema=True),
    ):
        with pytest.raises(ConfigError, match=f"--ema: {saved}/8 has no average of its weights"):
            refused()


def test_a_model_trained_under_mup_is_exported_and_generated_from_as_any_other(pool, tmp_path: Path) -> None:
    """Its scores are smaller by what is in the queries' weights: there is no multiplier that an export could lose."""
    from transformers import AutoModelForCausalLM

    mup = {"model__init_method": {"use_mup": True, "mup_base_width": 8}}
    assert pool.run(4, run, values_of(tmp_path / "run", (2, 2, 1), **mup)) == [codes.DONE] * 4
    export_hf(str(tmp_path / "run"), str(tmp_path / "hf"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    ours = load_model(str(tmp_path / "run"), get_config_from_dict(values_of("x", **mup)), Mesh(), torch.device("cpu"))
    tokens = torch.randint(0, 67, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits[0]
    torch.testing.assert_close(training_logits(ours, tokens[0].tolist()), expected, rtol=1e-5, atol=1e-5)
    said = theirs.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=[], pad_token_id=0)[:, 16:]
    decoder = Decoder(ours, Mesh(), torch.device("cpu"), ends=())
    assert made(decoder, tokens.tolist(), 8, Sampling()) == said.tolist()


def names_of(kind: str, tensors: dict[str, Any]) -> list[str]:
    return [name.partition("/")[2] for name in tensors if name.startswith(f"{kind}/")]


def test_experts_momentum_and_average_go_on_bit_for_bit_and_move_to_any_layout(pool, tmp_path: Path) -> None:
    shared = ((2, 2, 1), 2)
    muon: dict[str, Any] = {"optimizer__optimizer_factory": {"name": "muon"}, "optimizer__ema_decay": 0.9}
    straight, stopped = (sparse_values_of(tmp_path / name, *shared, **muon) for name in ("straight", "stopped"))
    for values in (straight, stopped):
        values["model"]["dtype"] = "bfloat16"
    assert pool.run(4, run_in, str(tmp_path), straight) == [codes.DONE] * 4
    assert pool.run(4, run_in, str(tmp_path), stopped, 3) == [codes.PREEMPTED] * 4
    assert pool.run(4, run_in, str(tmp_path), stopped) == [codes.DONE] * 4
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "straight")
    files = [(tmp_path / name / "expert_loads.jsonl").read_text() for name in ("straight", "stopped")]
    assert files[0] == files[1]
    assert files[0].count("\n") == 8
    saved = tmp_path / "stopped" / "8"
    assert different(saved, tmp_path / "straight" / "8") == []

    index = json.loads((saved / "index.json").read_text())
    stored, gate = index["tensors"], "layers.1.mlp.experts.gate_up.weight"
    assert index["version"] == 2
    assert {name.partition("/")[0] for name in stored if name.endswith(gate)} == {"weight", "master", "ema", "momentum"}
    bias = "layers.1.mlp.router.bias"
    assert stored[f"weight/{bias}"]["dtype"] == "F32"
    assert stored["weight/layers.1.mlp.router.weight"]["dtype"] == "BF16"
    assert {name for name in stored if name.endswith(bias)} == {f"weight/{bias}"}, "a bias that balances has no moments"
    assert any(line.split()[:3] == [f"weight/{bias}", "8", "F32"] for line in inspect_checkpoint(str(saved)))
    values_there = tensors_of(saved)[f"weight/{bias}"]
    assert values_there.any()
    assert not np.array_equal(values_there, torch.tensor(values_there).bfloat16().float().numpy()), "no bits to lose"

    source, moved = saved, [((4, 1, 1), 4), ((1, 2, 1), 1), ((1, 1, 1), 1), shared]
    for number, (layout, ep) in enumerate(moved):
        values, target = sparse_values_of("unused", layout, ep, model__dtype="bfloat16", **muon), tmp_path / str(number)
        world = math.prod(layout)
        assert pool.run(world, save_again, values, str(source), str(target)) == [[]] * world
        source = target / "1"
        assert different(saved, source) == [], f"(dp, tp, pp) = {layout}, ep {ep}"

    weights = sparse_values_of(tmp_path / "weights", (1, 1, 1), 1, model__dtype="bfloat16", tokens__train_steps=1)
    weights["checkpoints"] |= {
        "load_optimizer": False,
        "load_lr_scheduler": False,
        "resume_checkpoint_path": str(saved),
    }
    weights["checkpoints"] |= {"checkpoint_interval": 1}
    weights["optimizer"]["learning_rate_scheduler"] = {"learning_rate": 1e-30}
    weights["model"]["model_config"]["moe_config"] = EXPERTS | {"bias_update_rate": 0.0}
    assert pool.run(1, run, weights) == [codes.DONE]
    assert not [name for name in different(saved, tmp_path / "weights" / "1") if name.startswith("weight/")]


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


def test_a_run_that_its_config_stops_early_keeps_its_schedule_and_goes_on_as_if_it_had_not(
    pool, tmp_path: Path
) -> None:
    straight, early = (values_of(tmp_path / name, tokens__train_steps=4) for name in ("straight", "early"))
    assert pool.run(1, run, straight) == [codes.DONE]
    for _ in range(2):  # the second has nothing left to train
        assert pool.run(1, run, early | {"tokens": early["tokens"] | {"stop_after": 2}}) == [codes.DONE]
        assert metrics_of(tmp_path / "early") == metrics_of(tmp_path / "straight")[:2]
    assert newest_complete(str(tmp_path / "early")) == f"{tmp_path}/early/2"
    assert pool.run(1, run, early) == [codes.DONE]
    assert metrics_of(tmp_path / "early") == metrics_of(tmp_path / "straight")


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


def test_without_load_optimizer_the_weights_stay_and_the_moments_start_afresh(pool, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert pool.run(1, run, values_of(old, model__dtype="bfloat16", tokens__train_steps=4)) == [codes.DONE]
    values = values_of(new, model__dtype="bfloat16", checkpoints__checkpoint_interval=5, tokens__train_steps=5)
    values["checkpoints"] |= {"resume_checkpoint_path": str(old), "load_optimizer": False}
    assert pool.run(1, run, values) == [codes.DONE]
    first, second = tensors_of(old / "4"), tensors_of(new / "5")
    assert hold_one_gradient(second)
    assert not hold_one_gradient(first)
    moved = np.abs(second["master/head.weight"] - first["master/head.weight"])
    assert 0 < moved.max() < 0.02


def hold_one_gradient(tensors: dict[str, np.ndarray[Any, Any]]) -> bool:
    """Whether the moments are those of a single update: (1 - beta1)·g and (1 - beta2)·g² of one g."""
    gradient = tensors["exp_avg/head.weight"] / (1 - 0.9)
    return np.allclose(tensors["exp_avg_sq/head.weight"], (1 - 0.95) * gradient**2, rtol=1e-4, atol=0)


def test_without_load_lr_scheduler_the_run_begins_at_its_first_step(pool, tmp_path: Path) -> None:
    assert pool.run(1, run, values_of(tmp_path / "old", tokens__train_steps=4)) == [codes.DONE]
    values = values_of(tmp_path / "new", tokens__train_steps=2)
    values["checkpoints"] |= {"resume_checkpoint_path": str(tmp_path / "old"), "load_lr_scheduler": False}
    assert pool.run(1, run, values) == [codes.DONE]
    assert [line["step"] for line in metrics_of(tmp_path / "new")] == [1, 2]


@pytest.mark.parametrize("flag", ["load_optimizer", "load_lr_scheduler"])
def test_what_a_run_started_with_counts_once_and_the_same_command_goes_on(
    tmp_path: Path, flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    old = tmp_path / "old"
    assert run(0, 1, values_of(old, tokens__train_steps=4)) == codes.DONE
    straight, stopped = (values_of(tmp_path / name) for name in ("straight", "stopped"))
    for values in (straight, stopped):
        values["checkpoints"] |= {"resume_checkpoint_path": str(old), "checkpoint_interval": 100, flag: False}
    assert run_in(0, 1, str(tmp_path), straight) == codes.DONE
    assert not any("first start" in line for line in caplog.messages)
    assert run_in(0, 1, str(tmp_path), stopped, 5) == codes.PREEMPTED  # which is known when the next step is made
    old.rename(tmp_path / "gone")
    assert run_in(0, 1, str(tmp_path), stopped) == codes.DONE
    assert different(tmp_path / "stopped" / "8", tmp_path / "straight" / "8") == []
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "straight")
    (line,) = (line for line in caplog.messages if "first start" in line)
    key = "checkpoints.resume_checkpoint_path"
    assert line.startswith(
        f"{key}={old}, checkpoints.{flag}=false: for the first start only; this run goes on from its"
    )
    assert "own step 6" in line


def test_a_run_in_the_folder_of_an_imported_model_starts_from_its_weights_and_then_goes_on(tmp_path: Path) -> None:
    save_hugging_face("llama", tmp_path / "hf")
    import_weights(str(tmp_path / "hf"), str(tmp_path / "run"))
    values = values_of(tmp_path / "run", tokens__train_steps=2, checkpoints__load_optimizer=False)
    values["model"]["model_config"] |= {"num_hidden_layers": 3}
    assert run_in(0, 1, str(tmp_path), values, 1) == codes.PREEMPTED
    assert run_in(0, 1, str(tmp_path), values) == codes.DONE
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2]
    assert not hold_one_gradient(tensors_of(tmp_path / "run" / "2"))


def run_with_a_full_disk(rank: int, world: int, values: dict[str, Any]) -> int:
    """A run whose disk has no room for step 4."""
    plain = LocalFolder._write

    def write(self: LocalFolder, file: int, view: memoryview) -> int:
        if "/4/" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(self, file, view)

    LocalFolder._write = write
    try:
        return run(rank, world, values)
    finally:
        LocalFolder._write = plain


def test_training_goes_on_through_a_full_disk_and_the_next_save_is_complete(pool, tmp_path: Path) -> None:
    values = values_of(tmp_path, (2, 1, 1), checkpoints__checkpoint_interval=2, tokens__train_steps=6)
    assert pool.run(2, run_with_a_full_disk, values) == [codes.DONE] * 2
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [step for step in (2, 4, 6) if (tmp_path / str(step) / "index.json").exists()] == [2, 6]
    assert list((tmp_path / "4").iterdir()) == []


def test_a_failed_save_of_a_resumed_run_names_the_checkpoint_that_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"checkpoints__checkpoint_interval": 2, "tokens__train_steps": 2}
    assert run(0, 1, values_of(tmp_path, **changes)) == codes.DONE
    changes["tokens__train_steps"] = 4
    assert run_with_a_full_disk(0, 1, values_of(tmp_path, **changes)) == codes.USER_MISTAKE
    assert any("checkpoint of step 4 failed, the last is 2: rank 0: No space" in line for line in caplog.messages)


@pytest.mark.parametrize("interval", [1, 8])
def test_a_step_left_out_for_nan_is_not_saved_and_the_next_is_however_late_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    read, steps = ControlWord.read, itertools.count(1)

    def spoiled(word: ControlWord) -> Outcome:
        outcome = read(word)
        return replace(outcome, grad_norm=math.nan) if next(steps) in (3, 6) else outcome

    monkeypatch.setattr(ControlWord, "read", spoiled)
    values = values_of(tmp_path, optimizer__on_nan="skip", checkpoints__checkpoint_interval=2)
    values["logging"] = {"iteration_step_info_interval": interval}
    assert run(0, 1, values) == codes.DONE
    assert [step for step in range(1, 9) if (tmp_path / f"{step}/index.json").exists()] == [2, 4, 8]


def test_another_optimizers_checkpoint_is_refused_in_a_line_per_kind_or_its_moments_are_left_behind_with_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = values_of(tmp_path, tokens__train_steps=4, optimizer__optimizer_factory={"name": "sgd"})
    assert run(0, 1, values) == codes.DONE
    with pytest.raises(ConfigError) as caught:
        run(0, 1, values_of(tmp_path))
    assert [line.split(",")[0].rsplit(" ", 1)[-1] for line in caught.value.problems] == ["exp_avg", "exp_avg_sq"]
    assert all("checkpoints.load_optimizer: false" in line for line in caught.value.problems)
    anew = values_of(tmp_path / "new", checkpoints__resume_checkpoint_path=str(tmp_path))
    anew["checkpoints"]["load_optimizer"] = False
    assert run(0, 1, anew) == codes.DONE
    caplog.clear()
    back = values_of(tmp_path / "new", tokens__train_steps=9, optimizer__optimizer_factory={"name": "sgd"})
    assert run(0, 1, back) == codes.DONE
    left = (
        f"exp_avg and exp_avg_sq of {tmp_path}/new/8 are left behind: optimizer.optimizer_factory.name=sgd keeps none"
    )
    assert [record.levelname for record in caplog.records if left in record.getMessage()] == ["WARNING"]


def count_saves(rank: int, world: int, values: dict[str, Any]) -> list[int]:
    steps: list[int] = []
    plain = Saver.save

    def save(self: Saver, step: int, *arguments: Any) -> None:
        steps.append(step)
        plain(self, step, *arguments)

    Saver.save = save
    try:
        run(rank, world, values)
    finally:
        Saver.save = plain
    return steps


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, [2, 4, 5]),
        ({"checkpoint_interval": 5}, [5]),
        ({"save_initial_state": True}, [0, 2, 4, 5]),
        ({"save_final_state": False}, [2, 4]),
    ],
)
def test_each_step_that_is_due_is_saved_once(pool, tmp_path: Path, changes: dict[str, Any], steps: list[int]) -> None:
    values = values_of(tmp_path, tokens__train_steps=5)
    values["checkpoints"] |= {"checkpoint_interval": 2, **changes}
    assert pool.run(1, count_saves, values) == [steps]
