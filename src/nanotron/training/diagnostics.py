"""What a measured step tells beyond its control word, in one further all-reduce; ordinary steps know nothing of it.

    every metrics_logging.log_detail_interval steps     norms of every parameter, gradient, update and activation
      at log_level 1
    every metrics_logging.straggler_interval steps      who works longest, who holds the most memory
      with more than one rank

Norms are those of the whole parameter and of the whole global batch, whatever the layout.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.batch import Batch
from nanotron.metrics.columns import (
    ACTIVATION_NORM,
    FULLEST_RANK,
    FULLEST_RANK_GIB,
    GRAD_NORM,
    MEDIAN_RANK_MS,
    SLOWEST_RANK,
    SLOWEST_RANK_MS,
    UPDATE_RATIO,
    WEIGHT_NORM,
)
from nanotron.metrics.memory import memory_gib
from nanotron.ops.chunk import Chunk
from nanotron.optim.norms import StepSquares
from nanotron.optim.optimizer import Optimizer
from nanotron.parallel.comm import all_reduce_
from nanotron.parallel.mesh import Mesh
from nanotron.pipeline.engine import Pipeline
from nanotron.training.host_copy import HostCopy
from nanotron.training.topology import parameter_specs

if TYPE_CHECKING:
    from nanotron.config import Config


def diagnostics_of(
    update: int, config: Config, mesh: Mesh, pipeline: Pipeline, chunks: Sequence[Chunk]
) -> Diagnostics | None:
    """What is to be measured of this update; None in ordinary steps. The same on every rank."""
    asked = config.metrics_logging
    norms = asked.log_level > 0 and update % asked.log_detail_interval == 0
    interval = asked.straggler_interval
    work = mesh.world > 1 and interval is not None and update % interval == 0
    return Diagnostics(config, mesh, pipeline, chunks if norms else [], work=work) if norms or work else None


class Diagnostics:
    """The measurements of one step, in the order of their calls; ``read`` gives the columns of the step's row."""

    def __init__(self, config: Config, mesh: Mesh, pipeline: Pipeline, chunks: Sequence[Chunk], *, work: bool) -> None:
        """``chunks``: those whose norms are measured; none when only the ranks' work is."""
        norms = bool(chunks)
        self._mesh, self._pipeline, self._chunks, self._norms, self._work = mesh, pipeline, chunks, norms, work
        self._names = list(parameter_specs(config)) if norms else []
        num_layers = config.model.model_config.num_hidden_layers
        self._places = ["embed", *(f"layers.{i}" for i in range(num_layers))] if norms else []
        self._counts_activations = config.parallelism.sequence_parallel or mesh.coord("tp") == 0
        self._squares: StepSquares | None = None
        self._tokens, self._busy_seconds = 1, 0.0
        self._word = torch.empty(0)
        self._host_copy: HostCopy | None = None

    @contextmanager
    def watching(self, microbatches: Sequence[Batch]) -> Iterator[None]:
        """Around the forward and backward of all microbatches."""
        parts = len(self._mesh.ranks_along(*self._mesh.data_parts))  # of the global batch, equal ones
        self._tokens = sum(batch.tokens.numel() for batch in microbatches) * parts
        with ExitStack() as around:
            for chunk in self._chunks:
                around.enter_context(chunk.hooks.measuring())
            seconds = around.enter_context(_working(self._pipeline)) if self._work else []
            yield
        self._busy_seconds = sum(seconds)

    def before_update(self, optimizer: Optimizer) -> None:
        """When the gradients are complete."""
        if self._norms:
            self._squares = StepSquares(optimizer, self._names)

    def after_update(self) -> None:
        """When the weights have changed: add up all ranks' measurements."""
        device = self._pipeline.device
        parts = []
        if self._squares is not None:
            self._squares.after_update()
            parts = [self._squares.squares.view(-1), self._activations()]
        if self._work:
            mine = torch.zeros(2, self._mesh.world, dtype=torch.float64)  # a column for each rank
            mine[:, self._mesh.rank] = torch.tensor([self._busy_seconds, memory_gib(device)], dtype=torch.float64)
            parts.append(mine.view(-1).to(device, non_blocking=True))
        self._word = all_reduce_(torch.cat(parts), self._mesh.world_group())

    def begin_read(self) -> None:
        """Send the measurements to the host."""
        self._host_copy = HostCopy(self._word)

    def read(self) -> dict[str, float]:
        """Wait for the measurements, which are on their way; further columns of the step's row."""
        assert self._host_copy is not None
        numbers = self._host_copy.read()
        columns = {}
        if self._norms:
            columns = self._norm_columns(numbers)
            numbers = numbers[3 * len(self._names) + len(self._places) :]
        return columns | (_work_columns(numbers[: self._mesh.world], numbers[self._mesh.world :]) if self._work else {})

    def _activations(self) -> Tensor:
        found = self._pipeline.metrics if self._counts_activations else {}
        zero = torch.zeros((), dtype=torch.float64, device=self._pipeline.device)
        return torch.stack([found.get(place, zero) for place in self._places])

    def _norm_columns(self, squares: Sequence[float]) -> dict[str, float]:
        """Weights before the update, gradients before clipping; activations as the root mean square over tokens."""
        count = len(self._names)
        weights, grads, updates = ([_root(value) for value in squares[i * count :][:count]] for i in range(3))
        activations = [_root(value / self._tokens) for value in squares[3 * count :][: len(self._places)]]
        return {
            **{f"{WEIGHT_NORM}/{name}": norm for name, norm in zip(self._names, weights, strict=True)},
            **{f"{GRAD_NORM}/{name}": norm for name, norm in zip(self._names, grads, strict=True)},
            **{
                f"{UPDATE_RATIO}/{name}": update / weight
                for name, update, weight in zip(self._names, updates, weights, strict=True)
                if weight != 0  # a bias that is still zero has no ratio
            },
            **{f"{ACTIVATION_NORM}/{place}": norm for place, norm in zip(self._places, activations, strict=True)},
        }


