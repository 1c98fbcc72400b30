"""One chunk of the model on any layout: the same weights, logits, losses and gradients as on one device."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from nanotron.batch import IGNORED_LABEL, Batch, document_spans
from nanotron.models.decoder import ChunkOptions, DecoderChunk
from nanotron.models.specs import StageModules, decoder_specs
from nanotron.ops.recompute import Recompute
from nanotron.parallel.comm import all_reduce
from nanotron.parallel.mesh import Mesh, training_axes
from nanotron.parallel.params import Box
from tests.models.tiny import (
    VOCABULARY,
    differing,
    disturb,
    gradients,
    mean_loss,
    tiny_batch,
    tiny_config,
    whole_model,
)
from tests.pool import Pool

StateShard = tuple[Box, Tensor]


def put_together(shape: tuple[int, ...], pieces: list[StateShard]) -> Tensor:
    """A global tensor from its parts; parts that are held twice must agree in every bit."""
    whole = torch.full(shape, torch.nan, dtype=pieces[0][1].dtype)
    for box, part in pieces:
        held = whole[box.slices()]
        assert torch.equal(part.where(held.isnan(), held), part), "two ranks hold different copies"
        whole[box.slices()] = part
    assert not whole.isnan().any(), "a part is missing"
    return whole


# ------------------------------------------------------------------ initial weights


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (2, 2), (4, 1), (4, 3)])
def test_initial_weights_do_not_depend_on_the_layout(family: str, tp: int, pp: int) -> None:
    config = tiny_config(family, num_hidden_layers=3, attention_bias=True)
    one = whole_model(config, dtype=torch.float32)
    axes = training_axes(dp=1, tp=tp, pp=pp, num_key_value_heads=2)
    specs = decoder_specs(config)
    pieces: dict[str, list[StateShard]] = {name: [] for name in specs}
    for rank in range(tp * pp):
        mesh = Mesh(axes, rank)
        stage = mesh.coord("pp")
        layers = range(3 * stage // pp, 3 * (stage + 1) // pp)
        modules = StageModules(layers, embed=stage == 0, head=stage == pp - 1)
        chunk = DecoderChunk(config, specs, mesh, modules, ChunkOptions())
        chunk.initialize(seed=7)
        disturb(chunk)
        for name, weight in chunk.weights.items():
            pieces[name].append((chunk.specs[name].local_box(mesh), weight.detach()))
    for name, weight in one.weights.items():
        assert torch.equal(put_together(specs[name].shape, pieces[name]), weight.detach()), name


def test_another_seed_or_name_gives_other_weights_and_residual_matrices_start_smaller() -> None:
    config = tiny_config()
    models = []
    for seed in (1, 1, 2):
        model = DecoderChunk(config, decoder_specs(config), Mesh(), StageModules.whole(config), ChunkOptions())
        model.initialize(seed)
        models.append({name: weight.detach() for name, weight in model.weights.items()})
    for name, weight in models[0].items():
        assert torch.equal(weight, models[1][name])
        assert torch.equal(weight, models[2][name]) == ("norm" in name)
    assert not torch.equal(models[0]["layers.0.attn.q.weight"], models[0]["layers.1.attn.q.weight"])
    assert float(models[0]["layers.0.attn.q.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert float(models[0]["layers.1.mlp.down.weight"].std()) == pytest.approx(0.02 / 2, rel=0.1)  # √(2 · 2 layers)


# ------------------------------------------------------------------ tensor parallel


def run_on_rank(rank: int, world: int, family: str, facts: dict[str, Any], options: dict[str, Any]) -> Any:
    """(logits, loss, weight gradients) of this rank's shard, each with its box."""
    config = tiny_config(family, **facts)
    mesh = Mesh(training_axes(dp=1, tp=world, pp=1, num_key_value_heads=config.num_key_value_heads), rank)
    if world > 1:
        mesh.create_groups()
    model = whole_model(config, mesh, dtype=torch.float64, **options)
    batch = tiny_batch()
    logits, loss = mean_loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    pieces = {}
    for name, grad in gradients(model).items():
        spec = model.specs[name]
        for axis in spec.partial_grad:
            grad = all_reduce(grad, mesh.group(axis, purpose="gradients"))
        pieces[name] = (spec.local_box(mesh), grad)
    first = model.specs["embed.weight"].local_box(mesh)
    columns = Box((0, 0, first.offset[0]), (*batch.tokens.shape, first.shape[0]))
    return (columns, logits.detach()), loss.detach(), pieces


