"""The feed: each step's microbatches for this replica, loaded ahead by a thread and never dependent on the layout.

    step n  ->  active stage, its consumed samples c  ->  rows c … c + n's global batch - 1 of that stage
    row r of the batch  ->  dp rank r // (global batch / dp), all ranks of that replica alike

Legend of shapes: b micro_batch_size, s the stage's sequence length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nanotron.batch import Batch
from nanotron.data.collate import Rows, collate
from nanotron.data.context import ContextCut
from nanotron.data.open_stages import ScheduledStage, build_stages
from nanotron.data.order.stage import StreamStage
from nanotron.data.order.windows import Window, empty_window
from nanotron.data.replica import ReplicaShare
from nanotron.data.sources.stream import EndOfData
from nanotron.errors import ConfigError, at_key
from nanotron.logging import get_logger

if TYPE_CHECKING:
    from nanotron.config import Config
    from nanotron.parallel.mesh import Mesh

logger = get_logger(__name__)

_LEAST_STEPS_AHEAD = 2


class StepData(NamedTuple):
    """What one training step consumes."""

    stage: str
    microbatches: list[Batch]
    """This replica's: batches of [b, s]."""
    num_samples: int
    """Of the global batch."""
    num_tokens: int
    """Of the global batch, targets or not."""
    first_sample: int
    """The number of the first in the stage's order, as data.skip_samples counts."""


class _Loaded(NamedTuple):
    """This replica's rows of a step, one item per microbatch; of a stream, also its position after the step."""

    rows: list[Rows]
    position: dict[str, Any] | None


class _Load(NamedTuple):
    """A step's rows, asked for or ready."""

    step: int
    first_sample: int
    loaded: Future[_Loaded]


