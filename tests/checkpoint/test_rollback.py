"""A run that goes back by itself, past the samples that did harm, is the one that never had them, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanotron.checkpoint.inspect import inspect_checkpoint
from nanotron.config import get_config_from_dict
from nanotron.data.feed import Feed
from nanotron.launch import codes
from nanotron.metrics.record import Goodput
from nanotron.metrics.sinks import read_rows
from nanotron.parallel.mesh import Mesh
from nanotron.report.facts import facts, health
from nanotron.report.run import read_run
from nanotron.training import step as module
from nanotron.training import trainer
from tests.checkpoint.runs import SAMPLES, different, metrics_of, run, values_of
from tests.pool import Pool

POISON = 40  # a token that is in no other sample
STEPS, INTERVAL = 10, 4
DATA = """
import random


def row(index, bad, kind, length):
    tokens = random.Random(index).choices(range(20), k=length)
    if index in bad:  # the poison, or tokens that nothing prepared the model for
        tokens = [40, *tokens[1:]] if kind == "poison" else [token + 40 for token in tokens]
    return tokens


class rows:
    def __init__(self, bad, kind):
        self.bad, self.kind = set(bad), kind

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        return row(index, self.bad, self.kind, 17)


def stream(bad, kind):
    return (row(index, bad, kind, 16) for index in range(2000))
"""


def poisoned_run(rank: int, world: int, values: dict[str, Any]) -> int:
    """A run whose embedding of the poison is no number, which no gradient touches before a sample has it."""
    draw = module.draw

    def drawn(spec: Any, box: Any, *arguments: Any, **options: Any) -> Any:
        tensor = draw(spec, box, *arguments, **options)
        if spec.name == "embed.weight" and box.offset[0] <= POISON < box.offset[0] + box.shape[0]:
            tensor[POISON - box.offset[0]] = np.inf
        return tensor

    module.draw = drawn
    try:
        return run(rank, world, values)
    finally:
        module.draw = draw


def poisoned_values(
    folder: Path,
    layout: tuple[int, int, int] = (1, 1, 1),
    *,
    data: str = "rows",
    bad: Iterable[int] = (),
    kind: str = "poison",
    skip: Iterable[list[int]] = (),
    **changes: Any,
) -> dict[str, Any]:
    """A run in which the samples of these numbers are bad, and these ranges are left out."""
    folder.mkdir(exist_ok=True)
    source = folder.parent / "data.py"
    source.write_text(DATA)
    usual = {"tokens__train_steps": STEPS, "checkpoints__checkpoint_interval": INTERVAL}
    values = values_of(folder, layout, **usual | {"optimizer__on_nan": "rollback"} | changes)
    arguments: dict[str, Any] = {"bad": [], "kind": kind}
    dataset = {"python": f"{source}:{data}", "arguments": arguments}
    values["data_stages"][0]["data"] = {"dataset": dataset, "seed": 5, "skip_samples": list(skip)}
    if "tokens__val_check_interval" in changes:
        no_harm = {"python": f"{source}:rows", "arguments": {"bad": [], "kind": kind}}
        values["data_stages"][0]["validation"] = no_harm
        values["tokens"]["limit_val_batches"] = 1
        values["model"]["model_config"]["num_hidden_layers"] = 2  # so few that what validation gathered is still there
    arguments["bad"] = list(bad) if data == "stream" else rows_of(values, bad)
    return values


def rows_of(values: dict[str, Any], samples: Iterable[int]) -> list[int]:
    """Which of the data's rows the samples of these numbers are."""
    values["data_stages"][0]["data"]["skip_samples"], kept = [], values["data_stages"][0]["data"]["skip_samples"]
    feed = Feed(get_config_from_dict(values), Mesh(), device=torch.device("cpu"))
    _, rows = feed._stages[0].stage.locate(np.array(list(samples), dtype=np.int64))
    feed.close()
    values["data_stages"][0]["data"]["skip_samples"] = kept
    return [int(row) for row in rows]


def rollbacks_of(checkpoint: Path) -> Any:
    return json.loads((checkpoint / "state.json").read_text())["rollbacks"]


def first_samples(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["first_sample"] for line in lines]


BAD = 6 * SAMPLES + 3  # of step 7, whatever the layout
LEFT_OUT = [4 * SAMPLES, 7 * SAMPLES]
LAYOUTS: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((1, 1, 1), {}),
    ((1, 1, 1), {"data": "stream", "model__dtype": "bfloat16"}),
    ((2, 1, 1), {"model__dtype": "bfloat16"}),
    ((2, 1, 2), {"data": "stream", "optimizer__zero_stage": 3, "tokens__val_check_interval": 1}),
    ((1, 2, 1), {"model__dtype": "bfloat16", "optimizer__optimizer_factory": {"name": "muon"}}),
]


