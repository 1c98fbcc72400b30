"""DTensor tensor parallelism on a plain Llama, as torch's tutorial has it: ColwiseParallel into RowwiseParallel.

Options: ``sequence_parallel`` keeps the stream between blocks cut along the sequence; ``loss_parallel`` leaves the
logits cut along the vocabulary for the loss, where they are gathered otherwise. The fused matrices (k|v, gate|up) are
fused on every rank for itself, so that each is one product; as a checkpoint, rows would be in another order.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from bench.peers.loop import Loss, training_step
from bench.plain import rotary_angles, rotate
from bench.serve import options, prepare, serve
from bench.shapes import Shape
from bench.work import microbatches


class Attention(nn.Module):
    """Causal attention over the heads that this rank holds."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.hidden_size, shape.num_attention_heads * shape.head_dim, bias=False)
        self.kv = nn.Linear(shape.hidden_size, 2 * shape.num_key_value_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x [b, s, d] -> [b, s, d], or [b, s/tp, d] under sequence parallelism."""
        q = self.q(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [b, h/tp, s, e]
        k, v = self.kv(x).unflatten(-1, (2, -1, self.head_dim)).transpose(1, 3).unbind(2)  # 2 × [b, kv/tp, s, e]
        q, k = rotate(q, angles), rotate(k, angles)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # [b, h/tp, s, e]
        y: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return y


class FeedForward(nn.Module):
    """SwiGLU over this rank's slice."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, d] -> [b, s, d], or [b, s/tp, d] under sequence parallelism."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # 2 × [b, s, f/tp]
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class Block(nn.Module):
    """Attention and SwiGLU, pre-norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)
        self.attention_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.feed_forward_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class Model(nn.Module):
    """The whole Llama: tokens [b, s] in, logits [b, s, v] out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = rotary_angles(tokens[..., None].float(), self.shape)
        for block in self.blocks:
            x = block(x, angles)
        logits: Tensor = self.head(self.norm(x))
        return logits


def parallelize(model: Model, mesh: DeviceMesh, *, sequence_parallel: bool, cut_logits: bool) -> None:
    """Make the weights DTensors and put the collectives around the modules, with torch's own styles."""
    stream = Shard(1) if sequence_parallel else Replicate()
    whole = Replicate()
    norm: ParallelStyle = SequenceParallel() if sequence_parallel else ReplicatedNorm()
    block = {
        "attention_norm": norm,
        "attention": PrepareModuleInput(input_layouts=(stream, None), desired_input_layouts=(whole, None)),
        "attention.q": ColwiseParallel(),
        "attention.kv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=stream),
        "feed_forward_norm": norm,
        "feed_forward": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,)),
        "feed_forward.gate_up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=stream),
    }
    for one in model.blocks:
        parallelize_module(one, mesh, block)
    ends = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=stream),
        "norm": norm,
        "head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1) if cut_logits else whole, use_local_output=not cut_logits
        ),
    }
    parallelize_module(model, mesh, ends)


class ReplicatedNorm(ParallelStyle):
    """A norm whose weight is a DTensor like all others, for the optimizer and the clipping, and which does no more."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def replicated(_: nn.Module, inputs: tuple[Tensor, ...], __: DeviceMesh) -> tuple[Tensor, ...]:
            return tuple(DTensor.from_local(part, mesh, (Replicate(),), run_check=False) for part in inputs)

        return distribute_module(module, mesh, None, replicated)


def loss_of(model: Model) -> Loss:
    """The cross entropy of whole or of cut logits."""

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        found = F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
        return found.full_tensor() if isinstance(found, DTensor) else found

    return loss


def main() -> None:
    asked = options()
    imported = prepare(asked["threads"], batch_policy=asked["batch_policy"])
    dist.init_process_group("gloo")
    shape, cut_logits = Shape(**asked["shape"]), asked.get("loss_parallel", False)
    torch.manual_seed(0)
    model = Model(shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize(model, mesh, sequence_parallel=asked.get("sequence_parallel", False), cut_logits=cut_logits)
    with loss_parallel() if cut_logits else nullcontext():
        serve(training_step(loss_of(model), model.parameters(), microbatches(shape)), imported)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
