"""Muon: the update of whole matrices, the same on every layout; owners, traffic and work counted."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch

from nanotron.optim import owners
from nanotron.optim.muon import Muon, newton_schulz, newton_schulz_flops
from nanotron.optim.optimizer import SGD, Optimizer
from nanotron.optim.owners import Matrix, deal
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import Box
from nanotron.plan.counting import Counting
from tests.optim.toy import ToyChunk, make_buckets, matrix, norm, whole

SETTINGS: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "ns_steps": 5, "scale": "match_rms"}
LR, DECAY = 0.02, 0.1


def muon(name: str, *shape: int, **facts: Any):
    return matrix(name, *shape, optimizer="muon", weight_decay=DECAY, **facts)


SPECS = [
    muon("layers.0.q.weight", 8, 6, shard=(("tp", 0),)),
    muon("layers.0.kv.weight", 2, 4, 6, shard=(("tp_kv", 1),)),
    muon("layers.0.out.weight", 6, 8, shard=(("tp", 1),), lr_scale=0.5),
    muon("layers.0.down.weight", 5, 7),  # on every rank
    muon("layers.0.experts.weight", 4, 2, 3, 5, shard=(("ep", 0), ("tp", 0))),
    norm("layers.0.norm.weight", 6, optimizer="sgd"),
]


def build(mesh: Mesh, zero_stage: int = 1, dtype: torch.dtype = torch.float64, **settings: Any):
    chunk = ToyChunk(SPECS, mesh, dtype)
    buckets = make_buckets(chunk, mesh, zero_stage=zero_stage, grad_dtype=lambda dtype: dtype, cap_bytes=500)
    rule = Muon(mesh, ns_dtype=dtype, **{**SETTINGS, **settings})
    return chunk, buckets, Optimizer(buckets, {"muon": rule, "sgd": SGD()}), rule


def update(chunk: ToyChunk, buckets, optimizer: Optimizer, mesh: Mesh, step: int, *, found_inf: float = 0.0) -> None:
    """One update whose gradients, summed over the ranks that see other tokens, are ``whole(spec, step)``."""
    buckets.start(microbatches=1, sequence_length=8)
    for name, spec in reversed(chunk.specs.items()):
        addends = prod(mesh.size(axis) for axis in spec.reduce_axes(mesh))
        grad = whole(spec, seed=step)[spec.local_box(mesh).slices()]
        chunk.contribute(name, grad.to(chunk.weights[name].dtype) / addends)
    buckets.finish()
    optimizer.step(LR, torch.tensor(2.0, dtype=torch.float64), torch.tensor(found_inf))
    buckets.start_gather()
    buckets.wait_gather()


def matrices_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor[index] for index in product(*(range(length) for length in tensor.shape[:-2]))]


def reference(steps: int, *, nesterov: bool = True, scale: str = "match_rms") -> dict[str, torch.Tensor]:
    """The weights after some updates of every whole matrix by itself."""
    weights = {spec.name: whole(spec, seed=1).double() for spec in SPECS}
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step in range(1, steps + 1):
        for spec in SPECS[:-1]:
            grad, momentum = whole(spec, seed=step).double() / 2, momenta[spec.name]
            momentum.mul_(0.9).add_(grad, alpha=0.1)
            direction = 0.9 * momentum + 0.1 * grad if nesterov else momentum
            lr = LR * spec.lr_scale
            for weight, part in zip(matrices_of(weights[spec.name]), matrices_of(direction), strict=True):
                x = part / part.norm()
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                factor = 0.2 * max(x.shape) ** 0.5 if scale == "match_rms" else max(1, x.shape[0] / x.shape[1]) ** 0.5
                weight.mul_(1 - lr * DECAY).sub_(lr * factor * x)
    return weights


def run_on_rank(rank: int, world: int, axes: dict[str, Any], zero_stage: int, **settings: Any):
    """(name, box, weight) of this rank after three updates, and the owner of each matrix."""
    mesh = Mesh(axes, rank)
    if world > 1:
        mesh.create_groups([("edp",)] if "edp" in mesh.parts("dp") else (), owners=True)
    chunk, buckets, optimizer, rule = build(mesh, zero_stage, **settings)
    for step in (1, 2, 3):
        update(chunk, buckets, optimizer, mesh, step)
    weights = [(spec.name, box, view.clone()) for spec, box, view, _ in buckets.weights() if spec.optimizer == "muon"]
    return weights, rule._owners.owner


LAYOUTS: list[dict[str, Any]] = [
    {"dp": 3},
    {"tp": {"tp_kv": 2, "tp_rep": 1}},
    {"dp": 2, "tp": {"tp_kv": 1, "tp_rep": 2}},
    {"cp": 2, "dp": 2},
    {"dp": {"edp": 2, "ep": 2}},
    {"dp": {"dp_copies": 2, "dp_shard": 2}},
    {"dp": {"edp": 1, "ep": 2}, "tp": {"tp_kv": 2, "tp_rep": 1}},
]


def sizes(axes: dict[str, Any]) -> int:
    return prod(prod(size.values()) if isinstance(size, dict) else size for size in axes.values())


@pytest.mark.parametrize("settings", [{}, {"nesterov": False, "scale": "spectral"}], ids=str)
def test_one_device_updates_each_matrix_by_itself(settings: dict[str, Any]) -> None:
    expected = reference(3, **settings)
    for name, box, weight in run_on_rank(0, 1, {}, 1, **settings)[0]:
        torch.testing.assert_close(weight, expected[name][box.slices()], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_every_layout_and_zero_stage_updates_whole_matrices(pool, axes: dict[str, Any], zero_stage: int) -> None:
    expected = reference(3)
    results = pool.run(sizes(axes), run_on_rank, axes, zero_stage)
    for weights, owner in results:
        assert owner == results[0][1]
        for name, box, weight in weights:
            torch.testing.assert_close(weight, expected[name][box.slices()], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("nesterov", "alike"), [(True, True), (False, False)])
def test_updates_are_torchs_own_within_its_bfloat16(nesterov: bool, alike: bool) -> None:
    """Three steps of torch.optim.Muon, which looks ahead and iterates in bfloat16, on each matrix."""
    mesh = Mesh()
    chunk, buckets, optimizer, _ = build(mesh, dtype=torch.float32, nesterov=nesterov)
    params = {
        name: [torch.nn.Parameter(part) for part in matrices_of(weight.detach().clone())]
        for name, weight in list(chunk.weights.items())[:-1]
    }
    others = [
        torch.optim.Muon(of_one, LR * chunk.specs[name].lr_scale, DECAY, momentum=0.9, adjust_lr_fn="match_rms_adamw")
        for name, of_one in params.items()
    ]
    for step in (1, 2, 3):
        update(chunk, buckets, optimizer, mesh, step)
        for (name, of_one), other in zip(params.items(), others, strict=True):
            for param, grad in zip(of_one, matrices_of(whole(chunk.specs[name], seed=step) / 2), strict=True):
                param.grad = grad
            other.step()
    for name, of_one in params.items():
        start = matrices_of(whole(chunk.specs[name], seed=1))
        for weight, param, before in zip(matrices_of(chunk.weights[name].data), of_one, start, strict=True):
            error = (weight - param.detach()).norm() / (weight - before).norm()
            assert (float(error) < 0.03) == alike


def test_an_update_with_found_inf_changes_nothing() -> None:
    mesh = Mesh()
    chunk, buckets, optimizer, _ = build(mesh)
    update(chunk, buckets, optimizer, mesh, 1)
    kept = [*(entry.tensor for entry in optimizer.state()), *(weight.data for weight in chunk.weights.values())]
    before = [tensor.clone() for tensor in kept]
    with mock.patch("tests.optim.test_muon.whole", lambda spec, seed: torch.full(spec.shape, torch.nan)):
        update(chunk, buckets, optimizer, mesh, 2, found_inf=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))


def traffic_on_rank(rank: int, world: int) -> list[tuple[int, int]]:
    """(elements sent, elements received) of each all-to-all of the second step."""
    mesh = Mesh({"dp": world}, rank)
    mesh.create_groups(owners=True)
    chunk, buckets, optimizer, _ = build(mesh)
    update(chunk, buckets, optimizer, mesh, 1)
    calls, send = [], owners.all_to_all_rows

    def count(x, group, sent, received):
        calls.append((sum(sent), sum(received)))
        return send(x, group, sent, received)

    with mock.patch.object(owners, "all_to_all_rows", count):
        update(chunk, buckets, optimizer, mesh, 2)
    return calls


def test_a_step_takes_two_all_to_alls_that_carry_each_element_once(pool) -> None:
    results = pool.run(2, traffic_on_rank)
    elements = sum(spec.numel for spec in SPECS[:-1])
    for calls in results:
        assert len(calls) == 2
    for there, back in zip(*results, strict=True):
        assert there[0] + back[0] == there[1] + back[1] == elements


def test_work_is_dealt_out_by_its_cost() -> None:
    shapes = [(64, 64)] * 8 + [(128, 64)] * 8 + [(64, 32)] * 8 + [(256, 64)]

    def cost(shape: tuple[int, int]) -> int:
        return newton_schulz_flops(shape, 5)

    matrices = [Matrix(shape, "w", (index,)) for index, shape in enumerate(shapes)]
    owner = deal(matrices, 4, cost)
    assert set(owner) == set(matrices)
    load = [sum(cost(matrix.shape) for matrix in matrices if owner[matrix] == rank) for rank in range(4)]
    assert max(load) < 1.06 * sum(load) / 4
    assert deal(reversed(matrices), 4, cost) == owner  # whatever order they come in


@pytest.mark.parametrize("shape", [(3, 8, 5), (2, 5, 8), (1, 4, 4)])
def test_work_is_counted_and_leads_to_orthogonal_matrices(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with Counting() as counter:
        y = newton_schulz(x, 5)
    assert counter.work["matmul"] == shape[0] * newton_schulz_flops(shape[1:], 5)
    values = torch.linalg.svdvals(y)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.25
    assert float((y * x).sum()) > 0
    assert not newton_schulz(torch.zeros(shape), 5).any()


def test_boxes_that_a_rank_holds_are_cut_at_matrices() -> None:
    spec = SPECS[4]
    view = torch.arange(2 * 1 * 2 * 5).view(2, 1, 2, 5)
    parts = list(owners.parts_of([(spec, Box((1, 1, 1, 0), (2, 1, 2, 5)), view)]))
    assert [matrix.which for (matrix, _), _ in parts] == [(1, 1), (2, 1)]
    assert {box for (_, box), _ in parts} == {Box((1, 0), (2, 5))}
    assert torch.equal(parts[1][1], view[1, 0])
