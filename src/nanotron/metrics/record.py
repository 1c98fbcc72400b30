"""The record of a run: one row of numbers per step, told alike to the console and to every sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanotron.logging import get_logger, human_duration, human_format
from nanotron.metrics.columns import (
    EXPERT_LOAD,
    FULLEST_RANK,
    FULLEST_RANK_GIB,
    LAYOUT,
    MEDIAN_RANK_MS,
    ROLLBACK_LOST_S,
    SLOWEST_HOST,
    SLOWEST_RANK,
    SLOWEST_RANK_MS,
    SLOWEST_SINCE,
    TIME_MS,
    UNIX_S,
)
from nanotron.metrics.devices import find_device
from nanotron.metrics.experts import LOADS_FILE, ExpertUse, Told, worst_load
from nanotron.metrics.memory import memory_gib
from nanotron.metrics.sinks import JsonLines, Row, Sink, TensorBoard, Trackio, WeightsAndBiases, read_rows
from nanotron.metrics.spikes import LossSpikes
from nanotron.metrics.starts import note_start
from nanotron.metrics.step_clock import TimeLeft
from nanotron.models.families import flops_per_step
from nanotron.parallel.mesh import Mesh

if TYPE_CHECKING:
    import torch

    from nanotron.config import Config

logger = get_logger(__name__)

# The order of a row's keys; whatever else a step reports follows, in the order it was given.
LOSSES = ("lm_loss", "z_loss", "balance_loss", "router_z_loss")
LEADING_KEYS = ("step", *LOSSES, "grad_norm", "lr", "consumed_tokens", "consumed_samples")
STEP_LINE_START = "iteration: "


class _Work(NamedTuple):
    """What some steps did, and how long they took."""

    steps: int = 0
    ms: float = 0.0
    tokens: int = 0
    flops: float = 0.0

    def plus(self, other: _Work) -> _Work:
        steps, ms, tokens, flops = other
        return _Work(self.steps + steps, self.ms + ms, self.tokens + tokens, self.flops + flops)


class Metrics:
    """Rank 0 records every step; on the other ranks the same calls do nothing.

    ``log(step, values)`` needs in ``values``: ``lm_loss``, ``lr``, ``time_per_iteration_ms``, ``num_samples`` and
    ``num_tokens`` (of the step, all replicas), ``consumed_samples``, ``consumed_tokens``, ``stage``. Every further
    number (``grad_norm``, ``z_loss``, …) becomes a column of its own. ``start_step`` is the step resumed from (0 when
    fresh): rows after it, of a run that was killed, are taken back.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        run_dir: Path,
        *,
        device: torch.device,
        start_step: int = 0,
        hosts: Sequence[str] = (),
        first_row: Row | None = None,
    ) -> None:
        """``hosts``: each rank's, on rank 0. ``first_row``: further columns of the first row."""
        self._config, self._mesh, self._device = config, mesh, device
        self._first_step = start_step + 1
        self._left, self._since_line = TimeLeft(), _Work()
        self._peak_flops = _peak_flops(device, str(config.model.dtype))
        self._failing: set[Sink] = set()
        self.spikes = LossSpikes()
        """Those so far; on rank 0."""
        self._of_first_row = first_row or {}
        self._experts: ExpertUse | None = None
        self._hosts, self._slowest, self._slowest_since, self._goodput = hosts, -1, 0, Goodput()
        self._layout, self._layout_before = layout_text(mesh.layout()), ""
        self._sinks: list[Sink] = []
        if mesh.rank == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            note_start(run_dir, start_step, self._layout)
            self._sinks = _open_sinks(config, run_dir, start_step)
            if config.model.model_config.sparse_layers:
                self._experts = ExpertUse(config, run_dir, start_step)
            else:  # of an earlier run in this folder
                (run_dir / LOADS_FILE).unlink(missing_ok=True)
            for row in read_rows(run_dir / "metrics.jsonl"):  # a resumed run warns as one that never stopped
                self.spikes.add(row["step"], row["lm_loss"], row.get("stage", ""))
                self._layout_before = row.get(LAYOUT, self._layout_before)
                self._goodput.add(row)

    def log(
        self, step: int, values: Mapping[str, float | int | str], vectors: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Record one step everywhere; the console shows every ``logging.iteration_step_info_interval``-th.

        There, time and rates are means since the line before. ``vectors``: what routers counted, in sparse models.
        """
        if self._mesh.rank != 0:
            return
        work = self._work(values)
        row = self._row(step, values, work)
        experts = self._experts.step(step, vectors) if self._experts and vectors else None
        row |= experts.columns if experts else {}
        if self._layout != self._layout_before:
            row[LAYOUT] = self._layout_before = self._layout
        if SLOWEST_RANK in row:
            row |= self._straggler(step, int(row[SLOWEST_RANK]))
        if step == self._first_step:
            row |= self._of_first_row
        row[UNIX_S] = time.time()
        self._goodput.add(row)
        for sink in self._sinks:
            self._attempt(sink, lambda sink=sink: sink.write(step, row))  # type: ignore[misc]
        last_step = self._config.tokens.last_step
        self._left.add(row)
        self._since_line = self._since_line.plus(work)
        if step in (self._first_step, last_step) or step % self._config.logging.iteration_step_info_interval == 0:
            shown = row | self._rates(self._since_line)
            eta = self._left.seconds(self._config.steps_left(step))
            logger.info(step_line(shown, train_steps=last_step, batch_tokens=work.tokens, eta=eta))
            self._since_line = _Work()
        if SLOWEST_RANK in row:
            logger.info(work_line(row, self._mesh))
        spike = self.spikes.add(step, float(row["lm_loss"]), str(row["stage"]))
        if spike is not None:
            first = row.get("first_sample")
            logger.warning(str(spike) if first is None else f"{spike}; its first sample is {first} of its data stage")
        if self._experts and experts:
            self._tell(step, self._experts.file, experts)

    def _straggler(self, step: int, rank: int) -> Row:
        """Where the slowest rank is, and since which look at all ranks it is always that one."""
        if rank != self._slowest:
            self._slowest, self._slowest_since = rank, step
        told: Row = {SLOWEST_SINCE: self._slowest_since}
        if len(set(self._hosts)) > 1:
            told[SLOWEST_HOST] = self._hosts[rank]
        return told

    def _tell(self, step: int, file: Sink, experts: Told) -> None:
        if (loads := experts.loads) is not None:
            self._attempt(file, lambda: file.write(step, loads))
        for line in experts.collapses:
            logger.warning(line)

    def say_goodput(self) -> None:
        """Say how much of the time was of use."""
        if goodput := str(self._goodput):
            logger.info(f"goodput: {goodput}")

    def close(self) -> None:
        """Flush and close every sink."""
        for sink in [*self._sinks, *([self._experts.file] if self._experts else [])]:
            self._attempt(sink, sink.close)

    def _attempt(self, sink: Sink, action: Callable[[], None]) -> None:
        """Have a sink do something; one that cannot, for example on a full disk, says so once, and the run goes on."""
        try:
            action()
            self._failing.discard(sink)
        except OSError as error:
            if sink not in self._failing:
                logger.error(f"{type(sink).__name__} cannot write ({error.strerror or error}); the run goes on")
            self._failing.add(sink)

    def _work(self, values: Mapping[str, float | int | str]) -> _Work:
        samples, tokens = int(values["num_samples"]), int(values["num_tokens"])
        flops = flops_per_step(
            self._config.model.model_config, num_samples=samples, sequence_length=tokens // max(samples, 1)
        )
        return _Work(1, float(values[TIME_MS]), tokens, flops)

    def _row(self, step: int, values: Mapping[str, float | int | str], work: _Work) -> Row:
        row: Row = {"step": step} | {key: values[key] for key in LEADING_KEYS if key in values}
        row |= self._rates(work)
        row["memory_gib"] = memory_gib(self._device)
        used = {*row, "num_samples", "num_tokens"}
        return row | {key: value for key, value in values.items() if key not in used}

    def _rates(self, work: _Work) -> dict[str, float]:
        """The columns that say how fast steps were, of one step or of the mean of several."""
        seconds, world = work.ms / 1e3, self._mesh.world
        flops_per_second = work.flops / seconds / world
        rates = {
            TIME_MS: work.ms / work.steps,
            "tokens_per_sec": work.tokens / seconds,
            "tokens_per_sec_per_device": work.tokens / seconds / world,
            "model_tflops_per_device": flops_per_second / 1e12,
        }
        return rates if self._peak_flops is None else {**rates, "mfu": flops_per_second / self._peak_flops}


def step_line(row: Mapping[str, Any], *, train_steps: int, batch_tokens: int, eta: float) -> str:
    """The console's line of one step: three significant digits, the loss with six; ``eta`` in seconds."""
    parts = {
        "iteration": f"{row['step']} / {train_steps}",
        "consumed_tokens": human_format(row["consumed_tokens"]),
        TIME_MS: human_format(row[TIME_MS]),
        "tokens_per_sec": human_format(row["tokens_per_sec"]),
        "tokens_per_sec_per_device": human_format(row["tokens_per_sec_per_device"]),
        "global_batch_size": human_format(batch_tokens),  # in tokens, as users of these lines are used to
        "lm_loss": f"{row['lm_loss']:#.6g}",
    }
    if "val_loss" in row:
        parts["val_loss"] = f"{row['val_loss']:#.6g}"
    parts |= {key: human_format(row[key]) for key in ("z_loss", "grad_norm", "lr") if key in row}
    if EXPERT_LOAD in row:
        parts[EXPERT_LOAD] = worst_load(row)
    parts["model_tflops_per_device"] = human_format(row["model_tflops_per_device"])
    if "mfu" in row:
        parts["mfu"] = f"{100 * row['mfu']:.1f}%"
    parts["memory_gib"] = human_format(row["memory_gib"])
    parts["eta"] = human_duration(eta)
    return " | ".join(f"{key}: {value}" for key, value in parts.items())


def layout_text(layout: Mapping[str, int]) -> str:
    """`dp 4 · tp 2`: the axes of more than one rank."""
    return " · ".join(f"{axis} {size}" for axis, size in layout.items() if size > 1) or "one process"


class Goodput:
    """The share of the time since a run first began, restarts included, in which it made steps that count."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._steps_s = self._ended = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """The next row of those that are left of the run."""
        if UNIX_S not in row:  # of an earlier version
            return
        seconds, self._ended = row[TIME_MS] / 1e3, row[UNIX_S]
        self._steps_s += seconds
        if self._began is None:
            self._began = self._ended - seconds - row.get(ROLLBACK_LOST_S, 0.0)  # of steps that left no row

    def __str__(self) -> str:
        """`87.5% of 3h 12m`; nothing before the first step."""
        if self._began is None:
            return ""
        whole = max(self._ended - self._began, self._steps_s)
        return f"{self._steps_s / whole:.1%} of {human_duration(whole)}"


def work_line(row: Mapping[str, Any], mesh: Mesh) -> str:
    """The console's line about the rank that worked longest in a step, and the one that holds the most memory."""
    slowest, fullest = int(row[SLOWEST_RANK]), int(row[FULLEST_RANK])
    busy, usual = row[SLOWEST_RANK_MS], row[MEDIAN_RANK_MS]
    share = busy / row[TIME_MS]
    times = f", {busy / usual:.2f} times the median rank" if usual > 0 else ""
    return (
        f"step {row['step']}: rank {slowest}{coordinates(mesh.seen_by(slowest))}{straggler_text(row)} worked longest, "
        f"{human_format(busy)} ms, {share:.0%} of the step{times}; "
        f"rank {fullest}{coordinates(mesh.seen_by(fullest))} holds most, {human_format(row[FULLEST_RANK_GIB])} GiB"
    )


def straggler_text(row: Mapping[str, Any]) -> str:
    """` on node7, since step 200,`: the slowest rank's host, where there are several, and since when it is that."""
    host = f" on {row[SLOWEST_HOST]}" if SLOWEST_HOST in row else ""
    return host + (f", since step {row[SLOWEST_SINCE]}," if row.get(SLOWEST_SINCE, row["step"]) < row["step"] else "")


def coordinates(mesh: Mesh) -> str:
    """` (pp 1, dp 0)`: where a rank is on the axes of more than one rank."""
    shown = [f"{axis} {mesh.coord(axis)}" for axis in ("pp", "dp", "cp", "tp") if mesh.size(axis) > 1]
    return f" ({', '.join(shown)})" if shown else ""


def _peak_flops(device: torch.device, dtype: str) -> float | None:
    """Dense peak of this device for the dtype, FLOP/s; None when the device is not in the table (every CPU)."""
    if device.type == "cpu":
        return None
    import torch

    found = find_device(torch.get_device_module(device).get_device_name(device))
    return found.peak_flops.get(dtype.removeprefix("torch.")) if found else None


def _open_sinks(config: Config, run_dir: Path, start_step: int) -> list[Sink]:
    sinks: list[Sink] = [JsonLines(run_dir / "metrics.jsonl", start_step=start_step)]
    if config.logging.tensorboard:
        sinks.append(TensorBoard(run_dir / "tensorboard", start_step=start_step))
    project, name = config.general.project, config.general.run
    if config.logging.wandb:
        resumed = start_step > 0
        sinks.append(WeightsAndBiases(run_dir, project=project, name=name, config=config.to_dict(), resumed=resumed))
    if config.logging.trackio:
        sinks.append(Trackio(run_dir, project=project, name=name, config=config.to_dict()))
    return sinks