TP_CASES = [
    ("llama", {}, 2),
    ("llama", {"tie_word_embeddings": True}, 2),
    ("llama", {"attention_bias": True}, 4),  # the two key/value heads are shared by two ranks each
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}, 3),  # 257 over 3: uneven
    ("qwen2", {}, 4),
    ("qwen3", {"z_loss_enabled": True, "z_loss_coefficient": 0.1}, 2),
    ("qwen3", {"tie_word_embeddings": True}, 4),
]
MODES: dict[str, dict[str, Any]] = {
    "all reduce": {},
    "sequence parallel": {"sequence_parallel": True},
    "sequence parallel, gathered input kept": {"sequence_parallel": True, "recompute_allgather": False},
    "sequence parallel, recompute": {"sequence_parallel": True, "recompute": True},
    "sequence parallel, selective": {"sequence_parallel": True, "recompute": "selective"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "facts", "tp"), TP_CASES)
def test_tensor_parallel_chunk_equals_one_device(
    pool: Pool, family: str, facts: dict[str, Any], tp: int, mode: str
) -> None:
    (((_, logits), loss, expected),) = pool.run(1, run_on_rank, family, facts, {})
    ranks = pool.run(tp, run_on_rank, family, facts, MODES[mode])
    torch.testing.assert_close(put_together(tuple(logits.shape), [own for own, _, _ in ranks]), logits)
    assert all(float(rank_loss) == pytest.approx(float(loss), rel=1e-12) for _, rank_loss, _ in ranks)
    whole = {
        name: put_together(tuple(grad.shape), [pieces[name] for _, _, pieces in ranks])
        for name, (_, grad) in expected.items()
    }
    assert not differing(whole, {name: grad for name, (_, grad) in expected.items()}, 1e-9)


# ------------------------------------------------------------- what must not matter


def gradients_of_each(
    rank: int, world: int, family: str, facts: dict[str, Any], options: dict[str, Any]
) -> list[dict[str, Tensor]]:
    """This rank's gradients without recomputation, with it, and with what is selective."""
    config = tiny_config(family, **facts)
    mesh = Mesh(training_axes(dp=1, tp=world, pp=1, num_key_value_heads=2), rank)
    if world > 1:
        mesh.create_groups()
    found = []
    for recompute in get_args(Recompute):
        model = whole_model(config, mesh, dtype=torch.float32, recompute=recompute, **options)
        mean_loss(model, tiny_batch())[1].backward()  # type: ignore[no-untyped-call]
        found.append(gradients(model))
    return found


@pytest.mark.parametrize(
    ("family", "facts", "tp", "options"),
    [
        ("qwen3", {}, 1, {}),
        ("llama", {"attention_bias": True}, 2, {}),
        ("qwen2", {}, 2, {"sequence_parallel": True, "overlap": True}),
        ("llama", {}, 2, {"sequence_parallel": True, "recompute_allgather": False}),
    ],
)
def test_recomputed_layers_have_the_same_gradients_in_every_bit(
    pool: Pool, family: str, facts: dict[str, Any], tp: int, options: dict[str, Any]
) -> None:
    for plain, *others in pool.run(tp, gradients_of_each, family, facts, options):
        for other in others:
            assert [name for name in plain if not torch.equal(plain[name], other[name])] == []


