"""What F, B and W of every pipeline stage cost: given, counted in FLOPs, or measured in a short profile."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from nanotron.errors import ConfigError
from nanotron.models.families import layer_costs, layer_kinds
from nanotron.models.flops import head_flops
from nanotron.models.specs import StageModules
from nanotron.pipeline.timeline import StageCost
from nanotron.training.topology import layers_of_stages, pipeline_schedule

if TYPE_CHECKING:
    from torch import Tensor

    from nanotron.batch import Batch
    from nanotron.config import Config
    from nanotron.ops.chunk import Chunk

KINDS = "FBW"
REPEATS = 5  # of which the median counts; one more warms up

Cost = Mapping[str, float]  # kind -> time


def given_costs(config: Config, text: str) -> StageCost:
    """`1:2:1`: F, B and W of all that a rank holds, in any unit; its chunks share them equally."""
    match = re.fullmatch(r"([\d.]+):([\d.]+):([\d.]+)", text)
    numbers = [float(number) for number in match.groups()] if match else []
    if not numbers or min(numbers) <= 0:
        raise ConfigError(
            f"--costs {text}: write F:B:W as three positive numbers, as in 1:1:1, or one of flops, profile, trace"
        )
    num_chunks = pipeline_schedule(config).num_chunks
    return lambda kind, stage: numbers[KINDS.index(kind)] / num_chunks


def counted_costs(config: Config) -> StageCost:
    """F = B = W = the stage's FLOPs of one forward, in units of a mean rank's."""
    model, length = config.model.model_config, config.tokens.sequence_length
    layers, head = layer_costs(model, length), head_flops(model, length)
    unit = (sum(layers) + head) / config.parallelism.pp
    return _by_stage(
        config,
        layers=[dict.fromkeys(KINDS, layer / unit) for layer in layers],
        head=dict.fromkeys(KINDS, head / unit),
    )


def profiled_costs(config: Config) -> StageCost:
    """Seconds, measured on this machine: one layer of each kind alone, one with the embedding, one with the head.

    One process: tensor-parallel ranks are assumed to share each layer's time equally.
    """
    import torch

    from nanotron.launch.place import num_cores

    model, share = config.model.model_config, 1 / config.parallelism.tp
    kinds = layer_kinds(model)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.general.threads_per_rank or max(1, num_cores() // config.parallelism.world_size))
    middle = {kind: _measure(config, StageModules([kinds.index(kind)], embed=False, head=False)) for kind in set(kinds)}
    first = _measure(config, StageModules([0], embed=True, head=False))
    last = _measure(config, StageModules([0], embed=False, head=True))
    torch.set_num_threads(threads)
    return _by_stage(
        config,
        layers=[{part: middle[kind][part] * share for part in KINDS} for kind in kinds],
        embed={part: max(0.0, first[part] - middle[kinds[0]][part]) * share for part in KINDS},
        head={part: max(0.0, last[part] - middle[kinds[0]][part]) * share for part in KINDS},
    )


def _by_stage(config: Config, *, layers: Sequence[Cost], head: Cost, embed: Cost | None = None) -> StageCost:
    """Costs of whole stages from those of their parts."""
    ranges = layers_of_stages(config)

    def cost(kind: str, stage: int) -> float:
        lo, hi = ranges[stage]
        ends = embed[kind] if embed and stage == 0 else 0.0
        ends += head[kind] if stage == len(ranges) - 1 else 0.0
        return sum(layer[kind] for layer in layers[lo:hi]) + ends

    return cost


def _measure(config: Config, modules: StageModules) -> Cost:
    """Seconds of F, B and W of a small chunk."""
    import torch

    from nanotron.batch import Batch
    from nanotron.launch.place import Place, choose_device
    from nanotron.parallel.mesh import Mesh
    from nanotron.training.build import build_chunks, chunk_options, grad_dtype

    device, _ = choose_device(Place())
    options = chunk_options(config, device)
    (chunk,) = build_chunks(config, Mesh(), [modules], replace(options, sequence_parallel=False))
    for weight in chunk.weights.values():
        torch.nn.init.normal_(weight, std=0.02)
        grads = torch.zeros_like(weight, dtype=grad_dtype(config, weight.dtype))
        chunk.hooks.weight_grads.bind(weight, grads.detach)  # called, it is the same memory
    model, size = config.model.model_config, (config.tokens.micro_batch_size, config.tokens.sequence_length)
    tokens = torch.randint(model.vocab_size, size, device=device)
    batch = Batch(tokens, tokens, torch.arange(size[1], device=device).expand(size))
    x = None if modules.embed else torch.randn(*size, model.hidden_size, dtype=options.dtype, device=device)

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return perf_counter()

    times = [_time_once(chunk, x, batch, now) for _ in range(REPEATS + 1)][1:]
    return {kind: median(time[kind] for time in times) for kind in KINDS}


def _time_once(chunk: Chunk, x: Tensor | None, batch: Batch, now: Callable[[], float]) -> Cost:
    """One microbatch's F, B and W."""
    import torch

    x = None if x is None else x.detach().requires_grad_()
    times = [now()]
    y, losses, _ = chunk(x, batch)
    ends = [*losses.values(), *([] if "lm" in losses else [y])]  # routers have losses in every stage
    times.append(now())
    weight_grads = chunk.hooks.weight_grads
    with weight_grads.deferring():
        torch.autograd.backward(ends, [None if end.dim() == 0 else end.detach() for end in ends])
    jobs = weight_grads.take()
    times.append(now())
    for job in jobs:
        job()
    times.append(now())
    return {kind: after - before for kind, before, after in zip(KINDS, times, times[1:], strict=False)}
