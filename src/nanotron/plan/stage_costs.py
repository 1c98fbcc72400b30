"""What F, B and W of every pipeline stage cost: given, counted in FLOPs, or measured in a short profile."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from nanotron.errors import ConfigError
from nanotron.models.flops import head_flops, layer_flops
from nanotron.pipeline.timeline import StageCost
from nanotron.training.topology import layers_of_stages, parameter_specs, pipeline_schedule

if TYPE_CHECKING:
    from torch import Tensor

    from nanotron.batch import Batch
    from nanotron.config import Config
    from nanotron.models.decoder import Llama

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
    layer, head = layer_flops(model, length), head_flops(model, length)
    unit = (model.num_hidden_layers * layer + head) / config.parallelism.pp
    return _by_stage(config, layer=dict.fromkeys(KINDS, layer / unit), head=dict.fromkeys(KINDS, head / unit))


def profiled_costs(config: Config) -> StageCost:
    """Seconds, measured on this machine: one layer alone, with the embedding, and with the head, one process.

    Tensor parallelism is not run: its ranks are assumed to share each layer's time equally.
    """
    import torch

    from nanotron.launch.place import num_cores

    threads = torch.get_num_threads()
    torch.set_num_threads(config.general.threads_per_rank or max(1, num_cores() // config.parallelism.world_size))
    middle = _measure(config, embed=False, head=False)
    first = _measure(config, embed=True, head=False)
    last = _measure(config, embed=False, head=True)
    torch.set_num_threads(threads)
    share = 1 / config.parallelism.tp
    return _by_stage(
        config,
        layer={kind: middle[kind] * share for kind in KINDS},
        embed={kind: max(0.0, first[kind] - middle[kind]) * share for kind in KINDS},
        head={kind: max(0.0, last[kind] - middle[kind]) * share for kind in KINDS},
    )


def _by_stage(config: Config, *, layer: Cost, head: Cost, embed: Cost | None = None) -> StageCost:
    """Costs of whole stages from those of their parts."""
    layers = layers_of_stages(config)

    def cost(kind: str, stage: int) -> float:
        lo, hi = layers[stage]
        ends = embed[kind] if embed and stage == 0 else 0.0
        return (hi - lo) * layer[kind] + ends + (head[kind] if stage == len(layers) - 1 else 0.0)

    return cost


def _measure(config: Config, *, embed: bool, head: bool) -> Cost:
    """Seconds of F, B and W of a chunk with one layer."""
    import torch

    from nanotron.batch import Batch
    from nanotron.launch.place import Place, choose_device
    from nanotron.models.decoder import Llama
    from nanotron.ops.fused import as_written, fused
    from nanotron.parallel.mesh import Mesh

    dtype: torch.dtype = getattr(torch, config.model.dtype)
    device, _ = choose_device(Place(rank=0, world=1, local_rank=0, local_world=1))
    chunk = Llama(
        config.model.model_config,
        parameter_specs(config),
        Mesh(),
        layers=(0, 1),
        embed=embed,
        head=head,
        dtype=dtype,
        device=device,
        recompute=config.parallelism.recompute_layer,
        loss_chunk=config.model.loss_chunk,
        fuse=fused if config.model.compile else as_written,
    )
    sums = torch.promote_types(dtype, torch.float32) if config.optimizer.accumulate_grad_in_fp32 else dtype
    for weight in chunk.weights.values():
        torch.nn.init.normal_(weight, std=0.02)
        chunk.weight_grads.into[weight] = torch.zeros_like(weight, dtype=sums)
    size = (config.tokens.micro_batch_size, config.tokens.sequence_length)
    tokens = torch.randint(config.model.model_config.vocab_size, size, device=device)
    positions = torch.arange(size[1], device=device).expand(size)
    batch = Batch(tokens, tokens, positions)
    x = None if embed else torch.randn(*size, config.model.model_config.hidden_size, dtype=dtype, device=device)

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return perf_counter()

    times = [_time_once(chunk, x, batch, now) for _ in range(REPEATS + 1)][1:]
    return {kind: median(time[kind] for time in times) for kind in KINDS}


def _time_once(chunk: Llama, x: Tensor | None, batch: Batch, now: Callable[[], float]) -> Cost:
    """One microbatch's F, B and W."""
    x = None if x is None else x.detach().requires_grad_()
    times = [now()]
    y, losses, _ = chunk(x, batch)
    end = losses["lm"] if losses else y
    times.append(now())
    chunk.weight_grads.defer = True
    end.backward(None if losses else y.detach())
    jobs = chunk.weight_grads.take()
    times.append(now())
    for job in jobs:
        job()
    times.append(now())
    return {kind: after - before for kind, before, after in zip(KINDS, times, times[1:], strict=False)}
