"""Metrics: what telling of a step costs beside making it, at level 0, at level 1, and where ranks are compared.

    python -m bench.metrics [--steps 30]

Printed are medians of processor time (one core's, however busy the machine is) of the example's model in one process:
a step, a measured step, and the row of each in metrics.jsonl and TensorBoard.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nanotron.check import check
from nanotron.config import Config
from nanotron.data.feed import Feed
from nanotron.metrics import Metrics
from nanotron.parallel.mesh import Mesh
from nanotron.training.control import Outcome
from nanotron.training.diagnostics import Diagnostics
from nanotron.training.step import Training

EXAMPLE = Path(__file__).parents[1] / "examples" / "config_tiny_llama.yaml"
ROW = {"lr": 1e-3, "time_per_iteration_ms": 500.0, "num_samples": 16, "num_tokens": 2048, "stage": "main"}


def timed(function: Callable[[], Any], times: list[float]) -> Any:
    start = time.process_time()
    result = function()
    times.append(time.process_time() - start)
    return result


def example() -> Config:
    """The example on one process with AdamW, microbatches of 2048 tokens; every step is measured when asked for."""
    overrides = ["parallelism.dp=1", "parallelism.tp=1", "parallelism.pp=1"]
    overrides += ["tokens.batch_accumulation_per_replica=4", "optimizer.optimizer_factory={name: adamW}"]
    config = check(EXAMPLE, overrides)
    level_1 = replace(config.metrics_logging, log_level=1, log_detail_interval=1)
    return replace(config, metrics_logging=level_1)


def rows(config: Config, folder: Path, told: list[Outcome]) -> list[float]:
    """Processor time of telling each outcome to metrics.jsonl and TensorBoard."""
    metrics = Metrics(config, Mesh(), folder, device=torch.device("cpu"))
    times: list[float] = []
    for step, outcome in enumerate(told, 1):
        values = {**ROW, "lm_loss": outcome.lm_loss, "grad_norm": outcome.grad_norm, **outcome.diagnostics}
        values |= {"consumed_samples": 16 * step, "consumed_tokens": 2048 * step}
        timed(lambda step=step, values=values: metrics.log(step, values), times)
    metrics.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    detailed = example()
    plain = replace(detailed, metrics_logging=replace(detailed.metrics_logging, log_level=0))
    training, compared = Training(detailed, Mesh(), "cpu"), Training(plain, Mesh(), "cpu")
    training.initialize()
    compared.initialize()
    feed = Feed(detailed, Mesh(), device=torch.device("cpu"))
    times: dict[str, list[float]] = {"a step": [], "a step with norms": [], "a step that times this rank": []}
    outcomes: dict[int, list[Outcome]] = {0: [], 1: []}
    for step in range(1, steps + 1):
        batches = feed.step(step).microbatches
        outcomes[0].append(timed(lambda b=batches, n=step: compared.step(n, b).read(), times["a step"]))
        outcomes[1].append(timed(lambda b=batches, n=step: training.step(n, b).read(), times["a step with norms"]))
        watch = Diagnostics(plain, Mesh(), compared.pipeline, [], work=True)
        with watch.watching(batches):
            timed(lambda b=batches, n=step: compared.step(n, b).read(), times["a step that times this rank"])
    feed.close()
    for level, told in outcomes.items():
        with tempfile.TemporaryDirectory() as folder:
            times[f"its row at level {level}"] = rows(plain, Path(folder), told)
    for name, found in times.items():
        share = median(found) / median(times["a step"])
        print(f"{name:<30} {1e3 * median(found):9.3f} ms   {share:8.2%} of a step")


if __name__ == "__main__":
    main()
