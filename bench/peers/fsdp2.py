"""PyTorch FSDP2: parameters sharded block by block; gradients leave with the last microbatch, or with every one.

``reshard``: ZeRO-3 as a careful user would have it. The embedding, every block and the head are gathered for their own
forward and again for their own backward (the head once: its backward follows at once), and no replica ever has all
gradients. In bfloat16 the weights are float32, computed with in bfloat16, and their gradients summed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bench.peers.loop import in_dtype, logits_loss, training_step
from bench.plain import PlainStage, whole_model
from bench.serve import options, prepare, serve
from bench.shapes import Shape
from bench.work import microbatches


def reshard(model: PlainStage, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard the embedding, every block and the head, each gathered when it computes and freed after it."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fully_shard(model.embed, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model.head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # the last norm is left


def main() -> None:
    asked = options()
    imported = prepare(asked["threads"], batch_policy=asked["batch_policy"])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = Shape(**asked["shape"])
    torch.manual_seed(0)  # every rank keeps its shards of the weights that it has drawn itself
    model = whole_model(shape, shape.num_hidden_layers)
    batches, loss = microbatches(shape, dist.get_rank(), dist.get_world_size()), logits_loss(model)
    if asked.get("reshard"):
        reshard(model, mesh, getattr(torch, asked["dtype"]))
        step = training_step(loss, model.parameters(), batches)
    else:
        precision = in_dtype(model, asked)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        sharded = fully_shard(model, mesh=mesh)

        @contextmanager
        def without_reduction() -> Iterator[None]:
            sharded.set_requires_gradient_sync(False)
            yield
            sharded.set_requires_gradient_sync(True)

        step = training_step(loss, model.parameters(), batches, around_forward=precision, not_last=without_reduction)
    serve(step, imported)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
