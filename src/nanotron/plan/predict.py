"""What a layout will cost: memory of every pipeline rank, and the time of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from nanotron.layout import mesh_axes, pipeline_schedule
from nanotron.mesh import Mesh
from nanotron.metrics.flops import flops_per_step
from nanotron.pipeline.communication import Program
from nanotron.pipeline.schedules import Schedule
from nanotron.pipeline.simulate import prove
from nanotron.pipeline.timeline import Timeline, execute
from nanotron.plan.counting import Traffic, Work
from nanotron.plan.hardware import Cluster
from nanotron.plan.measure import ChunkCounts, Measurements, StateCounts
from nanotron.plan.memory import RankMemory, rank_memory
from nanotron.step import Held, held_by

if TYPE_CHECKING:
    from nanotron.config import Config


@dataclass(frozen=True)
class RankPlan:
    """One pipeline rank; its dp and tp neighbours are like it."""

    pp_rank: int
    held: list[Held]
    memory: RankMemory
    traffic: Counter[tuple[str, str]]
    """Bytes per step that the rank hands to collectives and transfers, by (axis, kind)."""


@dataclass(frozen=True)
class Plan:
    """A layout on a cluster. Times in seconds per step."""

    config: Config
    cluster: Cluster
    ranks: list[RankPlan]
    bubble: float
    """Share of the pipeline's time in which a rank waits."""
    pipeline_seconds: float
    axis_seconds: dict[str, float]
    """Time of the communication along each axis on its busiest rank, hidden or not."""
    exposed_seconds: float
    """Communication after the last backward: gradients that are still under way, and the gather of the weights."""
    update_seconds: float
    model_flops: int

    @property
    def worst(self) -> RankPlan:
        """The rank that needs most memory."""
        return max(self.ranks, key=lambda rank: rank.memory.total)

    @property
    def fits(self) -> bool:
        """Whether the worst rank fits on its device."""
        return self.worst.memory.total <= self.cluster.memory_bytes

    @property
    def step_seconds(self) -> float:
        """Time of a whole step."""
        return self.pipeline_seconds + self.exposed_seconds + self.update_seconds

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.config.global_batch_size_in_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs per second and device, as a share of the dense peak; attention counted at full S²."""
        world = self.config.parallelism.world_size
        return self.model_flops / self.step_seconds / world / self.cluster.peak_flops(self.config)


class Planner:
    """Predicts layouts on one cluster; what it has measured for one layout it uses again for others."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._measurements = Measurements(accelerator=cluster.is_accelerator)

    def plan(self, config: Config) -> Plan:
        """Predict everything about one config, which has been checked."""
        schedule, microbatches = pipeline_schedule(config), config.tokens.batch_accumulation_per_replica
        held = [held_by(config, pp_rank) for pp_rank in range(schedule.ranks)]
        chunks = [self._chunks(config, parts) for parts in held]
        states = [self._state(config, pp_rank, parts) for pp_rank, parts in enumerate(held)]
        programs = prove(schedule, microbatches)
        timeline = self._timeline(config, schedule, chunks)
        ranks = [
            RankPlan(
                pp_rank,
                held[pp_rank],
                rank_memory(config, schedule, pp_rank, programs[pp_rank], chunks[pp_rank], states[pp_rank]),
                _traffic(config, schedule, pp_rank, chunks[pp_rank], states[pp_rank]),
            )
            for pp_rank in range(schedule.ranks)
        ]
        return self._assembled(config, schedule, timeline, chunks, states, ranks)

    def memory(self, config: Config) -> list[RankMemory]:
        """The memory of every pipeline rank."""
        return [rank.memory for rank in self.plan(config).ranks]

    def _chunks(self, config: Config, held: Sequence[Held]) -> list[ChunkCounts]:
        return [
            self._measurements.chunk(config, layers=hi - lo, embed=embed, head=head) for (lo, hi), embed, head in held
        ]

    def _state(self, config: Config, pp_rank: int, held: Sequence[Held]) -> StateCounts:
        layout = config.parallelism
        last_tp = pp_rank * layout.dp * layout.tp + layout.tp - 1  # the shard with the most rows of the vocabulary
        return self._measurements.state(config, last_tp, held)
