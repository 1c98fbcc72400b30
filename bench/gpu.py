"""`python -m bench.gpu`: MFU on one accelerator, ours as written and compiled beside transformers; ends in 10 minutes.

bfloat16, sequences of 4,096 tokens, Llamas of about 0.3 and 1.3 billion parameters, all contenders alternating in one
process. The goal is an MFU of at least 50 % for ours. Without an accelerator it says so and ends with exit code 2;
`--dry-run` goes through the same lines on a CPU with a tiny model, and its figures mean nothing.

Each contender's turn is a line of JSON as soon as it is over, in a file too with `--out`; whoever raises is left out
from there on with a line and a traceback, and the others go on.

Nobody has run it on a GPU yet. torchtitan is not among the contenders: bench/peers/torchtitan_setup.py is for CPUs.
The contenders of a size are in memory together: for 1.3 billion parameters that takes about 100 GB.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from bench.ours import config_of
from bench.report import flops_per_token
from bench.shapes import SHAPES, Shape
from bench.work import microbatches
from nanotron.batch import Batch
from nanotron.metrics.devices import Device, find_device, known_devices
from nanotron.parallel.mesh import Mesh
from nanotron.training.step import Training

NOTHING_RAN, NO_ACCELERATOR = 1, 2  # exit codes
LIMIT_S = 540.0  # after which no further round begins
WARM_UP, ROUNDS, STEPS = 3, 8, 3  # steps before the first round; rounds; steps of a contender's turn
DRY_ROUNDS = 1
BATCH: dict[str, int] = {"vocab_size": 32_000, "sequence_length": 4096, "micro_batch_size": 2, "num_microbatches": 4}
SIZES = {
    "0.3B": Shape(1024, 2816, 18, 16, 16, **BATCH),
    "1.3B": Shape(2048, 5376, 24, 16, 16, **BATCH),
}
Step = Callable[[], float]
Tell = Callable[[dict[str, Any]], None]


class Row(NamedTuple):
    """One contender's figures at one size."""

    size: str
    contender: str
    tokens_per_second: float
    slowest: float
    fastest: float
    mfu: float | None
    """None when the device's peak is not known."""


def ours(shape: Shape, device: torch.device, *, compiled: bool) -> Step:
    """The trainer's own step, its control word read."""
    config = config_of({"shape": asdict(shape), "dtype": "bfloat16", "config": {"model.compile": compiled}})
    training = Training(config, Mesh(), device)
    with torch.no_grad():  # on the device: drawing a billion numbers by name would take minutes of the time there is
        for weight in training.chunks[0].weights.values():
            weight.fill_(1.0) if weight.ndim == 1 else weight.normal_(std=0.02)
    training.optimizer.load_masters_from_weights()
    positions = torch.arange(shape.sequence_length, device=device).expand(shape.micro_batch_size, -1)
    batches = [Batch(tokens.to(device), labels.to(device), positions) for tokens, labels in microbatches(shape)]
    update = 0

    def step() -> float:
        nonlocal update
        update += 1
        return training.step(update, batches).read().lm_loss

    return step


