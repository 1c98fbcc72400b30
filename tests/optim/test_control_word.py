"""The control word's sections are asked for by name: a further one moves none of the others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nanotron.parallel.mesh import Mesh
from nanotron.training.control import ControlWord


def reduced(rank: int, world: int, vectors: bool) -> tuple[Any, list[float]]:
    mesh = Mesh({"dp": world}, rank)
    mesh.create_groups()
    counts = {"tokens_per_expert": torch.tensor([rank, 10])} if vectors else None
    word = ControlWord(
        torch.tensor(4.5, dtype=torch.float64),
        {"lm": torch.tensor(6.0)} if rank == 0 else {},
        ("lm", "z"),
        counts,
        save=rank == 1,
        stop=False,
    )
    word.reduce(mesh, torch.tensor(2.0, dtype=torch.float64))
    return word.read(), word["tokens_per_expert"].tolist() if vectors else []


@pytest.mark.parametrize("vectors", [False, True])
def test_numbers_flags_and_vectors_are_added_up_over_all_ranks(pool, vectors):
    for outcome, counts in pool.run(2, reduced, vectors):
        assert outcome.losses == {"lm": 3.0, "z": 0.0}
        assert (outcome.grad_norm, outcome.save, outcome.stop) == (3.0, True, False)
        assert counts == ([1, 20] if vectors else [])


@pytest.mark.parametrize("num_targets", [0.0, 2.0])
def test_a_loss_of_0_is_one_only_where_there_are_targets(num_targets):
    zero = torch.zeros((), dtype=torch.float64)
    word = ControlWord(zero, {"lm": zero}, ("lm",), save=False, stop=False)
    word.reduce(Mesh(), zero + num_targets)
    outcome = word.read()
    assert outcome.losses == {"lm": 0.0}
    assert outcome.has_targets == (num_targets > 0)


@pytest.mark.parametrize(("norm", "lm", "inf"), [(1.0, 1.0, 0.0), (math.nan, 1.0, 1.0), (1.0, math.inf, 1.0)])
def test_a_loss_or_gradient_that_is_not_finite_is_found(norm, lm, inf):
    word = ControlWord(
        torch.tensor(norm, dtype=torch.float64), {"lm": torch.tensor(lm)}, ("lm",), save=False, stop=False
    )
    assert float(word.found_inf()) == inf
    assert word.read().finite == (inf == 0)