def test_deferred_weight_gradients_equal_immediate_ones_and_each_is_reported_once_per_use() -> None:
    config, batch = tiny_config("qwen2", tie_word_embeddings=True), tiny_batch()
    found: list[dict[str, Tensor]] = []
    for defer in (False, True):
        model = whole_model(config, dtype=torch.float32)
        buffers = {name: torch.zeros_like(weight) for name, weight in model.weights.items()}
        reported: list[str] = []
        weight_grads = model.hooks.weight_grads
        for name, buffer in buffers.items():
            weight_grads.bind(model.weights[name], buffer.detach, partial(reported.append, name))
        with weight_grads.deferring(defer):
            mean_loss(model, batch)[1].backward()  # type: ignore[no-untyped-call]
        assert bool(reported) != defer
        for job in weight_grads.take():
            job()
        assert weight_grads.take() == []
        uses = model.uses(batch.tokens.shape[1])
        through_autograd = {name for name, weight in model.weights.items() if weight.grad is not None}
        assert all("norm" in name for name in through_autograd)
        assert all(
            reported.count(name) == sum(use.contributions for use in uses if name in use.names)
            for name in buffers.keys() - through_autograd
        )
        found.append({name: buffers[name] for name in buffers.keys() - through_autograd})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def permuted_for_interleaving(heads: Tensor, head_dim: int) -> Tensor:
    """Rows of [.., h·e, d] moved so that pairs (i, i + e/2) of each head become neighbours (2i, 2i + 1)."""
    leading, width = heads.shape[:-2], heads.shape[-1]
    return heads.reshape(*leading, -1, 2, head_dim // 2, width).transpose(-3, -2).reshape(heads.shape)


def test_interleaved_rotary_equals_permuted_weights() -> None:
    batch = tiny_batch()
    halves, pairs = (
        whole_model(tiny_config(rope_interleaved=interleaved), dtype=torch.float64) for interleaved in (False, True)
    )
    with torch.no_grad():
        for layer in range(2):
            q, kv = (pairs.weights[f"layers.{layer}.attn.{name}.weight"] for name in ("q", "kv"))
            q.copy_(permuted_for_interleaving(q, 8))
            kv[0].copy_(permuted_for_interleaving(kv[0], 8))
    with torch.no_grad():
        torch.testing.assert_close(halves(None, batch)[0], pairs(None, batch)[0])


def test_documents_in_one_row_do_not_see_each_other() -> None:
    lengths, config = [9, 1, 14], tiny_config()
    model = whole_model(config, dtype=torch.float64)
    row = tiny_batch(rows=1, length=sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    spans = document_spans([[0, 9, 10]], sum(lengths))
    with torch.no_grad():
        packed = model(None, Batch(row.tokens, row.labels, positions, spans))[0]
        plain = model(None, Batch(row.tokens, row.labels, positions))[0]
        for lo, hi in pairwise([0, 9, 10, 24]):
            tokens, labels, own = (x[:, lo:hi] for x in (row.tokens, row.labels, positions))
            torch.testing.assert_close(packed[:, lo:hi], model(None, Batch(tokens, labels, own))[0])
    assert not torch.allclose(packed[:, 9:], plain[:, 9:])


def test_positions_that_are_no_targets_add_nothing_to_the_loss() -> None:
    model = whole_model(tiny_config(), dtype=torch.float64)
    batch = tiny_batch(rows=1)
    valid = batch.labels != IGNORED_LABEL
    with torch.no_grad():
        logits, losses, _ = model(None, batch)
        expected = torch.nn.functional.cross_entropy(logits[valid], batch.labels[valid], reduction="sum")
    assert logits.shape == (1, 24, VOCABULARY)
    torch.testing.assert_close(losses["lm"], expected)


def test_z_loss_and_its_gradient_equal_autograd_through_plain_operations() -> None:
    model = whole_model(tiny_config(z_loss_enabled=True, z_loss_coefficient=0.3), dtype=torch.float64)
    batch = tiny_batch(rows=1)
    logits, losses, _ = model(None, batch)
    valid = batch.labels != IGNORED_LABEL
    plain = logits.detach().requires_grad_()
    lm = torch.nn.functional.cross_entropy(plain[valid], batch.labels[valid], reduction="sum")
    z = 0.3 * plain.logsumexp(-1)[valid].square().sum()
    torch.testing.assert_close((losses["lm"], losses["z"]), (lm, z))
    (grad,) = torch.autograd.grad(losses["lm"] + losses["z"], logits)
    (expected,) = torch.autograd.grad(lm + z, plain)
    torch.testing.assert_close(grad, expected)