def _work_columns(busy_seconds: Sequence[float], memory: Sequence[float]) -> dict[str, float]:
    slowest, fullest = (max(range(len(values)), key=values.__getitem__) for values in (busy_seconds, memory))
    return {
        SLOWEST_RANK: slowest,
        SLOWEST_RANK_MS: busy_seconds[slowest] * 1e3,
        MEDIAN_RANK_MS: median(busy_seconds) * 1e3,
        FULLEST_RANK: fullest,
        FULLEST_RANK_GIB: memory[fullest],
    }


def _root(square: float) -> float:
    return square**0.5 if square >= 0 else square  # a negative square cannot be; NaN stays NaN


@contextmanager
def _working(pipeline: Pipeline) -> Iterator[list[float]]:
    """Fills the list with the seconds that this rank works in the pipeline's actions, what it waits for left out."""
    traced = pipeline.spans  # a list when this step's timeline is recorded too
    pipeline.spans = [] if traced is None else traced
    waits = _Waits(pipeline.device)
    seconds: list[float] = []
    with waits:
        yield seconds
    seconds += [span.end - span.start for span in pipeline.spans]
    seconds.append(-waits.seconds)
    pipeline.spans = traced


class _Waits(TorchDispatchMode):
    """Adds up the time of those collectives that their caller waits for: inside an action, those over tp."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self.seconds = device, 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False keeps torch from importing its compiler (seconds, on every rank) when the mode is entered."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d" or _is_asynchronous(func, args):
            return func(*args, **(kwargs or {}))
        start = self._now()
        result = func(*args, **(kwargs or {}))
        work = Work.unbox(result[-1])
        if work is not None:  # NCCL has none where the caller waits: its stream does so by itself
            work.wait()  # the caller does so next
        self.seconds += self._now() - start
        return result

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()
        return time.perf_counter()


def _is_asynchronous(func: Any, args: Sequence[Any]) -> bool:
    """Whether the caller of a collective goes on meanwhile; transfers, which have no such argument, always do."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "async_op":
            return bool(args[position]) if position < len(args) else True
    return True
