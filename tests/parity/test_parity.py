"""The layout changes nothing but speed and memory: every layout's numbers are one device's.

A selection in which every pair of options occurs, for a few steps; all layouts, for more, are `make parity`.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nanotron.ops.weight_grads import Accumulate, WeightGrads
from nanotron.pipeline.transport import Parcel
from tests.models.tiny import gradient_errors
from tests.parity.cases import FIRST_STEPS, ROWS, STEPS, Case, every_case
from tests.parity.compare import difference
from tests.parity.faults import train_with_fault
from tests.parity.run import Record, Trained, record, train
from tests.parity.selection import pairs_of, selection
from tests.pool import Pool


class References:
    """The runs on one device that others are compared with, each made once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._found: dict[Case, Record] = {}

    def of(self, case: Case) -> Record:
        one_device = case.same_numbers()
        if one_device not in self._found:
            self._found[one_device] = record(self._pool, one_device)
        return self._found[one_device]


@pytest.fixture(scope="session")
def references(pool: Pool) -> References:
    return References(pool)


def test_the_selection_has_every_pair_that_any_layout_has() -> None:
    selected = {pair for case in selection() for pair in pairs_of(case)}
    missing = {pair for case in every_case() for pair in pairs_of(case)} - selected
    assert not missing, [sorted(pair, key=str) for pair in missing]


@pytest.mark.parametrize(("steps", "learnt"), [(FIRST_STEPS, 0.05), (STEPS, 1.0)])
def test_one_device_learns_so_that_later_steps_depend_on_earlier_updates(
    references: References, steps: int, learnt: float
) -> None:
    losses = references.of(Case(steps=steps)).lm_loss
    assert losses[-1] < losses[0] - learnt


@pytest.mark.parametrize("case", selection(), ids=str)
def test_layout_has_the_losses_norms_and_gradients_of_one_device(
    pool: Pool, references: References, case: Case
) -> None:
    case = replace(case, steps=FIRST_STEPS)
    assert not difference(record(pool, case), references.of(case)).problems(case)


def train_hastily(rank: int, world: int, case: Case) -> Trained:
    """The same, but what a rank waits for seems at random to be there: it leaves weight gradients for later."""
    dice = random.Random(rank)
    with mock.patch.object(Parcel, "is_done", side_effect=lambda: dice.random() < 0.5):
        return train(rank, world, case)


@pytest.mark.parametrize("options", [{"ep": 2, "zero_stage": 1}, {"zero_stage": 3}], ids=str)
def test_weight_gradients_of_experts_may_come_at_any_time(
    pool: Pool, references: References, options: dict[str, int]
) -> None:
    """The exchange between replicas and the gradient buckets of what is not cut over them join the same ranks; so do
    the gradients of all blocks, each after every microbatch.
    """
    case = Case(dp=2, pp=3, layers=6, experts=8, schedule="zbv", rows=1, dtype="float64", steps=2, **options)
    assert not difference(record(pool, case, train_hastily), references.of(case)).problems(case)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_muon_moves_weights_as_one_device_where_copies_of_the_shards_are(
    pool: Pool, references: References, zero_stage: int
) -> None:
    case = Case(dp=4, dp_shard=2, rows=1, layers=2, optimizer="muon", zero_stage=zero_stage, dtype="float64", steps=3)
    found, expected = record(pool, case), references.of(case)
    assert not difference(found, expected).problems(case)
    errors = gradient_errors(found.weights, expected.weights)
    assert max(errors.values()) < 1e-9, errors


def test_one_large_microbatch_equals_many_small_ones(pool: Pool, references: References) -> None:
    for size in (12, 3, 1):
        case = Case(rows=size, dtype="float64", steps=FIRST_STEPS)
        assert not difference(record(pool, case), references.of(case)).problems(case)


def train_adding_to_zeros(rank: int, world: int, case: Case) -> Trained:
    """The same, but no gradient writes over what is left of the last step: zeros do."""
    add_now = WeightGrads.add_now

    def add_to_zeros(self: WeightGrads, weight: Tensor, accumulate: Accumulate) -> None:
        def after_zeros(buffer: Tensor, first: bool) -> None:
            if first:
                buffer.zero_()
            accumulate(buffer, False)

        add_now(self, weight, after_zeros)

    with mock.patch.object(WeightGrads, "add_now", add_to_zeros):
        return train(rank, world, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(experts=8, router="shared", family="qwen2", loss_chunk=7, tied=True),
        Case(dp=2, pp=2, tied=True, rows=1, zero_stage=2, layers=2, dtype="bfloat16"),
        Case(dp=2, rows=1, zero_stage=3, layers=2, accumulate_in_fp32=False, dtype="bfloat16"),
    ],
    ids=str,
)
def test_the_first_gradient_of_a_step_writes_the_bits_of_a_sum_with_zero(pool: Pool, case: Case) -> None:
    case = replace(case, steps=2)
    found, expected = record(pool, case), record(pool, case, train_adding_to_zeros)
    assert (found.losses, found.grad_norm) == (expected.losses, expected.grad_norm)
    assert all(torch.equal(grad, expected.first_grads[name]) for name, grad in found.first_grads.items())
    assert all(torch.equal(weight, expected.weights[name]) for name, weight in found.weights.items())


