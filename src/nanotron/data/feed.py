"""The feed: each step's microbatches for this replica, loaded ahead by a thread and never dependent on the layout.

    step n  ->  active stage, its consumed samples c  ->  rows c … c + global batch - 1 of that stage
    row r of the batch  ->  dp rank r // (micro_batch_size · accumulation), all ranks of that replica alike

Legend of shapes: b micro_batch_size, s the stage's sequence length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nanotron.batch import Batch
from nanotron.data.collate import Rows, collate
from nanotron.data.sources import ScheduledStage, build_stages
from nanotron.logging import get_logger

if TYPE_CHECKING:
    from nanotron.config import Config
    from nanotron.mesh import Mesh

logger = get_logger(__name__)

_STEPS_AHEAD = 2


class EndOfData(Exception):
    """The active stage does not repeat its sources and cannot fill another batch; its text is a line for the user."""


class StepData(NamedTuple):
    """What one training step consumes."""

    stage: str
    microbatches: list[Batch]
    """This replica's: batch_accumulation_per_replica batches of [b, s]."""
    num_samples: int
    """Of the global batch."""
    num_tokens: int
    """Of the global batch, targets or not."""


class _Load(NamedTuple):
    """A step's rows, requested or ready."""

    step: int
    first_sample: int
    rows: Future[list[Rows]]


class Feed:
    """Gives training steps their data and counts, per stage, what they consumed."""

    def __init__(
        self, config: Config, mesh: Mesh, *, device: torch.device, consumed: Mapping[str, int] | None = None
    ) -> None:
        """`consumed` holds the samples each stage had consumed when the checkpoint to resume from was written."""
        self._device = device
        self._micro_batch_size = config.tokens.micro_batch_size
        self._accumulation = config.tokens.batch_accumulation_per_replica
        replica_batch = self._micro_batch_size * self._accumulation
        self._first_row = mesh.coord("dp") * replica_batch
        self._global_batch = mesh.size("dp") * replica_batch
        self._document_masking = bool(getattr(config.model.model_config, "_use_doc_masking", False))
        self._stages = build_stages(config)
        self.consumed = {scheduled.name: int((consumed or {}).get(scheduled.name, 0)) for scheduled in self._stages}
        self._loads: deque[_Load] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")

    @property
    def consumed_tokens(self) -> int:
        """Tokens consumed by all stages together."""
        return sum(self.consumed[scheduled.name] * scheduled.sequence_length for scheduled in self._stages)

    def consumed_per_source(self) -> dict[str, dict[str, int]]:
        """For each stage, the samples that each of its sources gave."""
        return {
            scheduled.name: {
                f"{number}:{source.name}": taken
                for number, (source, taken) in enumerate(
                    zip(scheduled.stage.sources, scheduled.stage.taken(self.consumed[scheduled.name]), strict=True)
                )
            }
            for scheduled in self._stages
        }

    def step(self, n: int) -> StepData:
        """The data of update n = 1, 2, …; raises EndOfData when the active stage may not repeat and has run out."""
        scheduled = self._active(n)
        first = self.consumed[scheduled.name]
        limit = scheduled.stage.num_samples
        if limit is not None and first + self._global_batch > limit:
            raise EndOfData(
                f"stage {scheduled.name!r} has no data left for step {n}: {first} of {limit} samples are consumed, "
                f"a step takes {self._global_batch}, and data.repeat is false"
            )
        rows = self._take(n, scheduled, first)
        self.consumed[scheduled.name] = first + self._global_batch
        self._log_new_epochs(scheduled, first)
        self._load_ahead(n + 1)
        num_tokens = self._global_batch * scheduled.sequence_length
        return StepData(scheduled.name, [self._batch(part) for part in rows], self._global_batch, num_tokens)

    def _active(self, n: int) -> ScheduledStage:
        return [scheduled for scheduled in self._stages if scheduled.start <= n][-1]

    def _take(self, n: int, scheduled: ScheduledStage, first: int) -> list[Rows]:
        """The rows of step n: loaded ahead if n is the step that was expected, else loaded now."""
        while self._loads:
            load = self._loads.popleft()
            if (load.step, load.first_sample) == (n, first):
                return load.rows.result()
            load.rows.cancel()
        return self._load(scheduled, first)

    def _load_ahead(self, n: int) -> None:
        """Ask the thread for the steps from n on that are not yet asked for."""
        firsts = dict(self.consumed)
        for step in range(n, n + _STEPS_AHEAD):
            scheduled = self._active(step)
            first = firsts[scheduled.name]
            firsts[scheduled.name] = first + self._global_batch
            limit = scheduled.stage.num_samples
            if limit is not None and first + self._global_batch > limit:
                return
            if step - n >= len(self._loads):
                self._loads.append(_Load(step, first, self._executor.submit(self._load, scheduled, first)))

    def _load(self, scheduled: ScheduledStage, first: int) -> list[Rows]:
        """This replica's rows of the batch that begins at sample `first`, one item per microbatch."""
        size = self._micro_batch_size
        windows = scheduled.stage.rows(first + self._first_row, size * self._accumulation)
        return [
            collate(windows[start : start + size], document_masking=self._document_masking)
            for start in range(0, len(windows), size)
        ]

    def _batch(self, rows: Rows) -> Batch:
        doc_starts = None if rows.doc_starts is None else self._tensor(rows.doc_starts)
        return Batch(self._tensor(rows.tokens), self._tensor(rows.labels), self._tensor(rows.positions), doc_starts)

    def _tensor(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _log_new_epochs(self, scheduled: ScheduledStage, first: int) -> None:
        before, after = scheduled.stage.epochs(first), scheduled.stage.epochs(self.consumed[scheduled.name])
        for source, old, new in zip(scheduled.stage.sources, before, after, strict=True):
            if int(new) > int(old):
                logger.info(f"stage {scheduled.name!r}: {source.name} has been read {int(new)} times and repeats")

    def fingerprints(self) -> dict[str, list[dict[str, Any]]]:
        """For each stage, what identifies the data of each of its sources."""
        return {
            scheduled.name: [{"name": source.name, **source.fingerprint()} for source in scheduled.stage.sources]
            for scheduled in self._stages
        }

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; the positions follow from `consumed`, the rest is for people and checks."""
        return {
            "consumed": dict(self.consumed),
            "consumed_tokens": self.consumed_tokens,
            "consumed_per_source": self.consumed_per_source(),
        }

    def close(self) -> None:
        """Stop the loading thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
