"""Whether an accelerator computes what a CPU does, keeps the host waiting, talks to itself, and resumes: bench.gpu."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu_subject import Found, Subject, asked_of, batches_of, trainer_of
from bench.shapes import Shape
from nanotron.batch import Spans, document_spans
from nanotron.config import Config
from nanotron.launch.place import has_compiler
from nanotron.ops.attention import causal_attention
from nanotron.ops.fp8 import Fp8, multiplier_of
from nanotron.ops.fused import eager, fused
from nanotron.ops.gemm import adds_in
from nanotron.ops.kernels import kernels_of
from nanotron.parallel import comm
from nanotron.parallel.mesh import options_of

ROOT = Path(__file__).parents[1]
SMALL = Shape(128, 384, 2, 4, 2, vocab_size=512, sequence_length=64, micro_batch_size=2, num_microbatches=2)
SPARSE = replace(SMALL, num_experts=8, top_k=2)
IN_BLOCKS = replace(SMALL, hidden_size=256, num_attention_heads=2, num_key_value_heads=1)
DOCUMENTS = document_spans([[0, 5, 20]] * SMALL.micro_batch_size, SMALL.sequence_length)
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}
"""Of relative differences between the device and the CPU, over three steps."""
CASES: dict[str, tuple[Shape, dict[str, Any], Spans | None]] = {
    "plain": (SMALL, {}, None),
    "documents": (SMALL, {}, DOCUMENTS),
    "loss_chunk": (SMALL, {"model.loss_chunk": 24}, None),
    "recompute_layer": (SMALL, {"parallelism.recompute_layer": True}, None),
    "selective": (SMALL, {"parallelism.recompute_layer": "selective"}, DOCUMENTS),
    "qwen3": (SMALL, {"model.model_config.is_qwen3_config": True}, DOCUMENTS),
    "experts": (SPARSE, {}, None),
    "compile": (SMALL, {"model.compile": True}, DOCUMENTS),
}


def versions(subject: Subject) -> Generator[Found]:
    """What is installed, and who computes what."""
    device, packages = subject.device, {}
    for package in ("torch", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "transformers", "numpy"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            continue
    cuda = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    yield {"device": subject.name, "known_as": subject.kind and subject.kind.name, "packages": packages, **cuda}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        yield {"memory_gib": found.total_memory / 2**30, "capability": f"{found.major}.{found.minor}"}
    yield {
        "kernels": kernels_of(device),
        "compiles_by_default": has_compiler(device),
        "weight_gradients_added_in_float32": adds_in(torch.float32, torch.bfloat16, device.type),
        "fp8": multiplier_of(device, torch.bfloat16),
    }
    for name, spans in (("rows", None), ("documents", DOCUMENTS)):
        yield {"attention_to": name, "is": _kernels(device, spans)}


def _kernels(device: torch.device, spans: Spans | None) -> list[str]:
    """The kernels of one attention in bfloat16, by the profiler."""
    shape = (SMALL.micro_batch_size, SMALL.sequence_length, SMALL.num_attention_heads, SMALL.head_dim)
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    on_device = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_device else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        causal_attention(q, k, v, spans, kernels=kernels_of(device))
    return sorted({event.key for event in profile.key_averages()})


def parity(subject: Subject) -> Generator[Found]:
    """Three steps from equal weights: the device's losses and gradient norms beside the CPU's."""
    for dtype, tolerance in TOLERANCES.items():
        for name, (shape, keys, spans) in CASES.items():
            config = asked_of(shape, dtype, keys)
            plain = asked_of(shape, dtype, keys | {"model.compile": False})  # on the CPU: its compiler takes minutes
            here = _three_steps(config, shape, spans, subject.device)
            there = _three_steps(plain, shape, spans, torch.device("cpu"))
            loss, norm = (
                max(abs(a - b) / abs(b) for a, b in zip(*pair, strict=True)) for pair in zip(here, there, strict=True)
            )
            yield {"case": name, "dtype": dtype, "loss": loss, "norm": norm, "ok": max(loss, norm) < tolerance}


def _three_steps(
    config: Config, shape: Shape, spans: Spans | None, device: torch.device
) -> tuple[list[float], list[float]]:
    training, batches = trainer_of(config, device, drawn=True), batches_of(shape, device, spans)
    outcomes = [training.step(update, batches).read() for update in (1, 2, 3)]
    return [outcome.lm_loss for outcome in outcomes], [outcome.grad_norm for outcome in outcomes]


def fp8(subject: Subject) -> Generator[Found]:
    """Products in fp8 beside those of the same numbers in float32, and three steps beside the CPU's."""
    device, tolerance = subject.device, 5e-3  # the kernel adds up in less than float32
    for dtype in (torch.bfloat16, torch.float32):
        by = multiplier_of(device, dtype)
        for m, n, k in ((64, 128, 128), (30, 384, 640)):
            x, g, w = (torch.randn(shape, dtype=dtype, device=device) for shape in ((m, k), (m, n), (n, k)))
            for name, left, right in (("forward", x, w), ("backward", g, w.t())):
                (exact,) = Fp8("dequantised", kernels_of(device)).gemms(left.float(), [right.float()])
                for how, fuse in (("as written", eager), ("compiled", fused)):
                    (found,) = Fp8(by, kernels_of(device), fuse).gemms(left, [right])
                    error = float((found - exact).norm() / exact.norm())
                    shape = {"of": name, "rounding": how, "m": m, "n": n, "k": k, "dtype": str(dtype)}
                    yield {"by": by, **shape, "difference": error, "ok": error < tolerance}
    here, there = (
        _three_steps(asked_of(IN_BLOCKS, "bfloat16", {"model.fp8": "block128"}), IN_BLOCKS, None, place)
        for place in (device, torch.device("cpu"))
    )
    loss = max(abs(a - b) / b for a, b in zip(here[0], there[0], strict=True))
    yield {"case": "fp8", "dtype": "bfloat16", "loss": loss, "ok": loss < TOLERANCES["bfloat16"]}


