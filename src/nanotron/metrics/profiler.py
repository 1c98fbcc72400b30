"""torch's own profiler over a window of steps: operators, kernels and their source lines, as a Chrome trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanotron.config.general import ProfilerArgs


@contextmanager
def profiled(settings: ProfilerArgs | None, rank: int, run_dir: Path) -> Iterator[Callable[[], None]]:
    """Profile the steps that ``settings`` selects, on rank 0; call what this yields after every step.

    Traces go to ``profiler_export_path`` (``<run_dir>/traces`` when null), one ``*.pt.trace.json`` per cycle, which
    Perfetto and TensorBoard's profiler plug-in open.
    """
    if settings is None or not settings.torch_runs or rank != 0:
        yield lambda: None
        return
    from torch.profiler import profile, schedule, tensorboard_trace_handler

    folder = settings.profiler_export_path or run_dir / "traces"
    with profile(
        schedule=schedule(
            wait=settings.wait,
            warmup=settings.warmup,
            active=settings.active,
            repeat=settings.repeat,
            skip_first=settings.skip_first,
        ),
        on_trace_ready=tensorboard_trace_handler(str(folder)),
        record_shapes=settings.record_shapes,
        profile_memory=settings.profile_memory,
        with_stack=settings.with_stack,
    ) as profiler:
        yield profiler.step
