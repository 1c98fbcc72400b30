"""Ring attention on a plain Llama: rows cut over ranks, keys and values passed from rank to rank (arXiv 2310.01889).

    b rows   s tokens of a whole row   c ranks   h query heads   n key/value heads   e head dim

As such rings do, it has torch's kernel attend to the keys that are there while the next ones come, and merges what it
gives by the log Σ exp of the scores. Rows are cut into 2c pieces, of which rank r holds r and 2c−1−r, so that causal
work is equal. DDP sums the gradients. Before anything is measured, the loss is held against that of whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from bench.peers.loop import logits_loss, training_step
from bench.plain import PlainStage, whole_model
from bench.serve import options, prepare, serve
from bench.shapes import Shape
from bench.work import microbatches

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class RingAttention(Function):
    """Causal attention of this rank's queries to whole rows: q [b, h, s/c, e]; k, v [b, n, s/c, e] -> as q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = kv = torch.stack([k, v])  # [2, b, n, s/c, e]
        out, log_sum, ranks = torch.empty(()), torch.empty(()), dist.get_world_size()
        for step in range(ranks):
            arrive = pass_on(kv) if step + 1 < ranks else None
            queries, keys = pairing(step, q.shape[2])
            part, part_log_sum = flash(q[:, :, queries], *kv[..., keys, :], is_causal=step == 0)
            if step == 0:
                out, log_sum = part, part_log_sum  # [b, h, s/c, e], [b, h, s/c]
            else:
                merge(out[:, :, queries], log_sum[:, :, queries], part, part_log_sum)
            kv = arrive() if arrive else kv
        ctx.save_for_backward(q, own, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, kv, out, log_sum = ctx.saved_tensors
        q_grad, kv_grad, ranks = torch.zeros_like(q), torch.zeros_like(kv), dist.get_world_size()
        come_home = None
        for step in range(ranks):
            arrive = pass_on(kv) if step + 1 < ranks else None
            queries, keys = pairing(step, q.shape[2])
            grad_, q_, out_, log_sum_ = (x[:, :, queries] for x in (grad, q, out, log_sum))
            part, *of_keys = flash_backward(grad_, q_, *kv[..., keys, :], out_, log_sum_, 0.0, step == 0)
            q_grad[:, :, queries] += part
            kv_grad = come_home() if come_home else kv_grad  # what the ranks before made of these keys
            kv_grad[..., keys, :] += torch.stack(of_keys)
            come_home = pass_on(kv_grad)
            kv = arrive() if arrive else kv
        assert come_home is not None
        return q_grad, *come_home()


def pairing(step: int, length: int) -> tuple[slice, slice]:
    """Which of this rank's queries see which of the keys that are here in a step: of each, ``length`` tokens.

    They are this rank's own, or came from ``step`` ranks before: an earlier rank's first piece is before all queries,
    and both pieces of a later rank lie between this rank's two.
    """
    everything, half = slice(None), length // 2
    if step == 0:
        return everything, everything
    return (everything, slice(half)) if step <= dist.get_rank() else (slice(half, None), everything)


def merge(out: Tensor, log_sum: Tensor, part: Tensor, part_log_sum: Tensor) -> None:
    """Attention to two sets of keys from the attention to each, in place: [b, h, s, e] and [b, h, s]."""
    total = torch.logaddexp(log_sum, part_log_sum)
    out.mul_((log_sum - total).exp()[..., None]).add_(part * (part_log_sum - total).exp()[..., None])
    log_sum.copy_(total)


def pass_on(x: Tensor) -> Callable[[], Tensor]:
    """Send to the next rank; what is returned waits for what the rank before has sent."""
    rank, ranks, coming = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    sent, received = dist.isend(x, (rank + 1) % ranks), dist.irecv(coming, (rank - 1) % ranks)
    assert sent is not None
    assert received is not None

    def arrive() -> Tensor:
        received.wait()
        sent.wait()
        return coming

    return arrive


def held_by(rank: int, ranks: int, length: int) -> Tensor:
    """The positions of a rank's tokens: pieces rank and 2·ranks−1−rank of a row's 2·ranks."""
    pieces = torch.arange(length).chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


def mean_of_ranks(loss: float | Tensor) -> float:
    """The mean over the tokens of whole rows."""
    total = torch.as_tensor(loss, dtype=torch.float64).clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


@torch.no_grad()
def check_loss(ring: PlainStage, whole: PlainStage, held: Tensor, tokens: Tensor, labels: Tensor) -> None:
    """Raise an error unless a model has the same loss of rows [b, s] that are cut as another of whole ones."""
    whole.load_state_dict(ring.state_dict())
    expected = float(logits_loss(whole)(tokens, labels))
    found = mean_of_ranks(logits_loss(lambda part: ring(part, held))(tokens[:, held], labels[:, held]))
    if abs(found - expected) > 1e-6 * expected:
        raise RuntimeError(f"the loss of cut rows is {found}, of whole rows {expected}")


def main() -> None:
    asked = options()
    imported = prepare(asked["threads"], batch_policy=asked["batch_policy"])
    dist.init_process_group("gloo")
    shape = Shape(**asked["shape"])
    torch.manual_seed(0)
    plain = whole_model(shape, shape.num_hidden_layers, RingAttention.apply)
    held = held_by(dist.get_rank(), dist.get_world_size(), shape.sequence_length)
    batches = microbatches(shape)
    check_loss(plain, whole_model(shape, shape.num_hidden_layers), held, *batches[0])
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    loss = logits_loss(lambda tokens: model(tokens, held))
    cut = [(tokens[:, held], labels[:, held]) for tokens, labels in batches]
    step = training_step(loss, model.parameters(), cut, not_last=model.no_sync)
    serve(lambda: mean_of_ranks(step()), imported)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
