"""How fast an accelerator trains, beside its peak, the plan and transformers: bench.gpu."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.gpu_subject import Found, Subject, asked_of, batches_of, trainer_of
from bench.report import flops_per_token
from bench.shapes import SHAPES, Shape
from bench.work import microbatches
from nanotron.batch import document_spans
from nanotron.checkpoint.write import host_memory
from nanotron.metrics.memory import memory_gib
from nanotron.metrics.step_clock import Moment
from nanotron.ops.attention import causal_attention
from nanotron.ops.fp8 import Fp8, multiplier_of
from nanotron.ops.fused import eager, fused, rms_norm, swiglu
from nanotron.ops.gemm import add_gemm, gemm
from nanotron.ops.kernels import kernels_of
from nanotron.plan.hardware import Cluster
from nanotron.plan.predict import Planner

WARM_UP, ROUNDS, STEPS = 3, 8, 3  # steps before the first round; rounds; steps of a contender's turn
DRY_ROUNDS = 1
BATCH: dict[str, int] = {"vocab_size": 32_000, "sequence_length": 4096, "micro_batch_size": 2, "num_microbatches": 4}
SIZES = {
    "0.3B": Shape(1024, 2816, 18, 16, 16, **BATCH),
    "1.3B": Shape(2048, 5376, 24, 16, 16, **BATCH),
}
Step = Callable[[], float]


def ours(shape: Shape, device: torch.device, *, compiled: bool) -> Step:
    """The trainer's own step, its control word read."""
    training = trainer_of(asked_of(shape, "bfloat16", {"model.compile": compiled}), device, drawn=False)
    batches, update = batches_of(shape, device), 0

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


Build = Callable[[Shape, torch.device], Step]
OURS: dict[str, Build] = {
    "ours": lambda shape, device: ours(shape, device, compiled=False),
    "ours, compile": lambda shape, device: ours(shape, device, compiled=True),
}
CONTENDERS: dict[str, Build] = {
    **OURS,
    "transformers": lambda shape, device: hugging_face(shape, device, compiled=False),
    "transformers, compile": lambda shape, device: hugging_face(shape, device, compiled=True),
}


def alone(subject: Subject) -> Generator[Found]:
    """Ours, one after another, so that the peak of memory is each one's own; first what the planner says."""
    shape = SHAPES["tiny"] if subject.dry else SIZES["1.3B"]
    if subject.kind is not None:
        plan = Planner(Cluster(subject.kind, 1)).plan(asked_of(shape, "bfloat16", {}), every_layer=True)
        planned = {"memory_gib": plan.worst.memory.total / 2**30, "tokens_per_second": plan.tokens_per_second}
        yield {"contender": "the plan", **planned}
    for name, build in OURS.items():
        if subject.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(subject.device)
        step = build(shape, subject.device)
        for _ in range(WARM_UP):
            step()
        seconds = [_seconds(step) for _ in range(DRY_ROUNDS if subject.dry else ROUNDS)]
        yield {"contender": name, **_rates(subject, shape, seconds), "memory_gib": memory_gib(subject.device)}
        del step


def in_turns(subject: Subject) -> Generator[Found]:
    """All contenders in memory together, one turn each in every round; one that raises is left out from there on."""
    shape = SHAPES["tiny"] if subject.dry else SIZES["0.3B"]
    steps: dict[str, Step] = {}
    seconds: dict[str, list[float]] = {}

    def attempt(name: str, action: Callable[[], None]) -> Generator[Found]:
        try:
            action()
        except Exception as error:
            steps.pop(name, None)
            error.__traceback__ = None  # its frames hold the model
            yield {"contender": name, "left_out": f"{type(error).__name__}: {error}", "ok": False}

    def begin(name: str) -> None:
        steps[name] = CONTENDERS[name](shape, subject.device)
        for _ in range(WARM_UP):
            steps[name]()

    for name in CONTENDERS:
        yield from attempt(name, lambda name=name: begin(name))
    for number in range(1, 1 + (DRY_ROUNDS if subject.dry else ROUNDS)):
        for name in list(steps):
            yield from attempt(name, lambda name=name: seconds.setdefault(name, []).append(_seconds(steps[name])))
            if name in steps:
                yield {"contender": name, "round": number, **_rates(subject, shape, seconds[name])}


