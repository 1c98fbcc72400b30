"""A run: set up in order, step until done, save and stop as told. The step itself is ``nanotron.training.step``."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nanotron.checkpoint.compare import check_data
from nanotron.checkpoint.write import Saver
from nanotron.data.feed import Feed, StepData
from nanotron.data.order.changes import order_changes
from nanotron.data.sources.fingerprint import fingerprint_changes
from nanotron.data.sources.stream import EndOfData
from nanotron.errors import ConfigError
from nanotron.launch import codes
from nanotron.launch.alike import data_disagreements
from nanotron.launch.folder import on_rank_0, run_directory
from nanotron.launch.place import FreedMemory, name_of
from nanotron.logging import get_logger
from nanotron.metrics.columns import SAVING_MS, VALIDATION_MS
from nanotron.metrics.profiler import profiled
from nanotron.metrics.record import Metrics
from nanotron.metrics.sinks import Row
from nanotron.metrics.step_clock import StepClock, StepTime
from nanotron.ops.fused import seconds_compiling
from nanotron.optim.lr import learning_rate
from nanotron.parallel.agreement import Agreement
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.store import Store
from nanotron.pipeline.trace import recorder
from nanotron.training.control import ControlWord, Outcome
from nanotron.training.evaluate import validation_loss
from nanotron.training.host_copy import HostCopy
from nanotron.training.init_or_resume import StartingPoint, checkpoint_to_resume, init_or_resume, settle_compile
from nanotron.training.replicas import ReplicasDiffer
from nanotron.training.rollback import Harm, Rollbacks
from nanotron.training.step import Training

if TYPE_CHECKING:
    from nanotron.config import Config

logger = get_logger(__name__)


def train(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    *,
    store: Store | None = None,
    allow_data_change: bool = False,
    before_training: Callable[[], None] = lambda: None,
    stoppable: Callable[[Callable[[], None], Callable[[], dict[str, Any]]], AbstractContextManager[None]] = (
        lambda stop, where: nullcontext()
    ),
) -> int:
    """Run the training that ``config`` describes on this rank; the same call on all ranks.

    ``mesh`` has its groups; ``store`` is the one through which all ranks agree (None for one process);
    ``before_training`` is called when it is known that a step is left to train; the loop runs in what ``stoppable``
    makes of the functions that ask it to save and stop, and where it is. Returns the exit code. Raises ConfigError for
    what only now shows to be a mistake, such as a checkpoint of another model, and LostPeers for ranks that a save
    waits for in vain.
    """
    resume = checkpoint_to_resume(config, mesh, store)
    settle_compile(config, mesh, device, resume)
    training = Training(config, mesh, device)
    start = init_or_resume(training, config, mesh, store, resume)
    if start.step >= config.tokens.last_step:
        logger.info(f"nothing left to train: step {start.step} of {_end_of(config)} is saved")
        return codes.DONE
    before_training()
    if mesh.rank == 0 and training.chunks[0].options.fp8 == "dequantised":
        logger.warning(
            "model.fp8: only Hopper GPUs have a kernel for it; here numbers are rounded and multiplied in float32"
        )
    if config.model.compile:
        logger.info("compiling in the first step, and again where sequences become longer or shorter")
    hosts: list[str] = []  # rank 0's only
    agreement = Agreement("hosts", mesh.rank, mesh.world, store, timeout_s=config.general.timeout_s)
    agreement.decide("host", socket.gethostname(), hosts.extend)
    rollbacks = Rollbacks(config, start.state)

    def open_at(start: StartingPoint, first_row: Row | None = None) -> tuple[Feed, Metrics]:
        left_out = rollbacks.left_out
        feed = _open_feed(config, mesh, device, start, store, left_out, allow_data_change=allow_data_change)
        metrics_at = partial(Metrics, config, mesh, run_directory(config), device=device, start_step=start.step)
        open_metrics = partial(metrics_at, hosts=hosts, first_row=first_row)
        metrics = on_rank_0("metrics", open_metrics, config, mesh, store) or open_metrics()
        rollbacks.watch_after(metrics.spikes, mesh, store)
        return feed, metrics

    checkpoints = config.checkpoints
    path, copy_to = config.checkpoint_places
    saver = Saver(
        path,
        mesh.rank,
        mesh.world,
        store,
        keep_last_n=checkpoints.keep_last_n,
        keep_every=checkpoints.keep_every,
        copy_to=copy_to,
        last_complete=start.step or None,
        timeout_s=config.general.timeout_s,
    )
    run = Run(config, mesh, training, *open_at(start), saver, StepClock(device), rollbacks, step=start.step)
    try:
        profiler = profiled(config.profiler, mesh.rank, run_directory(config))
        if config.profiler is not None and config.profiler.pipeline_trace is not None:
            steps = config.profiler.pipeline_trace.steps
            run.traced = recorder(training.pipeline, mesh, steps, run_directory(config) / "traces")
        with stoppable(run.stop, run.where), _located(run), profiler as run.after_step:
            try:
                while isinstance(end := run.to_the_end(), Harm):
                    start = rollbacks.go_back(end, training, mesh, store, run.feed.skips)
                    run.feed, run.metrics = open_at(start, rollbacks.row(run.seconds_since_save()))
                    run.begin_at(start.step)
                return end
            except ReplicasDiffer as found:
                return run.stopped_by_corruption(found, hosts)
    finally:
        run.metrics.say_goodput()
        run.close()


def _open_feed(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    start: StartingPoint,
    store: Store | None,
    left_out: Mapping[str, Sequence[Sequence[int]]],
    *,
    allow_data_change: bool,
) -> Feed:
    """The data from where the run starts on, the same for every rank. ``left_out``: by stage, ranges of samples.

    Raises ConfigError where it is not, or would not go on as the checkpoint's did.
    """
    allowed: list[str] = []
    if start.state is not None and start.config is not None:
        consumed, streams = start.state["consumed"], start.state["streams"]
        changes = order_changes(start.config, config.to_dict(), consumed, streams, left_out)
        allowed += check_data(changes, allow_change=allow_data_change)
    feed = Feed(config, mesh, device=device, state=start.state, left_out=left_out)
    agreement = Agreement("data", mesh.rank, mesh.world, store, timeout_s=config.general.timeout_s)
    if problems := data_disagreements(agreement, feed.fingerprints()):
        raise ConfigError(problems)
    if start.state is not None:
        changes = fingerprint_changes(start.state["data"], feed.fingerprints())
        allowed += check_data(changes, allow_change=allow_data_change)
    for line in allowed if mesh.rank == 0 else []:  # every rank found them
        logger.warning(line)
    return feed


class _Made(NamedTuple):
    """A step that was made, its control word perhaps not read yet."""

    step: int
    word: ControlWord
    data: StepData
    consumed: dict[str, int]
    """Samples of each stage."""
    consumed_tokens: int
    val_loss: HostCopy | None
    time: StepTime


@dataclass
class Run:
    """The loop over steps of one rank, and when it saves and stops. Every rank takes the same decisions."""

    config: Config
    mesh: Mesh
    training: Training
    feed: Feed
    metrics: Metrics
    saver: Saver
    clock: StepClock
    rollbacks: Rollbacks
    step: int
    """Steps made so far."""
    preempted: bool = False
    freed_memory: FreedMemory = field(default_factory=FreedMemory)
    after_step: Callable[[], None] = field(default=lambda: None)
    traced: Callable[[int], AbstractContextManager[None]] = field(default=lambda step: nullcontext())
    """What the making of a step, given by its number, happens in."""

    def __post_init__(self) -> None:
        self._seconds_compiling = 0.0
        self._told_of_no_targets = False
        self.begin_at(self.step)

    def begin_at(self, step: int) -> None:
        """Go on from the checkpoint of a step, or from the beginning, 0."""
        self.step = self._last_saved = step
        self._unread: deque[_Made] = deque()
        self._harm: Harm | None = None
        self._last_save_time = time.monotonic()
        self.clock.begin()

    def seconds_since_save(self) -> float:
        """Since the last checkpoint was begun, or the run went on from one."""
        return time.monotonic() - self._last_save_time

    def close(self) -> None:
        """Let go of the data and of the files of metrics."""
        self.feed.close()
        self.metrics.close()

    def stop(self) -> None:
        """Ask for a save and the end of the run, after the step that follows this one at the latest; any thread may."""
        self.preempted = True

    def where(self) -> dict[str, Any]:
        """Where this rank is: what is told of it when it fails, or no longer tells."""
        action = self.training.pipeline.current_action
        batch = self.feed.validation_batch
        doing = {"step": self.step + 1} if batch is None else {"step": self.step, "validation batch": batch}
        return {"stage": self.mesh.coord("pp"), **doing, "action": action}

    def to_the_end(self) -> int | Harm:
        """Train until the last step, the end of the data, a stop signal or a non-finite step; returns the exit code.

        Or the step that the run is to go back from: then nothing is in flight, and all is closed but the checkpoints.
        """
        if self.config.checkpoints.save_initial_state and self.step == 0:
            self._save()
        while self.step < self.config.tokens.last_step:
            try:
                data = self.feed.step(self.step + 1)
            except EndOfData as end:
                logger.info(str(end))
                break
            self._make(data)
            outcomes = self._read(keep=0 if self._save_is_due() else 1)
            if any(outcome.save or outcome.stop for outcome in outcomes):
                outcomes += self._read()
            if (bad := self._ends_badly(outcomes)) is not None:
                return bad
            wanted = self._save_is_due() or any(outcome.save for outcome in outcomes)
            if wanted and outcomes[-1].finite:  # this step's own: it has been read when a save is wanted
                self._save()
            if any(outcome.stop for outcome in outcomes):
                return self._end(preempted=True)
        bad = self._ends_badly(self._read())
        return self._end(preempted=False) if bad is None else bad

    def _ends_badly(self, outcomes: Sequence[Outcome]) -> int | Harm | None:
        """End without a save where a step did harm: the last checkpoint is of one that did none."""
        goes_on = self.config.optimizer.on_nan == "skip" or all(outcome.finite for outcome in outcomes)
        if goes_on and self._harm is None:
            return None
        self.saver.wait()
        if self._harm is not None:
            self.close()
        return self._harm or codes.STOPPED_BY_NAN

    def stopped_by_corruption(self, found: ReplicasDiffer, hosts: Sequence[str]) -> int:
        """End without a save: the last checkpoint is of a step whose replicas were equal."""
        self.saver.wait()
        self._tell_failed_saves()
        for line in found.lines(self.mesh, hosts) if self.mesh.rank == 0 else ():
            logger.error(line)
        return codes.REPLICAS_DIFFER

    def _make(self, data: StepData) -> None:
        """One step: the update itself, and what is to be told of it once its control word is read."""
        update, save = self.step + 1, self._minutes_are_over()
        with self.traced(update):
            word = self.training.step(update, data.microbatches, save=save, stop=self.preempted)
        word.begin_read()
        self.step += 1
        if self.config.model.compile:
            self._tell_compiling()
        self.after_step()
        self.freed_memory.after_step()
        consumed, tokens = dict(self.feed.consumed), self.feed.consumed_tokens
        val_loss = self._validate()
        self._unread.append(_Made(self.step, word, data, consumed, tokens, val_loss, self.clock.step_ends()))
        self._tell_failed_saves()

    def _tell_failed_saves(self) -> None:
        for line in self.saver.poll():
            if self.mesh.rank == 0:  # every rank is told
                logger.error(line)

    def _tell_compiling(self) -> None:
        """Say how long was spent compiling since the last step, if at all: shapes were new."""
        seconds, before = seconds_compiling(), self._seconds_compiling
        if seconds > before:
            logger.info(f"compiled for {seconds - before:.1f} s by the end of step {self.step} (model.compile)")
        self._seconds_compiling = seconds

    def _validate(self) -> HostCopy | None:
        """The loss on the stage's validation set, on its way to the host, when it is time for it."""
        interval = self.config.tokens.val_check_interval
        if interval < 1 or self.step % interval:
            return None
        with self.clock.apart(VALIDATION_MS):
            loss = validation_loss(self.training, self.feed.validation(self.step), self.mesh)
            return None if loss is None else HostCopy(loss)

    def _save_is_due(self) -> bool:
        return self.step % self.config.checkpoints.checkpoint_interval == 0

    def _minutes_are_over(self) -> bool:
        minutes = self.config.checkpoints.interval_minutes
        return minutes is not None and self.seconds_since_save() > 60 * minutes

    def _read(self, keep: int = 0) -> list[Outcome]:
        """Read the control words of all but the last ``keep`` steps, which a device is busy with, and log those."""
        outcomes = []
        while len(self._unread) > keep:
            made = self._unread.popleft()
            outcome = made.word.read()
            outcomes.append(outcome)
            self._harm = self._harm or self.rollbacks.harm(made.step, outcome, made.data.stage, made.consumed)
            self._log(made, outcome)
            self.training.replicas.demand_equal(made.step, outcome.vectors)
        return outcomes

    def _log(self, made: _Made, outcome: Outcome) -> None:
        """Rank 0 records a step, and says what is wrong with it; every rank knows the same."""
        if self.mesh.rank != 0:
            return
        values: dict[str, float | int | str] = {
            **{f"{name}_loss": value for name, value in outcome.losses.items()},
            "grad_norm": outcome.grad_norm,
            "lr": self._learning_rate(made.step),
            "num_samples": made.data.num_samples,
            "num_tokens": made.data.num_tokens,
            "consumed_samples": sum(made.consumed.values()),
            "consumed_tokens": made.consumed_tokens,
            "stage": made.data.stage,
            "first_sample": made.data.first_sample,
        }
        if made.val_loss is not None:
            (values["val_loss"],) = made.val_loss.read()
        values |= made.time.columns() | outcome.diagnostics
        self.metrics.log(made.step, values, outcome.vectors)
        if not outcome.has_targets and not self._told_of_no_targets:
            self._told_of_no_targets = True
            logger.warning(
                f"step {made.step}: no token of its batch is a target, so its loss is 0 and it teaches nothing (said "
                "once); prompts without completions, or with theirs beyond tokens.sequence_length, have none"
            )
        if not outcome.finite and self._harm is None:
            policy = "its update was left out" if self.config.optimizer.on_nan == "skip" else "stopping"
            logger.warning(
                f"step {made.step}: loss {outcome.lm_loss} or gradient norm {outcome.grad_norm} is not finite; "
                f"{policy} (optimizer.on_nan: {self.config.optimizer.on_nan})"
            )

    def _learning_rate(self, update: int) -> float:
        return learning_rate(self.config.optimizer.learning_rate_scheduler, update)

    def _save(self) -> None:
        """Begin a checkpoint of the current step, if it is sound."""
        self.training.replicas.demand_equal(self.step)
        with self.clock.apart(SAVING_MS):
            self.saver.save(self.step, list(self.training.state_shards()), self._state(), self.config.to_texts())
        self._last_saved, self._last_save_time = self.step, time.monotonic()
        logger.info(f"saving step {self.step} to {self.config.checkpoint_places[0]}")
        logger.info(f"samples consumed: {self.feed.counters()}")

    def _state(self) -> dict[str, Any]:
        """state.json: the position of the run, and what bit-identical resuming depends on."""
        return {
            "step": self.step,
            **self.feed.state_dict(),
            "rollbacks": self.rollbacks.record,
            "optimizer_updates": float(self.training.optimizer.updates),
            "lr": self._learning_rate(self.step) if self.step else None,
            "data": self.feed.fingerprints(),
            "layout": self.mesh.layout(),
            "threads_per_rank": torch.get_num_threads(),
            "compile": self.config.model.compile,
            "device": name_of(self.training.optimizer.updates.device),
            "versions": {name: version(name) for name in ("nanotron", "torch", "numpy")},
        }

    def _end(self, *, preempted: bool) -> int:
        """Save what is to be saved last, wait for it, and say how the run ended."""
        if self._last_saved != self.step and (preempted or self.config.checkpoints.save_final_state):
            self._save()
        saved = self.saver.wait()
        self._tell_failed_saves()
        if preempted:
            logger.info(f"stopped at step {self.step} as told, " + ("saved" if saved else "but not saved"))
            return codes.PREEMPTED if saved else codes.PREEMPTED_UNSAVED
        if self.step == self.config.tokens.last_step < self.config.tokens.train_steps:
            logger.info(f"stopped at step {self.step} of {self.config.tokens.train_steps}: {_end_of(self.config)}")
        return codes.DONE if saved else codes.USER_MISTAKE


def _end_of(config: Config) -> str:
    """The key that says after which step this start ends, as key=value."""
    key = "stop_after" if config.tokens.last_step < config.tokens.train_steps else "train_steps"
    return f"tokens.{key}={getattr(config.tokens, key)}"


@contextmanager
def _located(run: Run) -> Iterator[None]:
    """Note on an exception at which stage, step and action it left this rank."""
    try:
        yield
    except Exception as error:
        error.where = run.where()  # type: ignore[attr-defined]
        raise
