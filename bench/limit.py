"""The limit: the matrix products of a step alone, on as many processes and threads, and nothing else.

Every linear layer's product of the forward and its two of the backward, at their real shapes, each by the faster of
torch's two libraries on this machine: ``torch.mm`` into a buffer that exists already, or, in float32, oneDNN. Products
of attention are left out; the rate of the others stands for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from bench.shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor


def linear_layers(shape: Shape) -> list[tuple[int, int, int]]:
    """(inputs, outputs, how many of them the model has) of every kind of linear layer, fused where ours are."""
    hidden, head, layers = shape.hidden_size, shape.head_dim, shape.num_hidden_layers
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    return [
        (hidden, heads * head, layers),
        (shape.num_attention_heads * head, hidden, layers),
        (hidden, 2 * shape.intermediate_size, layers),
        (shape.intermediate_size, hidden, layers),
        (hidden, shape.vocab_size, 1),
    ]


def microbatches_each(shape: Shape, world: int) -> int:
    """Microbatches of one process: the step's, dealt out to all, but at least one."""
    return max(1, shape.num_microbatches // world)


def flops(shape: Shape, world: int) -> int:
    """Floating-point operations of one turn, of all processes together."""
    tokens = microbatches_each(shape, world) * shape.micro_batch_size * shape.sequence_length
    return world * 3 * sum(2 * tokens * inputs * outputs * count for inputs, outputs, count in linear_layers(shape))


def fastest(left: Tensor, right: Tensor, out: Tensor) -> Callable[[], object]:
    """left · right by whichever library is faster at it, of four tries each, of which the best counts."""
    import torch

    ways: list[Callable[[], object]] = [partial(torch.mm, left, right, out=out)]
    if left.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        ways.append(partial(torch.ops.mkldnn._linear_pointwise, left, right.t(), None, "none", [], ""))
    return min(ways, key=lambda way: min(seconds(way) for _ in range(4)))


def seconds(way: Callable[[], object]) -> float:
    """How long one call takes."""
    start = perf_counter()
    way()
    return perf_counter() - start


def main() -> None:
    import torch

    from bench.serve import options, prepare, serve

    asked = options()
    prepare(asked["threads"], batch_policy=asked["batch_policy"])
    shape, dtype = Shape(**asked["shape"]), getattr(torch, asked["dtype"])
    tokens = shape.micro_batch_size * shape.sequence_length
    products: list[Callable[[], object]] = []
    for inputs, outputs, count in linear_layers(shape):
        x, weight, y = (
            torch.randn(size, dtype=dtype) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        x_grad, weight_grad, y_grad = torch.empty_like(x), torch.empty_like(weight), torch.randn_like(y)
        triple = [(x, weight.t(), y), (y_grad, weight, x_grad), (y_grad.t(), x, weight_grad)]
        products += [fastest(*product) for product in triple] * count
    repeats = microbatches_each(shape, int(os.environ["WORLD_SIZE"]))

    def step() -> None:
        for _ in range(repeats):
            for product in products:
                product()

    serve(step)


if __name__ == "__main__":
    main()
