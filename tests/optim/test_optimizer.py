"""AdamW and SGD on flat shards against torch's own optimizers, guarded updates, and kernels counted."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.optim.optimizer import SGD, AdamW, Optimizer
from nanotron.parallel.mesh import Mesh
from nanotron.plan.counting import Counting
from tests.optim.toy import ToyChunk, make_buckets, matrix, norm, whole

SPECS = [matrix("layers.0.mlp.down.weight", 7, 5), norm("norm.weight", 7), matrix("head.weight", 9, 7)]
ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def build(rule, dtype=torch.float32, specs=SPECS, home=None):
    """Everything updated by one rule but what names another, ``"sgd"``."""
    chunk = ToyChunk(specs, Mesh(), dtype)
    buckets = make_buckets(chunk, Mesh())
    return chunk, buckets, Optimizer(buckets, {"adamW": rule, "sgd": SGD()}, home=home)


def give(chunk, buckets, step: int) -> None:
    buckets.start(microbatches=1, sequence_length=8)
    for name, spec in chunk.specs.items():
        chunk.contribute(name, whole(spec, seed=10 * step))
    buckets.finish()


def references(chunk) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(weight.detach().clone()) for weight in chunk.weights.values()]


def groups(params, chunk):
    decays = [spec.decay for spec in chunk.specs.values()]
    return [
        {"params": [param], "weight_decay": 0.1 if decay else 0.0} for param, decay in zip(params, decays, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_updates_equal_torchs_optimizer(kind, dtype):
    chunk, buckets, optimizer = build(AdamW(**ADAM) if kind == "adamw" else SGD(), dtype)
    params = references(chunk)
    if kind == "adamw":
        reference = torch.optim.AdamW(groups(params, chunk), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    else:
        reference = torch.optim.SGD(groups(params, chunk), lr=1e-2)
    for step in range(1, 6):
        give(chunk, buckets, step)
        optimizer.step(1e-2, torch.tensor(2.0, dtype=torch.float64), torch.tensor(0.0))
        for param, spec in zip(params, chunk.specs.values(), strict=True):
            param.grad = whole(spec, seed=10 * step).to(dtype) / 2
        reference.step()
    for weight, param in zip(chunk.weights.values(), params, strict=True):
        torch.testing.assert_close(weight.data, param.data, rtol=1e-6, atol=1e-7)


def test_each_parameter_has_its_groups_learning_rate_weight_decay_and_rule():
    """Against a torch optimizer for each."""
    settings = {"a": (1.0, 0.1, "adamW"), "b": (0.5, 0.3, "adamW"), "c": (0.5, 0.3, "sgd"), "d": (0.0, 0.1, "sgd")}
    specs = [
        matrix(f"layers.0.{name}.weight", 7, 5, lr_scale=scale, weight_decay=decay, optimizer=rule)
        for name, (scale, decay, rule) in settings.items()
    ]
    chunk, buckets, optimizer = build(AdamW(**ADAM), specs=specs)
    before = [weight.data.clone() for weight in chunk.weights.values()]
    params = references(chunk)
    others = [
        torch.optim.AdamW([param], lr=1e-2 * scale, betas=(0.9, 0.95), weight_decay=decay)
        if rule == "adamW"
        else torch.optim.SGD([param], lr=1e-2 * scale, weight_decay=decay)
        for param, (scale, decay, rule) in zip(params, settings.values(), strict=True)
    ]
    for step in range(1, 4):
        give(chunk, buckets, step)
        optimizer.step(1e-2, torch.tensor(1.0), torch.tensor(0.0))
        for param, spec, other in zip(params, specs, others, strict=True):
            param.grad = whole(spec, seed=10 * step)
            other.step()
    for weight, param in zip(chunk.weights.values(), params, strict=True):
        torch.testing.assert_close(weight.data, param.data, rtol=1e-6, atol=1e-7)
    assert torch.equal(chunk.weights["layers.0.d.weight"].data, before[-1])
    assert {entry.spec.name for entry in optimizer.state()} == {
        "layers.0.a.weight",
        "layers.0.b.weight",
    }  # SGD keeps nothing


def test_an_update_with_found_inf_changes_nothing():
    chunk, buckets, optimizer = build(AdamW(**ADAM), torch.bfloat16)
    give(chunk, buckets, step=1)
    optimizer.step(1e-2, torch.tensor(1.0), torch.tensor(0.0))
    before = [entry.tensor.clone() for entry in optimizer.state()] + [w.data.clone() for w in chunk.weights.values()]
    give(chunk, buckets, step=2)
    buckets.all[0].grads[0] = float("nan")
    optimizer.step(1e-2, torch.tensor(float("nan")), torch.tensor(1.0))
    after = [entry.tensor for entry in optimizer.state()] + [w.data for w in chunk.weights.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert float(optimizer.updates) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_follows_the_weights_and_stands_in_for_them(dtype):
    chunk = ToyChunk(SPECS, Mesh(), dtype)
    buckets = make_buckets(chunk, Mesh())
    optimizer = Optimizer(buckets, {"adamW": AdamW(**ADAM)}, ema_decay=0.75)
    optimizer.load_masters_from_weights()

    def read(kind):
        return {entry.spec.name: entry.tensor for entry in optimizer.state() if entry.kind == kind}

    expected = {name: weight.detach().float().clone() for name, weight in chunk.weights.items()}
    assert all(torch.equal(average, expected[name]) for name, average in read("ema").items())
    for step, found_inf in ((1, 0.0), (2, 1.0), (3, 0.0)):
        give(chunk, buckets, step)
        optimizer.step(1e-2, torch.tensor(1.0), torch.tensor(found_inf))
        masters = read("master") or {name: weight.detach() for name, weight in chunk.weights.items()}
        if not found_inf:
            expected = {name: 0.75 * average + 0.25 * masters[name] for name, average in expected.items()}
    averages, weights = read("ema"), {name: weight.detach().clone() for name, weight in chunk.weights.items()}
    for name, average in averages.items():
        torch.testing.assert_close(average, expected[name])
    with optimizer.averaged():
        assert all(torch.equal(weight, averages[name].to(dtype)) for name, weight in chunk.weights.items())
    assert all(torch.equal(weight, weights[name]) for name, weight in chunk.weights.items())
    assert not any(torch.equal(weights[name], averages[name].to(dtype)) for name in weights)


def test_half_precision_keeps_a_master_copy_that_small_updates_do_not_vanish_from():
    chunk, buckets, optimizer = build(SGD(), torch.bfloat16, specs=[norm("norm.weight", 4)])
    start = chunk.weights["norm.weight"].detach().float()
    for _ in range(100):
        buckets.start(microbatches=1, sequence_length=8)
        chunk.contribute("norm.weight", torch.full((4,), 0.01))
        buckets.finish()
        optimizer.step(1e-2, torch.tensor(1.0), torch.tensor(0.0))
    (master,) = [entry.tensor for entry in optimizer.state() if entry.kind == "master"]
    torch.testing.assert_close(master, start - 0.01, rtol=0, atol=5e-6)  # 100 roundings
    torch.testing.assert_close(chunk.weights["norm.weight"].data, master.bfloat16())


class Kernels(TorchDispatchMode):
    """Counts the operators that run."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def kernels_of_one_step(num_layers: int) -> int:
    specs = [matrix(f"layers.{i}.mlp.down.weight", 3, 5) for i in range(num_layers)]
    chunk, buckets, optimizer = build(AdamW(**ADAM), specs=specs)
    assert len(buckets.all) == 1
    give(chunk, buckets, step=1)
    with Kernels() as kernels:
        optimizer.step(1e-2, torch.tensor(1.0), torch.tensor(0.0))
    return kernels.count


