"""PyTorch FSDP2: every block and the root sharded; gradients are reduced with the last microbatch only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.peers.loop import in_dtype, logits_loss, training_step
from bench.plain import whole_model
from bench.serve import options, prepare, serve
from bench.shapes import Shape
from bench.work import microbatches


def main() -> None:
    asked = options()
    prepare(asked["threads"], batch_policy=asked["batch_policy"])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = Shape(**asked["shape"])
    torch.manual_seed(0)  # every rank keeps its shards of the weights that it has drawn itself
    model = whole_model(shape, shape.num_hidden_layers)
    precision = in_dtype(model, asked)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)

    @contextmanager
    def without_reduction() -> Iterator[None]:
        sharded.set_requires_gradient_sync(False)
        yield
        sharded.set_requires_gradient_sync(True)

    batches = microbatches(shape, dist.get_rank(), dist.get_world_size())
    loss = logits_loss(model)
    serve(training_step(loss, model.parameters(), batches, around_forward=precision, not_last=without_reduction))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
