"""Pipeline schedules on two processes: ours beside torch.distributed.pipelining, alternating, and what was predicted.

    python -m bench.pipeline [--rounds 9] [--microbatches 4 8] [--layers 9] [--hidden 256]

Every round runs each contender once, forward and backward of one batch, without an optimizer. Printed are medians over
the rounds. Predicted times come from `execute`, with the costs measured in the same runs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from statistics import median
from time import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench.peers.pipelining import TorchPipeline
from nanotron.batch import Batch
from nanotron.config import Config, get_config_from_dict
from nanotron.parallel.mesh import Mesh
from nanotron.pipeline.engine import Pipeline
from nanotron.pipeline.timeline import Span, Timeline, execute
from nanotron.pipeline.trace import costs_of
from nanotron.training.build import build_chunks, chunk_options
from nanotron.training.topology import layers_of_stages, modules_of_ranks, pipeline_schedule

RANKS, ROWS, TOKENS, VOCABULARY = 2, 4, 256, 4096
OURS = ("1f1b", "zb_h1", "zbv")
Contender = Callable[[], list[Span]]  # runs one batch and returns what it recorded


def config_of(schedule: str, microbatches: int, options: argparse.Namespace) -> Config:
    """The reference model, cut by our own rule, for ours and torch's alike."""
    return get_config_from_dict(
        {
            "parallelism": {"pp": RANKS, "pp_engine": schedule},
            "model": {
                "dtype": "float32",
                "model_config": {
                    "hidden_size": options.hidden,
                    "intermediate_size": 3 * options.hidden,
                    "num_hidden_layers": options.layers,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "vocab_size": VOCABULARY,
                },
            },
            "tokens": {
                "sequence_length": TOKENS,
                "micro_batch_size": ROWS,
                "batch_accumulation_per_replica": microbatches,
            },
            "optimizer": {"learning_rate_scheduler": {"learning_rate": 1e-3}},
        }
    )


def tokens_of(microbatches: int) -> Tensor:
    """The same batch everywhere: [m·b, s]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (microbatches * ROWS, TOKENS), generator=generator)


def ours(mesh: Mesh, name: str, microbatches: int, options: argparse.Namespace) -> Contender:
    """One of our schedules."""
    config = config_of(name, microbatches, options)
    schedule, buffers = pipeline_schedule(config), []
    chunks = build_chunks(config, Mesh(), modules_of_ranks(config)[mesh.coord("pp")], chunk_options(config, "cpu"))
    for chunk in chunks:
        chunk.initialize(0)
        for weight in chunk.weights.values():
            buffers.append(torch.zeros_like(weight))
            chunk.hooks.weight_grads.bind(weight, buffers[-1].detach)
    pipeline = Pipeline(chunks, schedule, mesh, hidden_size=options.hidden, dtype=torch.float32, device="cpu")
    positions = torch.arange(TOKENS).expand(ROWS, TOKENS)
    batches = [Batch(part, part, positions) for part in tokens_of(microbatches).chunk(microbatches)]

    def run() -> list[Span]:
        for buffer in buffers:
            buffer.zero_()
        pipeline.spans = []
        pipeline.run(batches, 1.0)
        return pipeline.spans

    return run


def theirs(mesh: Mesh, name: str, microbatches: int, options: argparse.Namespace) -> Contender:
    """torch's schedule of the same kind, on a plain model of the same shape."""
    config = config_of(name, microbatches, options)
    layers = [hi - lo for lo, hi in layers_of_stages(config)]
    batches = [(part, part) for part in tokens_of(microbatches).chunk(microbatches)]

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")

    shape, rank = config.model.model_config, mesh.coord("pp")
    pipeline = TorchPipeline(name, shape, layers, batches, loss, rank=rank, ranks=RANKS)

    def run() -> list[Span]:
        for module in pipeline.modules:
            module.zero_grad(set_to_none=True)
        pipeline.run()
        return []

    return run


def measure(rank: int, init: str, microbatches: int, options: argparse.Namespace, results: str) -> None:
    """One rank of the whole comparison; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=RANKS)
    mesh = Mesh({"pp": RANKS}, rank)
    mesh.create_groups()
    contenders = {f"ours {name}": ours(mesh, name, microbatches, options) for name in OURS}
    contenders |= {f"torch {name}": theirs(mesh, name, microbatches, options) for name in ("1f1b", "zbv")}
    rows: dict[str, list[tuple[float, list[Span]]]] = {name: [] for name in contenders}
    for _ in range(options.rounds + 1):
        for name, contender in contenders.items():
            dist.barrier()
            start = time()
            spans = contender()
            gathered: list[tuple[float, float, list[Span]]] = [(0.0, 0.0, [])] * RANKS
            dist.all_gather_object(gathered, (start, time(), spans))
            duration = max(end for _, end, _ in gathered) - min(begin for begin, _, _ in gathered)
            rows[name].append((duration, [span for _, _, found in gathered for span in found]))
    if rank == 0:
        torch.save({name: found[1:] for name, found in rows.items()}, results)  # the first round warms up
    dist.barrier()
    dist.destroy_process_group()


def report(microbatches: int, options: argparse.Namespace) -> None:
    """Run the comparison in fresh processes and print its table."""
    with tempfile.TemporaryDirectory() as folder:
        results = f"{folder}/results"
        torch.multiprocessing.spawn(measure, (f"file://{folder}/store", microbatches, options, results), nprocs=RANKS)  # type: ignore[no-untyped-call]
        rows = torch.load(results, weights_only=False)
    base = median(duration for duration, _ in rows["ours 1f1b"])
    size = f"{microbatches} microbatches of {ROWS} × {TOKENS} tokens, {options.layers} layers of {options.hidden}"
    print(f"\n{RANKS} ranks, {size}\n{'':<15}  step ms  vs ours 1f1b  spread  bubble  predicted ms  predicted bubble")
    for name, found in rows.items():
        times = [duration for duration, _ in found]
        middle = median(times)
        spread = (max(times) - min(times)) / middle
        line = f"{name:<15}{middle * 1e3:>9.1f}{base / middle:>13.3f}×{spread:>8.1%}"
        if found[0][1]:
            line += _against_prediction(name.split()[1], microbatches, [spans for _, spans in found], options)
        print(line)


def _against_prediction(name: str, microbatches: int, runs: list[list[Span]], options: argparse.Namespace) -> str:
    """Measured bubble, and time and bubble as predicted from the costs of all rounds."""
    schedule = pipeline_schedule(config_of(name, microbatches, options))
    measured = [Timeline(name, RANKS, spans) for spans in runs]
    costs = [costs_of(timeline) for timeline in measured]
    predicted = execute(
        schedule, microbatches, lambda kind, stage: median(cost(kind, stage) for cost in costs), eager_weights=True
    )
    bubble = median(timeline.bubble for timeline in measured)
    return f"{bubble:>8.1%}{predicted.duration * 1e3:>14.1f}{predicted.bubble:>18.1%}"


def main() -> None:
    """Parse the options and report on every number of microbatches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--layers", type=int, default=9, help="9: with the head, two stages of equal work")
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    for microbatches in options.microbatches:
        report(microbatches, options)


if __name__ == "__main__":
    main()
