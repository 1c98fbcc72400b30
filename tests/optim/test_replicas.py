"""Silent corruption: one flipped bit of what replicas hold copies of is found, named, and never saved."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nanotron.checkpoint.resume import newest_complete
from nanotron.data.feed import Feed
from nanotron.launch import codes
from nanotron.parallel.mesh import Mesh
from nanotron.training.replicas import MOMENTS, SECTION, WEIGHTS, Difference, checksum
from nanotron.training.step import Training
from nanotron.training.topology import mesh_axes
from tests.checkpoint.runs import run, values_of
from tests.parity.cases import Case
from tests.parity.run import config_of, prepare
from tests.pool import Pool
from tests.structure.counters import Collectives

CHECKED = 2  # the step in which replicas are compared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("length", [1, 7, 16])
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype, length: int) -> None:
    flat = torch.zeros(length, dtype=dtype)
    flat[0] = torch.nan
    for bit in range(8 * flat.element_size()):
        flipped = flat.clone()
        flip(flipped, -1, bit)
        assert checksum(flipped) != checksum(flat), bit


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Change one bit of an element."""
    element %= tensor.numel()
    data = tensor.detach().view(-1).view(torch.uint8)
    data[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8


def damage(training: Training, what: str, bit: int = 12) -> None:
    """Flip a bit of what this rank holds, as far from the shard that it updates itself as can be."""
    matrices = [bucket for bucket in training.buckets.all if any(len(slot.spec.shape) > 1 for slot in bucket.slots)]
    vectors = [bucket for bucket in training.buckets.all if bucket not in matrices]
    if what == "weight":
        flat = matrices[0].weights if matrices[0].weights is not None else matrices[0].weight_shard
        flip(flat, 0 if matrices[0].shard.start else matrices[0].slots[-1].start, bit)
    elif what == "vector":
        assert vectors[0].weights is not None
        flip(vectors[0].weights, 0 if vectors[0].shard.start else vectors[0].slots[-1].box.numel - 1, bit)
    elif what == "expert":
        flip(next(slot.weight for bucket in matrices for slot in bucket.slots if slot.spec.is_of_experts), 0, bit)
    elif what == "bias":
        flip(next(iter(training.balance.state())).tensor, 0, bit)
    else:
        flip(next(flat for kind, bucket, flat in training.optimizer.flat_state() if kind == what), 0, bit)


def steps(rank: int, world: int, case: Case, damaged: int | None, what: str) -> tuple[Any, ...]:
    """What each step's word tells of replicas, what a look before a save does, and each step's collectives."""
    config = config_of(case)
    config = replace(config, general=replace(config.general, replica_check_interval=CHECKED))
    mesh = Mesh(mesh_axes(config), rank)
    training = prepare(config, mesh)
    feed = Feed(config, mesh, device=torch.device("cpu"))
    told, calls = [], []
    for update in (1, 2):
        microbatches = feed.step(update).microbatches
        if rank == damaged and update == CHECKED:
            training.buckets.wait_gather()
            with mock.patch.object(training.replicas, "_rows", after(training, what, training.replicas._rows)):
                outcome = training.step(update, microbatches).read()
        else:
            with Collectives() as collectives:
                outcome = training.step(update, microbatches).read()
            calls.append(collectives.calls)
        told.append(training.replicas.differences(outcome.vectors.get(SECTION, ())))
    feed.close()
    if rank == damaged:
        training.buckets.wait_gather()
        damage(training, what, bit=13)  # else it might be the first flip's undoing
    return told, training.replicas.compare(), calls


def after(training: Training, what: str, rows: Any) -> Any:
    """``rows`` once something has befallen this rank while the step went on."""

    def damaged() -> Tensor:
        damage(training, what)
        return rows()

    return damaged


BASE: dict[str, Any] = {"layers": 2, "rows": 1}
EXPERTS: dict[str, Any] = {**BASE, "experts": 8, "router": "grouped", "dp": 4, "ep": 2}


@pytest.mark.parametrize(
    ("case", "damaged", "what", "expected"),
    [
        (Case(dp=2, **BASE), 1, "weight", Difference(WEIGHTS, (0, 1), ())),
        (Case(dp=3, **BASE), 2, "weight", Difference(WEIGHTS, (2,), (0, 1))),
        (Case(dp=3, **BASE), 0, "exp_avg_sq", Difference(MOMENTS, (0,), (1, 2))),
        (Case(dp=3, dtype="bfloat16", **BASE), 1, "master", Difference(MOMENTS, (1,), (0, 2))),
        (Case(dp=3, zero_stage=1, **BASE), 1, "weight", Difference(WEIGHTS, (1,), (0, 2))),
        (Case(dp=3, zero_stage=2, **BASE), 1, "weight", Difference(WEIGHTS, (1,), (0, 2))),
        (Case(dp=3, zero_stage=3, **BASE), 1, "vector", Difference(WEIGHTS, (1,), (0, 2))),
        (Case(dp=4, dp_shard=2, zero_stage=3, **BASE), 1, "weight", Difference(WEIGHTS, (1, 3), ())),
        (Case(dp=4, dp_shard=2, zero_stage=2, **BASE), 1, "exp_avg", Difference(MOMENTS, (1, 3), ())),
        (Case(dp=6, dp_shard=2, zero_stage=3, **BASE), 2, "exp_avg", Difference(MOMENTS, (2,), (0, 4))),
        (Case(dp=2, cp=2, zero_stage=1, **BASE), 3, "weight", Difference(WEIGHTS, (3,), (0, 1, 2))),
        (Case(dp=3, tp=2, zero_stage=1, **BASE), 3, "weight", Difference(WEIGHTS, (3,), (1, 5))),
        (Case(dp=2, pp=2, layers=2), 2, "weight", Difference(WEIGHTS, (2, 3), ())),
        (Case(**EXPERTS), 1, "expert", Difference(WEIGHTS, (1, 3), ())),
        (Case(**EXPERTS), 3, "bias", Difference(WEIGHTS, (3,), (0, 1, 2))),
    ],
    ids=str,
)
def test_a_flipped_bit_is_found_and_its_rank_named(
    pool: Pool, case: Case, damaged: int, what: str, expected: Difference
) -> None:
    for told, before_save, _ in pool.run(case.world, steps, case, damaged, what):
        assert told == [[], [expected]]
        assert expected in before_save


def test_a_step_that_compares_makes_no_further_collective(pool: Pool) -> None:
    case = Case(dp=2, tp=2, zero_stage=1, layers=2)
    for told, before_save, (first, second) in pool.run(4, steps, case, None, ""):
        assert (told, before_save) == ([[], []], [])
        assert first == second


def run_with_damage(rank: int, world: int, values: dict[str, Any], at: int, what: str) -> tuple[int, list[str]]:
    """A run in which a bit of rank 1 flips after a step."""
    step, said = Training.step, []

    def damaging(self: Training, update: int, *args: Any, **wishes: bool) -> Any:
        word = step(self, update, *args, **wishes)
        if rank == 1 and update == at:
            damage(self, what)
        return word

    with (
        mock.patch.object(Training, "step", damaging),
        mock.patch("nanotron.training.trainer.logger.error", said.append),
    ):
        return run(rank, world, values), said


@pytest.mark.parametrize(
    ("interval", "at", "saved"),
    [(1, 5, 4), (3, 4, None), (100, 4, None), (100, 5, 4), (100, 7, 4)],
    ids=str,
)
def test_a_corrupt_state_is_never_saved_and_the_last_checkpoint_stays(
    pool: Pool, tmp_path: Path, interval: int, at: int, saved: int | None
) -> None:
    values = values_of(tmp_path, (3, 1, 1), optimizer__zero_stage=0, general__replica_check_interval=interval)
    ended = pool.run(3, run_with_damage, values, at, "exp_avg")
    assert [code for code, _ in ended] == [codes.REPLICAS_DIFFER] * 3
    newest = newest_complete(str(tmp_path))
    assert (newest and int(Path(newest).name)) == saved
    *found, advice = ended[0][1]
    line = rf"step \d: the {MOMENTS} of rank 1 on \S+ \(dp 1\) are not those of ranks 0, 2, which have copies"
    assert any(re.fullmatch(line, told) for told in found), found
    assert advice.endswith("stopping without a save")
    assert ended[1][1] == ended[2][1] == [], "said once"


def test_a_run_that_compares_nothing_saves_what_is_corrupt(pool: Pool, tmp_path: Path) -> None:
    values = values_of(tmp_path, (3, 1, 1), optimizer__zero_stage=0, general__replica_check_interval=None)
    assert [code for code, _ in pool.run(3, run_with_damage, values, 4, "exp_avg")] == [codes.DONE] * 3