def test_kernels_of_an_update_do_not_grow_with_the_number_of_parameters():
    assert kernels_of_one_step(2) == kernels_of_one_step(20) <= 12


def test_gradients_of_half_precision_are_copied_bucket_by_bucket():
    with Counting() as counter:
        chunk = ToyChunk([matrix(f"layers.{i}.mlp.down.weight", 64, 64) for i in range(8)], Mesh(), torch.bfloat16)
        buckets = make_buckets(chunk, Mesh(), grad_dtype=lambda dtype: dtype, cap_bytes=1)
        optimizer = Optimizer(buckets, {"adamW": AdamW(**ADAM)})
        before = counter.alive
        with counter.section():
            optimizer.step(1e-2, torch.tensor(1.0), torch.tensor(0.0))
    assert len(buckets.all) == 8
    copy = 4 * 64 * 64  # bytes
    assert copy <= counter.peak - before < 2 * copy


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 12), (torch.float32, 8), (torch.float64, 16)], ids=str)
def test_state_kept_in_host_memory_makes_the_same_update(monkeypatch, dtype, size):
    """``cpu:0`` is another place than ``cpu``: what goes to it and comes back is copied."""
    kept: list[int] = []
    monkeypatch.setattr(
        "nanotron.optim.optimizer.host_memory",
        lambda size, kinds: kept.append(size) or torch.empty(size, dtype=torch.uint8),
    )
    here, there = (build(AdamW(**ADAM), dtype, home=home) for home in (None, torch.device("cpu", 0)))
    for chunk, buckets, optimizer in (here, there):
        for step in (1, 2, 3):
            give(chunk, buckets, step)
            optimizer.step(1e-2, torch.tensor(2.0, dtype=torch.float64), torch.tensor(float(step == 2)))
    for mine, theirs in zip(here[0].weights.values(), there[0].weights.values(), strict=True):
        assert torch.equal(mine.data, theirs.data)
    states = [{(kind, spec.name): tensor for kind, spec, _, tensor, _ in found[2].state()} for found in (here, there)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert sum(kept) == size * sum(bucket.numel for bucket in there[1].all)
    assert float(there[2].updates) == 2
