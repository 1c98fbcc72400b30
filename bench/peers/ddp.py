"""PyTorch DistributedDataParallel: full replicas, gradients averaged in buckets with the last microbatch."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.peers.loop import in_dtype, logits_loss, training_step
from bench.plain import whole_model
from bench.serve import options, prepare, serve
from bench.shapes import Shape
from bench.work import microbatches


def main() -> None:
    asked = options()
    imported = prepare(asked["threads"], batch_policy=asked["batch_policy"])
    dist.init_process_group("gloo")
    shape = Shape(**asked["shape"])
    plain = whole_model(shape, shape.num_hidden_layers)
    precision = in_dtype(plain, asked)
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    batches = microbatches(shape, dist.get_rank(), dist.get_world_size())
    loss = logits_loss(model)
    serve(training_step(loss, model.parameters(), batches, around_forward=precision, not_last=model.no_sync), imported)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