class Feed:
    """Gives training steps their data and counts, per stage, what they consumed."""

    say_after_s = 60.0
    """Seconds that a step waits for its data before it says so, and from one time to the next."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        *,
        device: torch.device,
        state: Mapping[str, Any] | None = None,
        left_out: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ) -> None:
        """`state` is the state.json of the checkpoint to go on from: what `state_dict` gave, and `data`, fingerprints.

        What it says of stages that the config does not have is kept: they may come back. `left_out`: by stage, ranges
        of samples that are skipped beside the config's.
        """
        self._device = device
        self._micro_batch_size = config.tokens.micro_batch_size
        self._samples_of, self._validation_batch = config.samples_of, config.global_batch_size
        self._replica_number, self._num_replicas = mesh.replica, mesh.num_replicas
        self._validation_batches = config.tokens.limit_val_batches
        self._cut = ContextCut(mesh, config.parallelism.cp_mode)
        self._document_masking = bool(getattr(config.model.model_config, "_use_doc_masking", False))
        self._stages = build_stages(config, left_out or {})
        self.skips = {scheduled.name: scheduled.stage.skips for scheduled in self._stages}
        self._check_sizes()
        self._log_shares()
        state = state or {}
        self.consumed: dict[str, int] = {scheduled.name: 0 for scheduled in self._stages} | state.get("consumed", {})
        self.consumed_tokens: int = state.get("consumed_tokens", 0)
        self._consumed_before = dict(self.consumed)
        self._per_source_before: dict[str, dict[str, int]] = state.get("consumed_per_source", {})
        self._streams: dict[str, dict[str, Any]] = dict(state.get("streams", {}))
        self._fingerprints_before: dict[str, list[dict[str, Any]]] = state.get("data", {})
        self._fingerprints: dict[str, list[dict[str, Any]]] | None = None
        self._replica = self._resume_streams(mesh)
        workers = max(stage.data.num_loading_workers for stage in config.data_stages)
        self._steps_ahead = 0 if workers == 0 else max(_LEAST_STEPS_AHEAD, workers)
        self.validation_batch: int | None = None
        """The one that was given last, from 1; None while there is no validation."""
        self._loads: deque[_Load] = deque()
        # A stream's rows have to be read in order: by one thread.
        num_threads = 1 if self._replica is not None else max(1, workers)
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="data")

    def _resume_streams(self, mesh: Mesh) -> ReplicaShare | None:
        """Go to the positions of the stages that are streams, where this rank reads them; None if there are none."""
        stages = [scheduled.stage for scheduled in self._stages if isinstance(scheduled.stage, StreamStage)]
        for stage in stages:
            self._check_position(stage)
        replica = ReplicaShare(mesh) if stages else None
        for stage in stages:
            if replica is not None and replica.is_reader and stage.name in self._streams:
                stage.load_state_dict(self._streams[stage.name])
        return replica

    def _check_position(self, stage: StreamStage) -> None:
        """Raise ConfigError, on every rank, where the checkpoint does not say where the streams of a stage go on."""
        position, consumed = self._streams.get(stage.name), self.consumed[stage.name]
        if (position["next_sample"] if position else 0) != consumed:
            raise ConfigError(
                f"the checkpoint has no position at sample {consumed} of the streams of stage {stage.name!r}; "
                "begin the stage under another name, or train on tokenized files"
            )
        if position:
            stage.check_positions(position)

    def _check_sizes(self) -> None:
        """Refuse stages whose data may not repeat and cannot fill a single step."""
        problems = [
            self._too_little(scheduled, f"gives {scheduled.stage.num_samples} samples")
            for scheduled in self._stages
            if not self._has_rows(scheduled, 0, self._samples_of(scheduled.start))
        ]
        if problems:
            raise ConfigError(problems)

    def _too_little(self, scheduled: ScheduledStage, found: str) -> str:
        num_samples = self._samples_of(scheduled.start)
        return (
            f"{scheduled.key}.data.repeat: false, but the data of stage {scheduled.name!r} {found}, and a step takes "
            f"{num_samples} of {scheduled.sequence_length} tokens; set repeat: true, give it more data, or make "
            "the batch smaller (tokens.micro_batch_size, tokens.batch_accumulation_per_replica)"
        )

    def consumed_per_source(self) -> dict[str, dict[str, int]]:
        """For each stage, the samples that each of its sources gave: those of the checkpoint, and those since."""
        counts = dict(self._per_source_before)
        for scheduled in self._stages:
            name, stage = scheduled.name, scheduled.stage
            before, now = (stage.taken(consumed[name]) for consumed in (self._consumed_before, self.consumed))
            counts[name] = dict(counts.get(name, {}))
            for number, source in enumerate(stage.source_names):
                key = f"{number}:{source}"
                counts[name][key] = counts[name].get(key, 0) + now[number] - before[number]
        return counts

    def counters(self) -> str:
        """Samples of each stage, and of each source where there are several, for the log."""
        parts = []
        for name, counts in self.consumed_per_source().items():
            sources = ", ".join(f"{source.partition(':')[2]} {count}" for source, count in counts.items())
            parts.append(f"{name} {self.consumed[name]}" + (f" ({sources})" if len(counts) > 1 else ""))
        return " | ".join(parts)

    def step(self, n: int) -> StepData:
        """The data of update n = 1, 2, …; raises EndOfData when the active stage may not repeat and has run out."""
        scheduled = self._active(n)
        first, num_samples = self.consumed[scheduled.name], self._samples_of(n)
        if not self._has_rows(scheduled, first, num_samples):
            raise EndOfData(
                f"stage {scheduled.name!r} has no data left for step {n}: {first} of {scheduled.stage.num_samples} "
                f"samples are consumed, a step takes {num_samples}, and data.repeat is false"
            )
        try:
            rows = self._rows(n, scheduled, first)
        except EndOfData:
            if first > 0:
                raise
            raise ConfigError(self._too_little(scheduled, "ends before its first step")) from None
        self.consumed[scheduled.name] = first + num_samples
        self._log_new_epochs(scheduled, first)
        self._load_ahead(n + 1)
        num_tokens = num_samples * scheduled.sequence_length
        self.consumed_tokens += num_tokens
        number = scheduled.stage.skips.end(first + 1) - 1
        return StepData(scheduled.name, [self._batch(part) for part in rows], num_samples, num_tokens, number)

    def validation(self, n: int) -> Iterator[list[Batch]]:
        """The validation set of the stage active at update n, a global batch at a time: this replica's microbatches.

        At most tokens.limit_val_batches of them (0: all), of full size while training's still grow. The same rows at
        every call and on every layout of the same global batch; the last batch is filled up with rows that hold no
        target, so the token-weighted mean is exact.
        """
        scheduled = self._active(n)
        if scheduled.validation is None:
            return
        assert scheduled.validation.num_samples is not None
        num_rows, batch = scheduled.validation.num_samples, self._validation_batch
        if self._validation_batches:
            num_rows = min(num_rows, self._validation_batches * batch)
        own, count = self._share(batch)
        for first in range(own, num_rows + own, batch):
            with at_key(f"{scheduled.key}.validation"):
                windows = scheduled.validation.rows(first, max(0, min(count, num_rows - first)))
            windows += [empty_window(scheduled.sequence_length)] * (count - len(windows))
            self.validation_batch = 1 + first // batch
            yield [self._batch(part) for part in self._collate(windows)]
        self.validation_batch = None

    def _active(self, n: int) -> ScheduledStage:
        return [scheduled for scheduled in self._stages if scheduled.start <= n][-1]

    def _has_rows(self, scheduled: ScheduledStage, first: int, num_samples: int) -> bool:
        limit = scheduled.stage.num_samples
        return limit is None or first + num_samples <= limit

    def _share(self, num_samples: int) -> tuple[int, int]:
        """This replica's rows of a batch: the first, and how many."""
        count = num_samples // self._num_replicas
        return self._replica_number * count, count

    def _reads(self, scheduled: ScheduledStage) -> bool:
        """Whether this rank reads the stage itself, rather than being sent its rows."""
        return self._replica is None or self._replica.is_reader or not isinstance(scheduled.stage, StreamStage)

    def _rows(self, n: int, scheduled: ScheduledStage, first: int) -> list[Rows]:
        """The rows of step n, on every rank of the replica."""
        if self._replica is None or not isinstance(scheduled.stage, StreamStage):
            return self._take(n, scheduled, first).rows
        rows: list[Rows] | EndOfData | None = None
        if self._replica.is_reader:
            try:
                rows, position = self._take(n, scheduled, first)
                self._streams[scheduled.name] = position or {}
            except EndOfData as end:
                rows = end
        num_microbatches = self._share(self._samples_of(n))[1] // self._micro_batch_size
        shape = (num_microbatches, self._micro_batch_size, scheduled.sequence_length)
        return self._replica.share(rows, shape)

    def _take(self, n: int, scheduled: ScheduledStage, first: int) -> _Loaded:
        """The rows of step n: loaded ahead if n is the step that was expected, else loaded now."""
        while self._loads:
            load = self._loads.popleft()
            if (load.step, load.first_sample) == (n, first):
                return self._wait(n, scheduled, load.loaded)
            load.loaded.cancel()
        return self._wait(n, scheduled, self._executor.submit(self._load, n, scheduled, first))

    def _wait(self, n: int, scheduled: ScheduledStage, loaded: Future[_Loaded]) -> _Loaded:
        """The rows, once they are there; data that is slow, or never comes, is named while it is waited for."""
        waited = 0.0
        while not wait([loaded], self.say_after_s).done:
            waited += self.say_after_s
            logger.warning(
                f"step {n} has waited for its data for {waited:.0f} s: {scheduled.key}.data.dataset "
                f"({', '.join(scheduled.stage.source_names)})"
            )
        return loaded.result()

    def _load_ahead(self, n: int) -> None:
        """Ask the threads for the steps from n on that are not yet asked for."""
        firsts = dict(self.consumed)
        asked = {load.step for load in self._loads}
        for step in range(n, n + self._steps_ahead):
            scheduled = self._active(step)
            first, num_samples = firsts[scheduled.name], self._samples_of(step)
            firsts[scheduled.name] = first + num_samples
            if not self._has_rows(scheduled, first, num_samples):
                return
            if step not in asked and self._reads(scheduled):
                self._loads.append(_Load(step, first, self._executor.submit(self._load, step, scheduled, first)))

    def _load(self, n: int, scheduled: ScheduledStage, first: int) -> _Loaded:
        """This replica's rows of the batch of step n, which begins at sample `first`."""
        num_samples = self._samples_of(n)
        (own, count), position = self._share(num_samples), None
        with at_key(f"{scheduled.key}.data.dataset"):
            if isinstance(scheduled.stage, StreamStage):
                windows = scheduled.stage.rows(first, num_samples)[own : own + count]
                position = scheduled.stage.state_dict()
            else:
                windows = scheduled.stage.rows(first + own, count)
        return _Loaded(self._collate(windows), position)

    def _collate(self, windows: list[Window]) -> list[Rows]:
        """One item per microbatch."""
        size = self._micro_batch_size
        parts = [windows[start : start + size] for start in range(0, len(windows), size)]
        return [collate(part, document_masking=self._document_masking) for part in parts]

    def _batch(self, rows: Rows) -> Batch:
        """The microbatch on the device: what this rank holds of each row, and which tokens it sees of the whole."""
        held, spans = self._cut.of(rows.tokens.shape, rows.doc_starts)
        tokens, labels, positions = (self._tensor(part[:, held]) for part in rows[:3])
        return Batch(tokens, labels, positions, spans)

    def _tensor(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        tensor = tensor.pin_memory() if self._device.type == "cuda" else tensor
        return tensor.to(self._device, non_blocking=True)

    def _log_new_epochs(self, scheduled: ScheduledStage, first: int) -> None:
        if isinstance(scheduled.stage, StreamStage):
            return
        before, after = scheduled.stage.epochs(first), scheduled.stage.epochs(self.consumed[scheduled.name])
        for source, old, new in zip(scheduled.stage.sources, before, after, strict=True):
            if new > old:
                logger.info(f"stage {scheduled.name!r}: {source.name} is used up; epoch {new + 1} begins")

    def _log_shares(self) -> None:
        for scheduled in self._stages:
            named = zip(scheduled.stage.source_names, scheduled.stage.blend.shares, strict=True)
            if len(scheduled.stage.sources) > 1:
                shares = ", ".join(f"{name} {share:.6f}" for name, share in named)
                logger.info(f"stage {scheduled.name!r}: shares of samples, in units of 2^-16: {shares}")

    def fingerprints(self) -> dict[str, list[dict[str, Any]]]:
        """For each stage, what identifies the data of each of its sources; read from the files once."""
        if self._fingerprints is None:
            self._fingerprints = self._fingerprints_before | {
                scheduled.name: [{"name": source.name, **source.fingerprint()} for source in scheduled.stage.sources]
                for scheduled in self._stages
            }
        return self._fingerprints

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps. On the first rank; of streams, other ranks may know no position."""
        return {
            "consumed": dict(self.consumed),
            "consumed_tokens": self.consumed_tokens,
            "consumed_per_source": self.consumed_per_source(),
            "streams": dict(self._streams),
        }

    def close(self) -> None:
        """Stop the loading threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)
