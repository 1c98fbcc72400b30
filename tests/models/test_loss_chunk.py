"""The loss in chunks of tokens: the same numbers, and never the logits of all tokens at once."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.parallel.mesh import Mesh, training_axes
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
