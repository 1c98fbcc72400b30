"""What one rank holds at the worst moment of a step: its state, and a walk through its program's F, B and W.

received ─► F ─► kept ──────► B ─► stash ──────► W
            └─► sent          └─► gradient, sent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanotron.pipeline.communication import Exchange, Program
from nanotron.pipeline.schedules import Action, Schedule
from nanotron.pipeline.timeline import Message, input_of, output_of
from nanotron.plan.measure import ChunkCounts, StateCounts

if TYPE_CHECKING:
    from nanotron.config import Config


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at the worst moment of a step."""

    parameters: int
    gradients: int
    master_weights: int
    moments: int
    activations: int
    """What forward keeps for backward and backward for the weight gradients, with the temporaries of that moment: at
    ZeRO stages 2 and 3 also blocks' whole gradients and weights."""
    buffers: int
    """Tensors received and not used yet, or sent and still leaving; the batch of token ids."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.master_weights + self.moments + self.activations + self.buffers


def rank_memory(
    config: Config, schedule: Schedule, rank: int, program: Program, chunks: Sequence[ChunkCounts], state: StateCounts
) -> RankMemory:
    """The memory of pipeline rank ``rank``, which runs ``program`` with these chunks and holds this state."""
    walk = _Walk(schedule, rank, chunks)
    for step in program:
        walk.take(step)
    tokens, length = config.tokens, config.tokens.sequence_length // config.parallelism.context_parallel_size
    batch = 3 * 8 * tokens.micro_batch_size * tokens.batch_accumulation_per_replica * length
    return RankMemory(
        parameters=state.parameters,
        gradients=state.gradients,
        master_weights=state.master_weights,
        moments=state.moments,
        activations=max(walk.peak - walk.buffers_at_peak, state.update_peak) + state.other,
        buffers=walk.buffers_at_peak + batch,
    )


class _Walk:
    """Follows a program and keeps account of what is alive on top of the rank's state."""

    def __init__(self, schedule: Schedule, rank: int, chunks: Sequence[ChunkCounts]) -> None:
        self.schedule, self.rank, self.chunks = schedule, rank, chunks
        self.inside = 0  # of chunks: kept and stashed
        self.buffers: dict[Message, int] = {}  # received, handed over, or leaving
        self.leaving: list[Message] = []
        self.buffered = self.peak = self.buffers_at_peak = 0

    def take(self, step: Action | Exchange) -> None:
        """One step of the program."""
        if isinstance(step, Exchange):
            self._exchange(step)
        else:
            self._act(step, self.chunks[step.chunk])

    def _exchange(self, exchange: Exchange) -> None:
        for message in self.leaving:  # what left earlier has arrived by now
            self._drop(message)
        self.leaving = [transfer.message for transfer in exchange.transfers if transfer.source == self.rank]
        for transfer in exchange.transfers:
            if transfer.target == self.rank:
                self._add(transfer.message, self.chunks[0].message)
        self._note(0)

    def _act(self, action: Action, chunk: ChunkCounts) -> None:
        need = input_of(self.schedule, self.rank, action)
        if need is not None:
            self._drop(need)  # it is part of what the chunk holds now
        made = output_of(self.schedule, self.rank, action)
        if action.kind == "F":
            self._note(chunk.forward_peak)
            self.inside += chunk.kept
            if made is not None:
                self._add(made, chunk.sent)
        elif action.kind == "W":
            self._note(max(0, chunk.weights_peak - chunk.stash))
            self.inside -= chunk.stash
        else:
            self.inside -= chunk.kept
            self._note(chunk.backward_peak if action.kind == "B" else chunk.fused_peak)
            self.inside += chunk.stash if action.kind == "B" else 0
            if made is not None:
                self._add(made, chunk.message)

    def _add(self, message: Message, size: int) -> None:
        self.buffers[message] = size
        self.buffered += size

    def _drop(self, message: Message) -> None:
        self.buffered -= self.buffers.pop(message)

    def _note(self, extra: int) -> None:
        total = self.inside + self.buffered + extra
        if total > self.peak:
            self.peak, self.buffers_at_peak = total, self.buffered
