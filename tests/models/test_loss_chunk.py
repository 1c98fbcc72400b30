"""The loss in chunks of tokens: the same numbers, and never the logits of all tokens at once."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.config import get_config_from_dict
from nanotron.parallel.mesh import Mesh, training_axes
from nanotron.plan.counting import Counting
from tests.models.tiny import VOCABULARY, tiny_batch, tiny_config, whole_model


class LargestWidth(TorchDispatchMode):
    """Notes the most rows of any tensor that is as wide as the vocabulary shard."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.ndim >= 2 and result.shape[-1] == self.width:
            self.rows = max(self.rows, result.numel() // self.width)
        return result


def loss_and_grads(mesh: Mesh, loss_chunk: int | None, **options):
    config = tiny_config(z_loss_enabled=True, tie_word_embeddings=True)
    model = whole_model(config, mesh, dtype=torch.float64, loss_chunk=loss_chunk, **options)
    batch = tiny_batch(rows=2, length=24)
    width = model.weights["embed.weight"].shape[0]
    with LargestWidth(width) as largest:
        _, losses, _ = model(None, batch)
        sum(losses.values()).backward()
    grads = {name: weight.grad for name, weight in model.weights.items()}
    return {name: loss.item() for name, loss in losses.items()}, grads, largest.rows


@pytest.mark.parametrize("loss_chunk", [1, 7, 24, 100])
def test_chunked_loss_and_gradients_equal_the_whole(loss_chunk):
    losses, grads, _ = loss_and_grads(Mesh(), None)
    chunked_losses, chunked_grads, _ = loss_and_grads(Mesh(), loss_chunk)
    assert chunked_losses == pytest.approx(losses, rel=1e-12)
    for name, grad in grads.items():
        torch.testing.assert_close(chunked_grads[name], grad, rtol=1e-10, atol=1e-12)


def test_logits_exist_for_one_chunk_at_a_time():
    assert VOCABULARY not in (24, 32, 48, 64)  # no other tensor is that wide
    assert loss_and_grads(Mesh(), None)[2] == 2 * 24
    assert loss_and_grads(Mesh(), 20)[2] == 2 * 20  # more than the 32 rows of the transposed weight


def chunked_on_rank(rank: int, world: int, sequence_parallel: bool, loss_chunk: int | None):
    mesh = Mesh(training_axes(dp=1, tp=world, pp=1, num_key_value_heads=2), rank)
    mesh.create_groups()
    return loss_and_grads(mesh, loss_chunk, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_chunked_loss_equals_the_whole_with_tensor_parallelism(pool, sequence_parallel):
    whole = pool.run(2, chunked_on_rank, sequence_parallel, None)
    chunked = pool.run(2, chunked_on_rank, sequence_parallel, 18)
    for (losses, grads, rows), (chunked_losses, chunked_grads, chunked_rows) in zip(whole, chunked, strict=True):
        assert (rows, chunked_rows) == (2 * 24, 2 * 18)  # of logits at once, forward and backward
        assert chunked_losses == pytest.approx(losses, rel=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(chunked_grads[name], grad, rtol=1e-10, atol=1e-12)


def test_no_logits_are_computed_twice():
    flops = []
    for loss_chunk in (None, 8):
        with Counting() as counter, counter.section() as work:
            loss_and_grads(Mesh(), loss_chunk)
        flops.append(work["matmul"])
    assert flops[0] == flops[1] > 0


def test_the_gradients_are_those_of_the_scaled_losses():
    config, batch = tiny_config(z_loss_enabled=True, tie_word_embeddings=True), tiny_batch(rows=2, length=24)
    grads = []
    for loss_chunk in (None, 7):
        model = whole_model(config, Mesh(), dtype=torch.float64, loss_chunk=loss_chunk)
        model.hooks.loss_scale = lambda: 0.25
        _, losses, _ = model(None, batch)
        (sum(losses.values()) * 0.25).backward()
        grads.append([weight.grad for weight in model.weights.values()])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-12)


def test_without_gradients_none_are_made():
    model = whole_model(tiny_config(), Mesh(), dtype=torch.float32, loss_chunk=7)
    with torch.no_grad():
        _, losses, _ = model(None, tiny_batch(rows=2, length=24))
    assert not losses["lm"].requires_grad
    assert all(weight.grad is None for weight in model.weights.values())


@pytest.mark.parametrize(
    ("asked", "vocab", "rows", "length", "parallelism", "chunk"),
    [
        (None, 4096, 1, 4096, {}, None),  # 64 MiB
        (None, 131_072, 1, 1024, {}, None),  # just 512 MiB
        (None, 131_072, 1, 4096, {}, 1024),
        (None, 131_072, 2, 4096, {}, 512),
        (None, 131_072, 1, 4096, {"tp": 4}, None),
        (None, 131_072, 1, 4096, {"context_parallel_size": 4}, None),
        (None, 128_000, 1, 8192, {}, 1024),  # a multiple of 128
        (None, 200_000, 64, 4096, {}, 10),
        (100, 4096, 1, 4096, {}, 100),
    ],
)
def test_the_chunk_follows_from_vocabulary_and_memory_unless_it_is_asked_for(
    asked, vocab, rows, length, parallelism, chunk
):
    config = get_config_from_dict(
        {
            "model": {
                "model_config": {
                    "hidden_size": 64,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 4,
                    "vocab_size": vocab,
                },
                "loss_chunk": asked,
            },
            "parallelism": parallelism,
            "tokens": {"sequence_length": length, "micro_batch_size": rows, "batch_accumulation_per_replica": 1},
            "optimizer": {"learning_rate_scheduler": {"learning_rate": 1e-3}},
        }
    )
    assert config.loss_chunk == chunk
