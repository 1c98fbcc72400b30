"""The limit: the matrix products of a step alone, on as many processes and threads, and nothing else.

Every linear layer's product of the forward and its two of the backward, at their real shapes, by ``torch.mm`` into
buffers that exist already. Products of attention are left out; the rate of the others stands for them.
"""

from __future__ import annotations

import os

from bench.shapes import Shape


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


def main() -> None:
    import torch

    from bench.serve import options, prepare, serve

    asked = options()
    prepare(asked["threads"], batch_policy=asked["batch_policy"])
    shape, dtype = Shape(**asked["shape"]), getattr(torch, asked["dtype"])
    tokens = shape.micro_batch_size * shape.sequence_length
    products = []
    for inputs, outputs, count in linear_layers(shape):
        x, weight, y = (
            torch.randn(size, dtype=dtype) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        x_grad, weight_grad, y_grad = torch.empty_like(x), torch.empty_like(weight), torch.randn_like(y)
        triple = [(x, weight.t(), y), (y_grad, weight, x_grad), (y_grad.t(), x, weight_grad)]
        products += triple * count
    repeats = microbatches_each(shape, int(os.environ["WORLD_SIZE"]))

    def step() -> None:
        for _ in range(repeats):
            for left, right, out in products:
                torch.mm(left, right, out=out)

    serve(step)


if __name__ == "__main__":
    main()
