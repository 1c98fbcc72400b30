"""torch.distributed.pipelining on a plain Llama: Schedule1F1B or ScheduleZBVZeroBubble, AdamW, clipping over stages.

Option ``schedule`` is 1f1b or zbv. Layers are dealt out as ours are, by what each rank has to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

from bench.peers.loop import adamw
from bench.plain import LlamaShape, PlainStage
from bench.serve import options, prepare, serve
from bench.shapes import CLIP, Shape
from bench.work import microbatches

Loss = Callable[[Tensor, Tensor], Tensor]  # logits [b, s, v] and labels [b, s] -> what is differentiated


def stages_of(schedule: str, rank: int, ranks: int) -> list[int]:
    """The stages that a rank holds: its own, or under zbv one on each arm of the V."""
    return [rank, 2 * ranks - 1 - rank] if schedule == "zbv" else [rank]


def layers_of_stages(shape: Shape, schedule: str, ranks: int) -> list[int]:
    """How many layers each stage holds: each in turn goes to the rank that has least to compute, the head included."""
    attention = 2 * shape.sequence_length * shape.num_attention_heads * shape.head_dim
    heads = 2 * shape.num_attention_heads + 2 * shape.num_key_value_heads
    layer = (heads * shape.head_dim + 3 * shape.intermediate_size) * shape.hidden_size + attention
    held = [stages_of(schedule, rank, ranks) for rank in range(ranks)]
    holder = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    counts = [1] * len(holder)
    costs = [layer] * len(holder)
    costs[-1] += shape.vocab_size * shape.hidden_size
    for _ in range(shape.num_hidden_layers - len(holder)):
        loads = [sum(costs[stage] for stage in stages) for stages in held]
        stage = min(holder, key=lambda stage: (loads[holder[stage]], costs[stage], -stage))
        counts[stage] += 1
        costs[stage] += layer
    return counts


class TorchPipeline:
    """One rank's stages and their schedule."""

    def __init__(
        self,
        schedule: str,
        shape: LlamaShape,
        layers: Sequence[int],
        batches: Sequence[tuple[Tensor, Tensor]],
        loss: Loss,
        *,
        rank: int,
        ranks: int,
    ) -> None:
        """``layers[stage]`` says how many; ``batches`` are the microbatches as (tokens, labels), each [b, s]."""
        tokens, labels = (torch.cat([batch[index] for batch in batches]) for index in range(2))  # 2 × [m·b, s]
        held, last = stages_of(schedule, rank, ranks), len(layers) - 1
        self.modules = [PlainStage(shape, layers[stage], embed=stage == 0, head=stage == last) for stage in held]
        stages = [
            _stage(module, stage, last + 1, batches[0][0]) for module, stage in zip(self.modules, held, strict=True)
        ]
        kinds: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
        self._schedule = (
            ScheduleZBVZeroBubble(list(stages), len(batches), **kinds)
            if schedule == "zbv"
            else Schedule1F1B(stages[0], len(batches), **kinds)
        )
        self._given = [tokens] if 0 in held else []
        self._wanted = {"target": labels} if last in held else {}

    def run(self) -> list[Tensor]:
        """Forward and backward of all microbatches; their losses, where the last stage is."""
        losses: list[Tensor] = []
        self._schedule.step(*self._given, **self._wanted, losses=losses, return_outputs=False)
        return losses


def _stage(module: PlainStage, stage: int, stages: int, tokens: Tensor) -> PipelineStage:
    """A stage whose shapes are told, so that none are sent around in the first step."""
    hidden = torch.empty(*tokens.shape, module.config.hidden_size, requires_grad=True)  # [b, s, d]
    logits = torch.empty(*tokens.shape, module.config.vocab_size, requires_grad=True)  # [b, s, v]
    given, made = tokens if stage == 0 else hidden, logits if stage == stages - 1 else hidden
    return PipelineStage(module, stage, stages, torch.device("cpu"), input_args=(given,), output_args=(made,))


def main() -> None:
    asked = options()
    imported = prepare(asked["threads"], batch_policy=asked["batch_policy"])
    dist.init_process_group("gloo")
    shape, rank, ranks = Shape(**asked["shape"]), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layers = layers_of_stages(shape, asked["schedule"], ranks)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / shape.tokens_per_step

    pipeline = TorchPipeline(asked["schedule"], shape, layers, microbatches(shape), loss, rank=rank, ranks=ranks)
    weights = [weight for module in pipeline.modules for weight in module.parameters()]
    optimizer = adamw(weights)

    def step() -> float:
        losses = pipeline.run()
        mine = torch.stack(
            [nn.utils.get_total_norm([weight.grad for weight in weights]) ** 2, sum(losses, torch.zeros(()))]
        )
        dist.all_reduce(mine.detach_())  # the norm of all stages, and for the log the loss of the last one
        squared_norm, found = mine
        nn.utils.clip_grads_with_norm_(weights, CLIP, squared_norm.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return float(found)

    serve(step, imported)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