def _seconds(step: Step) -> float:
    """Of one step; each reads a number at its end, so the device has finished."""
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start) / STEPS


def _rates(subject: Subject, shape: Shape, seconds: list[float]) -> Found:
    """Of the median turn so far, and of the slowest and fastest."""
    tokens, peak = shape.tokens_per_step, subject.kind.peak_flops.get("bfloat16") if subject.kind else None
    rate = tokens / median(seconds)
    return {
        "tokens_per_second": rate,
        "slowest": tokens / max(seconds),
        "fastest": tokens / min(seconds),
        "mfu": rate * flops_per_token(shape) / peak if peak else None,
    }


def kernels(subject: Subject) -> Generator[Found]:
    """Milliseconds of single pieces of work in bfloat16, at a large model's sizes; GEMMs in TFLOP/s too."""
    n, d, f, h, s = (32, 128, 256, 2, 64) if subject.dry else (8192, 4096, 14336, 32, 4096)
    device, kind = subject.device, kernels_of(subject.device)
    x, g, w = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in ((n, d), (n, f), (f, d)))
    total = torch.zeros(f, d, device=device)
    flops = 2 * n * d * f
    yield _timed(device, "GEMM", lambda: gemm(x, w, kernels=kind), flops)
    in_fp8 = Fp8(multiplier_of(device, x.dtype), kind, eager if subject.dry else fused)
    yield _timed(device, "GEMM in fp8, with its rounding", lambda: in_fp8.gemms(x, [w]), flops)
    yield _timed(device, "weight gradient, added up by the GEMM", lambda: add_gemm(total, g, x, kernels=kind), flops)
    yield _timed(device, "weight gradient, then added", lambda: add_gemm(total, g, x, kernels="cpu"), flops)
    q, k, v = (torch.randn(2, s, h, d // h, dtype=torch.bfloat16, device=device).requires_grad_() for _ in range(3))
    documents = document_spans([list(range(0, s, s // 8))] * 2, s)
    for name, spans in (("attention, rows", None), ("attention, 8 documents", documents)):

        def attend(spans: Any = spans) -> None:
            causal_attention(q, k, v, spans, kernels=kind).sum().backward()

        yield _timed(device, f"{name}, forward and backward", attend)
    norm = torch.ones(d, dtype=torch.bfloat16, device=device)
    for how, fuse in (("as written", eager), ("compiled", fused)):
        yield _timed(device, f"rms_norm, {how}", lambda fuse=fuse: fuse(rms_norm)(x, norm, 1e-5))
        yield _timed(device, f"swiglu, {how}", lambda fuse=fuse: fuse(swiglu)(g))
    source = total.view(torch.uint8).view(-1)
    memories: dict[str, Tensor] = {
        "registered": host_memory(source.numel(), {device.type}),
        "ordinary": torch.empty(source.numel(), dtype=torch.uint8),
    }
    for name, memory in memories.items():
        found = _timed(device, f"copy to {name} memory", lambda memory=memory: memory.copy_(source, non_blocking=True))
        yield found | {"gb_per_second": source.numel() / found["ms"] / 1e6}


def _timed(device: torch.device, name: str, work: Callable[[], Any], flops: int | None = None) -> Found:
    """The median of ten, after three."""
    for _ in range(3):
        work()
    times = []
    for _ in range(10):
        began = Moment(device)
        work()
        times.append(Moment(device).ms_since(began))
    ms = median(times)
    return {"of": name, "ms": ms} | ({"tflops": flops / ms / 1e9} if flops else {})