def hugging_face(shape: Shape, device: torch.device, *, compiled: bool) -> Step:
    """transformers with float32 weights under autocast, as its Trainer does bf16."""
    from bench.peers.hugging_face import build
    from bench.peers.loop import training_step

    with device:
        model = build(shape, None)
    forward = torch.compile(model) if compiled else model
    batches = [(tokens.to(device), labels.to(device)) for tokens, labels in microbatches(shape)]
    return training_step(
        lambda tokens, labels: forward(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss,
        model.parameters(),
        batches,
        around_forward=torch.autocast(device.type, torch.bfloat16),
    )


CONTENDERS: dict[str, Callable[[Shape, torch.device], Step]] = {
    "ours": lambda shape, device: ours(shape, device, compiled=False),
    "ours, compile": lambda shape, device: ours(shape, device, compiled=True),
    "transformers": lambda shape, device: hugging_face(shape, device, compiled=False),
    "transformers, compile": lambda shape, device: hugging_face(shape, device, compiled=True),
}


def compare(
    size: str, shape: Shape, device: torch.device, kind: Device | None, end: float, rounds: int, tell: Tell
) -> list[Row]:
    """Alternate all contenders at one size; none begins a round after ``end``, a moment of `time.perf_counter`."""
    steps: dict[str, Step] = {}
    for name, build in CONTENDERS.items():
        with _left_out_if_it_raises(size, name, steps):
            steps[name] = build(shape, device)
            for _ in range(WARM_UP):
                steps[name]()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(1, rounds + 1):
        if all(seconds[name] for name in steps) and time.perf_counter() > end:
            break
        for name in list(steps):
            with _left_out_if_it_raises(size, name, steps):
                start = time.perf_counter()
                for _ in range(STEPS):
                    steps[name]()  # reads a number at its end, so the device has finished
                seconds[name].append((time.perf_counter() - start) / STEPS)
                tell({"size": size, "contender": name, "round": number, "seconds_per_step": seconds[name][-1]})
    return [_row(size, name, shape, found, kind) for name, found in seconds.items() if found]


@contextmanager
def _left_out_if_it_raises(size: str, name: str, steps: dict[str, Step]) -> Iterator[None]:
    """Take a contender that raises out of ``steps``, with what it holds of the device, and say so."""
    try:
        yield
    except Exception as error:
        steps.pop(name, None)
        print(f"{size} {name}: left out, {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        traceback.print_exception(error)
        error.__traceback__ = None  # its frames hold the model
        gc.collect()


def _row(size: str, name: str, shape: Shape, seconds: list[float], kind: Device | None) -> Row:
    tokens, peak = shape.tokens_per_step, kind.peak_flops.get("bfloat16") if kind else None
    rate = tokens / median(seconds)
    mfu = rate * flops_per_token(shape) / peak if peak else None
    return Row(size, name, rate, tokens / max(seconds), tokens / min(seconds), mfu)


def table(rows: list[Row]) -> str:
    """One line for each contender and size."""
    lines = [f"{'size':<6}{'contender':<24}{'tokens/s':>12}{'slowest':>12}{'fastest':>12}{'MFU':>8}"]
    for row in rows:
        mfu = "" if row.mfu is None else f"{row.mfu:.1%}"
        rates = f"{row.tokens_per_second:>12,.0f}{row.slowest:>12,.0f}{row.fastest:>12,.0f}"
        lines.append(f"{row.size:<6}{row.contender:<24}{rates}{mfu:>8}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="MFU on one accelerator.")
    parser.add_argument("--size", choices=SIZES, action="append", help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, help="a file that every line of JSON is appended to as well")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU: shows that the script runs")
    asked = parser.parse_args(arguments)
    if not (asked.dry_run or torch.accelerator.is_available()):
        print("bench.gpu: this machine has no accelerator; --dry-run shows on a CPU that it runs", file=sys.stderr)
        return NO_ACCELERATOR
    device, kind, name = torch.device("cpu"), known_devices().get("cpu"), "cpu"
    sizes, rounds = {"tiny": SHAPES["tiny"]}, DRY_ROUNDS
    if not asked.dry_run:
        device = torch.device(torch.accelerator.current_accelerator() or "cpu", 0)
        name = str(torch.get_device_module(device).get_device_name(device))
        kind = find_device(name)
        sizes, rounds = {size: SIZES[size] for size in asked.size or SIZES}, ROUNDS

    def tell(found: dict[str, Any]) -> None:
        line = json.dumps(found)
        print(line, flush=True)
        if asked.out is not None:
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    rows, start = [], time.perf_counter()
    for index, (size, shape) in enumerate(sizes.items(), 1):
        found = compare(size, shape, device, kind, start + LIMIT_S * index / len(sizes), rounds, tell)
        print(f"{name}, torch {torch.__version__}", table(found), sep="\n", flush=True)
        rows += found
    tell(_plain(name, rows))
    return 0 if rows else NOTHING_RAN


def _plain(name: str, rows: list[Row]) -> dict[str, Any]:
    return {"device": name, "torch": str(torch.__version__), "rows": [row._asdict() for row in rows]}


if __name__ == "__main__":
    sys.exit(main())
