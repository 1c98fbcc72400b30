"""Going back to the last checkpoint by itself, past the samples that did harm (optimizer.on_nan, on_spike: rollback).

    step       1  2  3  4 │ 5  6  7 ×        a checkpoint of step 4; the loss of step 7 is not finite
    samples    0 …     47 │ 48 …   83        of three steps of 12: left out from now on, whatever the layout
                          │ 5  6  7  8 …     made again, with samples 84, 85, …

The run is then the one that had these samples among its `data.skip_samples` from the beginning, to the last bit. What
is left out is part of every later checkpoint's state.json; a run that ends before it has saved one goes on from the one
before, and meets the same harm. Harm is what every rank reads off the control word, so all decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from nanotron.data.order.skips import Skips
from nanotron.logging import get_logger
from nanotron.metrics.columns import ROLLBACK_LOST_S, ROLLBACKS, ROLLED_BACK_FROM
from nanotron.metrics.sinks import Row
from nanotron.metrics.spikes import LossSpikes
from nanotron.parallel.agreement import Agreement
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.store import Store
from nanotron.training.control import Outcome
from nanotron.training.init_or_resume import StartingPoint, checkpoint_to_resume, init_or_resume
from nanotron.training.step import Training

if TYPE_CHECKING:
    from nanotron.config import Config

logger = get_logger(__name__)


class Harm(NamedTuple):
    """A step that the run goes back from."""

    step: int
    what: str
    consumed: Mapping[str, int]
    """Samples of each stage, with this step's."""


class Rollbacks:
    """Those of a run so far, and whether there is to be another one; the same on every rank."""

    def __init__(self, config: Config, state: Mapping[str, Any] | None) -> None:
        """``state``: of the checkpoint that the run goes on from."""
        self._config, optimizer = config, config.optimizer
        self._on_nan, self._on_spike = optimizer.on_nan == "rollback", optimizer.on_spike == "rollback"
        self._spikes, self._lost_s = LossSpikes(), 0.0
        self.record: list[dict[str, Any]] = list((state or {}).get("rollbacks", ()))
        """As state.json has it."""

    @property
    def left_out(self) -> dict[str, list[list[int]]]:
        """By stage, the ranges of samples that all of them leave out."""
        ranges: dict[str, list[list[int]]] = {}
        for one in self.record:
            for stage, (first, end) in one["left_out"].items():
                ranges.setdefault(stage, []).append([first, end])
        return ranges

    def watch_after(self, spikes: LossSpikes, mesh: Mesh, store: Store | None) -> None:
        """Look for loss spikes on every rank after those that rank 0 knows of. Collective through the store."""
        if self._on_spike:
            agreement = Agreement("spikes", mesh.rank, mesh.world, store, timeout_s=self._config.general.timeout_s)
            self._spikes = LossSpikes(*agreement.decide("so far", spikes.state(), lambda found: found[0]))

    def harm(self, step: int, outcome: Outcome, stage: str, consumed: Mapping[str, int]) -> Harm | None:
        """What makes the run go back from a step, the next in order, if anything does."""
        spike = self._spikes.add(step, outcome.lm_loss, stage) if self._on_spike else None
        if len(self.record) == self._config.optimizer.max_rollbacks:
            return None
        if self._on_nan and not outcome.finite:
            what = f"step {step}: loss {outcome.lm_loss} or gradient norm {outcome.grad_norm} is not finite"
            return Harm(step, what, consumed)
        return None if spike is None else Harm(step, str(spike), consumed)

    def go_back(
        self, harm: Harm, training: Training, mesh: Mesh, store: Store | None, skips: Mapping[str, Skips]
    ) -> StartingPoint:
        """Make the model that of the newest complete checkpoint, or of the start; where the run goes on.

        ``skips``: what each stage has left out so far. Collective.
        """
        for piece in training.state_shards():
            if piece.kind not in {"weight", "master"}:  # a start does not fill them
                piece.tensor.zero_()
        training.optimizer.updates.zero_()
        start = init_or_resume(training, self._config, mesh, store, checkpoint_to_resume(self._config, mesh, store))
        training.buckets.start_gather()
        before = start.state["consumed"] if start.state else {}
        left_out = {
            stage: [skips[stage].end(before.get(stage, 0)), skips[stage].end(consumed)]
            for stage, consumed in harm.consumed.items()
            if consumed > before.get(stage, 0)
        }
        self.record.append({"step": start.step, "bad_step": harm.step, "left_out": left_out})
        if mesh.rank == 0:
            logger.warning(
                f"{harm.what}; back to step {start.step}, without samples {_named(left_out.items())} (rollback "
                f"{len(self.record)} of optimizer.max_rollbacks={self._config.optimizer.max_rollbacks})"
            )
        return start

    def row(self, lost_s: float) -> Row:
        """What the first row after the last rollback says; ``lost_s``: the time since the run went on from there."""
        steps = [rollback["step"] for rollback in self.record[-2:]]
        again = len(steps) == 2 and steps[0] == steps[1]
        self._lost_s = lost_s + (self._lost_s if again else 0.0)
        return {
            ROLLED_BACK_FROM: self.record[-1]["bad_step"],
            ROLLBACKS: len(self.record),
            ROLLBACK_LOST_S: self._lost_s,
        }


def _named(left_out: Iterable[tuple[str, list[int]]]) -> str:
    return ", ".join(f"{first} to {end - 1} of stage {stage!r}" for stage, (first, end) in left_out)