@pytest.mark.parametrize("dp", [3, 4])
def test_tied_copies_are_equal_in_every_bit_after_many_steps(pool: Pool, dp: int) -> None:
    case = Case(dp=dp, pp=2, tied=True, zero_stage=1, rows=ROWS // dp, layers=2, length=8, steps=50)
    found = record(pool, case)  # which refuses copies that differ
    assert "head.weight" not in found.weights


def test_bfloat16_is_closer_to_float32_when_gradients_accumulate_in_float32(pool: Pool, references: References) -> None:
    exact = references.of(Case(steps=FIRST_STEPS))
    errors = []
    for in_fp32 in (True, False):
        case = Case(dtype="bfloat16", accumulate_in_fp32=in_fp32, rows=1, steps=FIRST_STEPS)
        run = record(pool, case)
        squares = [(run.first_grads[name].double() - grad).square().sum() for name, grad in exact.first_grads.items()]
        errors.append((float(torch.stack(squares).sum().sqrt()), abs(run.lm_loss[-1] - exact.lm_loss[-1])))
    (with_gradients, with_loss), (without_gradients, without_loss) = errors
    assert with_gradients < without_gradients
    assert with_loss < 0.05
    assert without_loss < 0.2


@pytest.mark.parametrize(("gap", "problems"), [(5e-7, 0), (2e-6, 1)])
def test_a_flipped_route_ends_the_comparison_and_must_be_a_near_tie(gap: float, problems: int) -> None:
    case, grads = Case(experts=2), {"w": torch.ones(2)}
    even, flipped = [[4.0, 4.0], [4.0, 4.0]], [[4.0, 4.0], [3.0, 5.0]]
    far, near = [0.1, 0.1], [0.1, gap]
    one = Record({"lm": [3.0, 2.0, 1.0]}, [1.0] * 3, [even] * 3, [far, near, far], grads, {})
    other = Record({"lm": [3.0, 2.5, 1.5]}, [1.0] * 3, [even, flipped, even], [far, near, far], grads, {})
    found = difference(other, one).problems(case)
    assert len(found) == problems
    assert all("load of sparse layer 1 in step 2 differs: its closest choice has a gap of 2.0e-06" in x for x in found)
    assert difference(replace(other, loads=one.loads), one).problems(case), (
        "losses count as long as routes are the same"
    )


EXPERTS: dict[str, Any] = {"experts": 8, "layers": 2, "dtype": "float64"}


@pytest.mark.parametrize(
    ("name", "case", "culprit"),
    [
        ("input gradients not summed over tp", Case(tp=2), r"layers\.0\.attn_norm"),
        ("gathered input's gradient not summed", Case(tp=2, tp_mode="REDUCE_SCATTER"), r"first gradient of layers\."),
        ("partial and tied gradients not summed", Case(tp=2, tp_mode="REDUCE_SCATTER"), r"norm\.weight"),
        ("partial and tied gradients not summed", Case(pp=2, tied=True), r"embed\.weight"),
        ("replicas averaged", Case(dp=2), "first gradient of"),
        ("router gradients not summed over tp", Case(tp=2, tp_mode="REDUCE_SCATTER", **EXPERTS), r"router\.weight"),
        ("weights of tp's other experts without gradient", Case(tp=2, **EXPERTS), r"layers\.\d\.(mlp\.router|attn)"),
        ("expert gradients summed over all replicas", Case(dp=2, ep=2, **EXPERTS), r"experts\.(gate_up|down)\.weight"),
        ("counts of a row not summed", Case(cp=2, **EXPERTS), "balance loss of step 1 differs"),
        ("gradients of rows returned in the numbers sent", Case(dp=2, ep=2, **EXPERTS), r"first gradient of layers\."),
        (
            "tokens sent once for each of their experts",
            Case(dp=2, ep=2, **EXPERTS),
            "load of sparse layer 1 in step 1 differs",
        ),
        ("tokens counted by every tp rank", Case(tp=2, **EXPERTS), "load of sparse layer 0 in step 1 differs"),
    ],
)
def test_a_wrong_collective_is_caught_and_the_parameter_named(
    pool: Pool, references: References, name: str, case: Case, culprit: str
) -> None:
    case = replace(case, steps=1)
    reference = references.of(case)
    try:
        problems = difference(record(pool, case, train_with_fault, name), reference).problems(case)
    except AssertionError as copies_differ:
        problems = [str(copies_differ)]
    assert re.search(culprit, "\n".join(problems)), problems
