"""A plain PyTorch loop in one process, eager or under torch.compile."""

from __future__ import annotations

import torch

from bench.peers.loop import in_dtype, logits_loss, training_step
from bench.plain import whole_model
from bench.serve import options, prepare, serve
from bench.shapes import Shape
from bench.work import microbatches


def main() -> None:
    asked = options()
    imported = prepare(asked["threads"], batch_policy=asked["batch_policy"])
    shape = Shape(**asked["shape"])
    torch.manual_seed(0)
    model = whole_model(shape, shape.num_hidden_layers)
    precision = in_dtype(model, asked)
    forward = torch.compile(model) if asked.get("compile") else model
    serve(
        training_step(logits_loss(forward), model.parameters(), microbatches(shape), around_forward=precision), imported
    )


if __name__ == "__main__":
    main()