@pytest.mark.parametrize(("layout", "changes"), LAYOUTS)
def test_a_run_goes_back_and_is_the_one_without_the_samples_read_since_also_resumed(
    pool: Pool, tmp_path: Path, layout: tuple[int, int, int], changes: dict[str, Any]
) -> None:
    world = layout[0] * layout[1] * layout[2]
    bad = {"bad": [BAD], **changes}
    hurt, plain = tmp_path / "hurt", tmp_path / "plain"
    first = poisoned_values(hurt, layout, **bad, tokens__stop_after=8)
    assert set(pool.run(world, poisoned_run, first)) == {codes.DONE}
    record = [{"step": 4, "bad_step": 7, "left_out": {"only": LEFT_OUT}}]
    assert rollbacks_of(hurt / "8") == record
    assert set(pool.run(world, poisoned_run, poisoned_values(hurt, layout, **bad))) == {codes.DONE}
    assert rollbacks_of(hurt / str(STEPS)) == record
    values = poisoned_values(plain, layout, **bad | {"optimizer__on_nan": "stop"}, skip=[LEFT_OUT])
    assert set(pool.run(world, poisoned_run, values)) == {codes.DONE}
    assert metrics_of(hurt) == metrics_of(plain)
    assert first_samples(hurt) == first_samples(plain)
    if changes == {}:  # a release that does not know of rollbacks refuses such a checkpoint
        indices = (json.loads((hurt / step / "index.json").read_text()) for step in ("4", "8"))
        assert [index["version"] for index in indices] == [1, 2]
        said = "\n".join(inspect_checkpoint(str(hurt / "8")))
        assert "rollback     from step 7 to 4, without samples 48 to 83 of only" in said
    assert different(hurt / str(STEPS), plain / str(STEPS)) == []


def test_another_layout_goes_on_without_them(pool: Pool, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    bad = [BAD, 11 * SAMPLES]  # the second of the new step 9
    for folder in (one, other):
        assert poisoned_run(0, 1, poisoned_values(folder, bad=bad, tokens__stop_after=8)) == codes.DONE
    assert poisoned_run(0, 1, poisoned_values(one, bad=bad)) == codes.DONE
    assert pool.run(2, poisoned_run, poisoned_values(other, (2, 1, 1), bad=bad)) == [codes.DONE] * 2
    for folder in (one, other):
        left_out = [rollback["left_out"]["only"] for rollback in rollbacks_of(folder / str(STEPS))]
        assert left_out == [LEFT_OUT, [11 * SAMPLES, 12 * SAMPLES]]
    assert first_samples(other) == first_samples(one)
    losses = [[row["lm_loss"] for row in metrics_of(folder)] for folder in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_it_goes_back_to_the_beginning_and_twice_and_then_stops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [2 * SAMPLES, 4 * SAMPLES, 7 * SAMPLES]  # of step 3, then of the new steps 2 and 3
    lost: list[float] = []
    seconds = trainer.Run.seconds_since_save
    monkeypatch.setattr(trainer.Run, "seconds_since_save", lambda run: lost.append(seconds(run)) or lost[-1])
    values = poisoned_values(tmp_path / "hurt", bad=bad, optimizer__max_rollbacks=2)
    assert poisoned_run(0, 1, values) == codes.STOPPED_BY_NAN
    told = [line for line in caplog.messages if "; back to step" in line]
    assert [line.partition("; ")[2] for line in told] == [
        "back to step 0, without samples 0 to 35 of stage 'only' (rollback 1 of optimizer.max_rollbacks=2)",
        "back to step 0, without samples 0 to 59 of stage 'only' (rollback 2 of optimizer.max_rollbacks=2)",
    ]
    assert told[0].startswith("step 3: loss nan or gradient norm nan is not finite; ")
    assert any(
        "step 3: loss nan" in line and "stopping (optimizer.on_nan: rollback)" in line for line in caplog.messages
    )
    plain = poisoned_values(tmp_path / "plain", bad=bad, skip=[[0, 5 * SAMPLES]], optimizer__on_nan="stop")
    assert poisoned_run(0, 1, plain) == codes.STOPPED_BY_NAN
    kept = [metrics_of(tmp_path / name)[:2] for name in ("hurt", "plain")]
    assert kept[0] == kept[1]
    first, *_ = read_rows(tmp_path / "hurt" / "metrics.jsonl")
    assert (first["rollbacks"], first["rolled_back_from"]) == (2, 2)
    assert first["rollback_lost_s"] == lost[0] + lost[1]
    shares = []
    for instead in ({}, {"rollback_lost_s": 0.0}):  # steps that left no row are lost time all the same
        goodput = Goodput()
        goodput.add(first | instead)
        shares.append(float(str(goodput).partition("%")[0]))
    assert shares[0] < shares[1] == 100.0


def test_a_loss_spike_is_gone_back_from_alike_on_all_ranks_and_told(pool: Pool, tmp_path: Path) -> None:
    bad = range(25 * SAMPLES, 26 * SAMPLES)  # step 26
    changes: dict[str, Any] = {"kind": "spike", "tokens__train_steps": 30, "optimizer__on_spike": "rollback"}
    hurt, plain = tmp_path / "hurt", tmp_path / "plain"
    first = poisoned_values(hurt, (2, 1, 1), bad=bad, **changes, tokens__stop_after=25)
    assert pool.run(2, run, first) == [codes.DONE] * 2  # what was usual is known to a later start
    assert pool.run(2, run, poisoned_values(hurt, (2, 1, 1), bad=bad, **changes)) == [codes.DONE] * 2
    left_out = [25 * SAMPLES, 26 * SAMPLES]
    assert rollbacks_of(hurt / "30") == [{"step": 25, "bad_step": 26, "left_out": {"only": left_out}}]
    values = poisoned_values(plain, (2, 1, 1), bad=bad, **changes | {"optimizer__on_spike": "warn"}, skip=[left_out])
    assert pool.run(2, run, values) == [codes.DONE] * 2
    assert metrics_of(hurt) == metrics_of(plain)
    assert different(hurt / "30", plain / "30") == []
    told = read_run(hurt)
    lost = next(row["rollback_lost_s"] for row in told.rows if "rolled_back_from" in row)
    assert lost > 0
    (line,) = [line for line, bad in health(told) if bad]
    assert line.startswith("rollback 1: from step 26 to 25, ")
    assert "goodput: steps that count" in dict(facts(told))