def waits(subject: Subject) -> Generator[Found]:
    """The third step of each case, in which a wait of the host for the device raises; but for experts' one read."""
    for name, (shape, keys, spans) in CASES.items():
        if shape.num_experts:
            continue
        training = trainer_of(asked_of(shape, "bfloat16", keys), subject.device, drawn=True)
        batches = batches_of(shape, subject.device, spans)
        for update in (1, 2):
            training.step(update, batches).read()
        with _no_waits(subject.device):
            word = training.step(3, batches)
            word.begin_read()
        yield {"case": name, "ok": word.read().finite}


@contextmanager
def _no_waits(device: torch.device) -> Iterator[None]:
    """Have torch raise where the host would wait for a CUDA device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def collectives(subject: Subject) -> Generator[Found]:
    """Each word in a group of this process alone, where it gives back what it was given."""
    on_device, store = subject.device.type != "cpu", dist.HashStore()
    backend = dist.get_default_backend_for_device(subject.device)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=subject.device if on_device else None)
    try:
        group, x = dist.group.WORLD, torch.arange(24.0, device=subject.device).view(2, 3, 4)
        words: dict[str, Callable[[], Tensor]] = {
            "all_reduce": lambda: comm.all_reduce(x, group),
            "all_gather": lambda: comm.all_gather(x, group, 1),
            "reduce_scatter": lambda: comm.reduce_scatter(x, group, 1),
            "all_to_all": lambda: comm.all_to_all(x, group, 0, 1),
            "all_to_all_rows": lambda: comm.all_to_all_rows(x, group, [2], [2]),
            "begin_all_reduce": lambda: comm.begin_all_reduce_(x.clone(), group)(),
            "begin_all_gather": lambda: comm.begin_all_gather(x, group, 1)(),
            "begin_reduce_scatter": lambda: comm.begin_reduce_scatter(x, group, 1)(),
            "start_all_gather": lambda: _awaited(comm.start_all_gather, x.flatten()).view_as(x),
            "all_reduce that is urgent": lambda: comm.all_reduce(
                x, dist.new_group([0], pg_options=options_of("compute"))
            ),
            "start_reduce_scatter": lambda: _awaited(comm.start_reduce_scatter, x.flatten()).view_as(x),
        }
        for name, word in words.items():
            yield {"word": name, "backend": backend, "ok": torch.equal(word(), x)}
    finally:
        dist.destroy_process_group()


def _awaited(start: Callable[..., Any], source: Tensor) -> Tensor:
    into = torch.empty_like(source)
    work = start(into, source, dist.group.WORLD)
    assert work is not None, "an asynchronous collective has a Work to wait for"
    work.wait()
    return into


def resume(subject: Subject) -> Generator[Found]:
    """Kill a run after a checkpoint, start it again, and compare the steps that both made."""
    with TemporaryDirectory() as folder:
        run, config = Path(folder, "run"), Path(folder, "tiny.yaml")
        keys = {
            "general.deterministic": not subject.dry,
            "checkpoints.checkpoints_path": str(run),
            "checkpoints.checkpoint_interval": 4,
            "tokens.train_steps": 100_000,
            "logging.tensorboard": False,
            "general.threads_per_rank": 1,
        }
        shape = replace(SMALL, vocab_size=4096)  # that of the corpus at hand
        asked_of(shape, "bfloat16", keys).save_as_yaml(config)
        start = [sys.executable, "run_train.py", "--config-file", str(config)]
        process = subprocess.Popen(start, cwd=ROOT, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (saved := _saved_before(run)):
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert saved, f"the run ended with exit code {process.returncode} before it could be killed"
        before, last = _losses(run), max(_losses(run))
        yield {"killed_after_step": last, "saved": saved}
        again = subprocess.run([*start, "--override", f"tokens.stop_after={last}"], cwd=ROOT, stdout=subprocess.DEVNULL)
        after = _losses(run)
        differences = [abs(before[step] - after[step]) for step in range(saved + 1, last + 1) if step in after]
        equal = again.returncode == 0 and max(after) == last and not any(differences)
        yield {"steps_made_twice": len(differences), "largest_difference": max(differences, default=None), "ok": equal}


def _saved_before(run: Path) -> int | None:
    """The newest checkpoint after which a step has been made."""
    steps = [int(index.parent.name) for index in run.glob("*/index.json")]
    newest = max(steps, default=None)
    return newest if newest is not None and max(_losses(run), default=0) > newest else None


def _losses(run: Path) -> dict[int, float]:
    """Of each step on record; the last line may be half written."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row["lm_loss"] for row in rows}
