"""What a layout will cost: memory of every pipeline rank, and the time of a step."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from nanotron.models.families import flops_per_step, layer_kinds
from nanotron.models.specs import StageModules
from nanotron.ops.kernels import kernels_of
from nanotron.parallel.mesh import Mesh
from nanotron.pipeline.communication import Program, communication
from nanotron.pipeline.custom import is_custom
from nanotron.pipeline.schedules import Schedule
from nanotron.pipeline.simulate import peak
from nanotron.pipeline.timeline import Timeline, execute
from nanotron.plan.counting import Traffic, Work
from nanotron.plan.hardware import Cluster
from nanotron.plan.layouts import Change, changed
from nanotron.plan.measure import ChunkCounts, Kind, Measurements, StateCounts, leaves_each_microbatch
from nanotron.plan.memory import RankMemory, rank_memory
from nanotron.training.topology import mesh_axes, modules_of_ranks, pipeline_schedule

if TYPE_CHECKING:
    from nanotron.config import Config

LONG = 4
"""Microbatches for each pipeline rank, after which a schedule of ours has come to its worst moment: then it repeats."""


@dataclass(frozen=True)
class RankPlan:
    """One pipeline rank; its dp and tp neighbours are like it."""

    pp_rank: int
    held: list[StageModules]
    memory: RankMemory
    traffic: Counter[Traffic]
    """Collectives and transfers of a step, and the bytes that the rank hands to them."""


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
    """Communication that a step waits for outside its pipeline: gradients still under way after the last backward, and
    the weights that the first forward comes to before they have come."""
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
        """Model FLOPs (models/flops.py) per second and device, as a share of the dense peak."""
        world = self.config.parallelism.world_size
        return self.model_flops / self.step_seconds / world / self.cluster.peak_flops(self.config)


class Planner:
    """Predicts layouts on one cluster; what it has measured for one layout it uses again for others."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._measurements = Measurements("accelerator" if cluster.is_accelerator else kernels_of("cpu"))
        self._least: dict[tuple[Any, ...], list[float]] = {}
        self._under_way: dict[tuple[Any, ...], int] = {}
        self._splits: dict[tuple[Any, ...], list[list[StageModules]]] = {}
        self._programs: dict[tuple[Any, ...], list[Program]] = {}

    def plan(self, config: Config, *, every_layer: bool = False) -> Plan:
        """Predict everything about one config, which has been checked.

        ``every_layer``: build the states whole, which takes seconds for a large model, and counts buckets exactly.
        """
        schedule, held, chunks, states = self._measured(config, every_layer=every_layer)
        timeline = self._timeline(config, schedule, chunks)
        memories = self._memories(config, schedule, chunks, states)
        ranks = [
            RankPlan(
                pp_rank,
                held[pp_rank],
                memories[pp_rank],
                _traffic(config, schedule, pp_rank, chunks[pp_rank], states[pp_rank]),
            )
            for pp_rank in range(schedule.ranks)
        ]
        return self._assembled(config, timeline, chunks, states, ranks)

    def ramp(self, config: Config) -> list[tuple[int, Plan]]:
        """What the run's first steps are while its batch grows (tokens.batch_ramp): (steps, the plan of each)."""
        found, at_once = [], config.tokens.micro_batch_size * config.parallelism.dp
        for steps, samples in config.batches(config.tokens.train_steps):
            if samples < config.global_batch_size:
                smaller = deepcopy(config)
                smaller.tokens.batch_accumulation_per_replica = samples // at_once
                found.append((steps, self.plan(smaller)))
        return found

    def memories(self, config: Config) -> list[RankMemory]:
        """The memory of every pipeline rank."""
        schedule, _, chunks, states = self._measured(config)
        return self._memories(config, schedule, chunks, states)

    def fits(self, config: Config) -> bool:
        """Whether every rank's memory is enough; what is quickly known is asked first."""
        if not self.may_fit(config):
            return False
        have, held, ends = self.cluster.memory_bytes, self._held(config), (0, config.parallelism.pp - 1)
        if any(self._state(config, pp_rank, held[pp_rank]).total > have for pp_rank in ends):
            return False
        if leaves_each_microbatch(config):  # whole blocks come on top of what a chunk needs that has all to itself
            states = [self._state(config, pp_rank, parts) for pp_rank, parts in enumerate(held)]
            alone = changed(config, {"optimizer.zero_stage": 1, "parallelism.dp_shard": None})
            for chunks in (self._chunks(alone), self._chunks(config, only_bytes=True)):
                memories = self._memories(config, pipeline_schedule(config), chunks, states)
                if max(memory.total for memory in memories) > have:
                    return False
            return True
        return max(memory.total for memory in self.memories(config)) <= have

    def may_fit(self, config: Config) -> bool:
        """Whether the least that the pipeline's ends hold is not too much."""
        ends = (0, config.parallelism.pp - 1)
        return all(self.least_bytes(config, pp_rank) <= self.cluster.memory_bytes for pp_rank in ends)

    def least_bytes(self, config: Config, pp_rank: int) -> float:
        """What a rank holds at least, of numbers that many layouts share.

        State is that of as few replicas as there can be, divided by as many as there are; activations are what layers
        keep of the microbatches that are under way at once.
        """
        layout, stage = config.parallelism, config.optimizer.zero_stage
        ep = layout.expert_parallel_size
        alone: Change = {"parallelism.dp": ep, "parallelism.context_parallel_size": 1, "parallelism.dp_shard": None}
        if ep == 1:  # then all stages are alike
            alone = {**alone, "optimizer.zero_stage": 1}
        held, schedule = self._held(config)[pp_rank], pipeline_schedule(config)
        state = self._state(changed(config, alone), pp_rank, held)
        shares = layout.sharing_ranks / ep
        parts = state.parameters, state.gradients, state.master_weights + state.moments
        sharded_from = 3, 2, 1  # stages of ZeRO
        least = sum(part / (shares if stage >= first else 1) for part, first in zip(parts, sharded_from, strict=True))
        kept = min(self._measurements.kept_by_layers(config, modules) for modules in held)
        microbatches = config.tokens.batch_accumulation_per_replica
        if not is_custom(schedule.name):
            microbatches = min(microbatches, 2 * schedule.ranks)
        key = schedule.name, schedule.ranks, schedule.num_chunks, pp_rank, microbatches
        if key not in self._under_way:
            self._under_way[key] = peak(schedule.actions(pp_rank, microbatches)).activations
        return least + kept * self._under_way[key]

    def least_seconds(self, config: Config) -> float:
        """The least time of a step: until a rank's first input can have come, and of all that the rank then does."""
        schedule, held, kinds = pipeline_schedule(config), self._held(config), layer_kinds(config.model.model_config)
        microbatches, least = config.tokens.batch_accumulation_per_replica, 0.0
        places = {stage: held[rank][chunk] for stage, (rank, chunk) in schedule.holders.items()}
        stages = [self._least_of(config, places[stage], kinds) for stage in range(schedule.num_stages)]
        before = [0.0, *accumulate(forward for forward, *_ in stages)]
        for rank in range(schedule.ranks):
            its = [schedule.placement(rank, chunk) for chunk in range(schedule.num_chunks)]
            least = max(least, before[min(its)] + microbatches * sum(sum(stages[stage]) for stage in its))
        return least

    def _least_of(self, config: Config, modules: StageModules, kinds: Sequence[Kind]) -> list[float]:
        """The least time of F, B and W of a microbatch in a chunk; ``kinds`` of all layers."""
        layout, tokens = config.parallelism, config.tokens
        key: tuple[Any, ...]
        key = layout.tp, layout.tp_mode, layout.recompute_layer, layout.expert_parallel_size, tokens.micro_batch_size
        key = *key, layout.context_parallel_size, layout.cp_mode, repr(config.model), tokens.sequence_length
        key = *key, tuple(kinds[layer] for layer in modules.layers), modules[1:]
        if leaves_each_microbatch(config):
            key = *key, config.optimizer.zero_stage, layout.dp, layout.dp_shard
        if key not in self._least:
            peak = self.cluster.peak_flops(config)
            self._least[key] = [self._seconds(config, work, peak) for work in self._measurements.least(config, modules)]
        return self._least[key]

    def _measured(
        self, config: Config, *, every_layer: bool = False
    ) -> tuple[Schedule, list[list[StageModules]], list[list[ChunkCounts]], list[StateCounts]]:
        """What every pipeline rank holds, what its chunks do with a microbatch, and its state."""
        schedule = pipeline_schedule(config)
        held, chunks = self._held(config), self._chunks(config)
        states = [self._state(config, pp_rank, parts, every_layer) for pp_rank, parts in enumerate(held)]
        return schedule, held, chunks, states

    def _chunks(self, config: Config, *, only_bytes: bool = False) -> list[list[ChunkCounts]]:
        """What every pipeline rank's chunks do with a microbatch."""
        measured = partial(self._measurements.chunk, config, only_bytes=only_bytes)
        return [[measured(modules) for modules in parts] for parts in self._held(config)]

    def _held(self, config: Config) -> list[list[StageModules]]:
        """The modules of every pipeline rank, by chunk."""
        layout = config.parallelism
        stages = layout.pp_engine, layout.pp, layout.pp_virtual_stages, str(layout.pp_layers)
        key = repr(config.model.model_config), config.tokens.sequence_length, stages
        if key not in self._splits:
            self._splits[key] = modules_of_ranks(config)
        return self._splits[key]

    def _memories(
        self,
        config: Config,
        schedule: Schedule,
        chunks: Sequence[Sequence[ChunkCounts]],
        states: Sequence[StateCounts],
    ) -> list[RankMemory]:
        return [
            rank_memory(config, schedule, rank, program, chunks[rank], states[rank])
            for rank, program in enumerate(self._program(config, schedule))
        ]

    def _program(self, config: Config, schedule: Schedule) -> list[Program]:
        """What every pipeline rank does in a step, of a long one only as much as its worst moment needs."""
        microbatches = config.tokens.batch_accumulation_per_replica
        if not is_custom(schedule.name) and microbatches > LONG * schedule.ranks:
            microbatches = LONG * schedule.ranks + microbatches % schedule.ranks
        key = schedule.name, schedule.ranks, schedule.num_chunks, schedule.sends_before_weights, microbatches
        if key not in self._programs:
            self._programs[key] = communication(schedule, microbatches)
        return self._programs[key]

    def _state(
        self, config: Config, pp_rank: int, held: Sequence[StageModules], every_layer: bool = False
    ) -> StateCounts:
        layout = config.parallelism  # of the tp ranks the last: its shard has the most rows of the vocabulary
        last_tp = pp_rank * (layout.world_size // layout.pp) + layout.tp - 1
        return self._measurements.state(config, last_tp, held, every_layer=every_layer)

    def _timeline(self, config: Config, schedule: Schedule, chunks: Sequence[Sequence[ChunkCounts]]) -> Timeline:
        """The pipeline's clockwork with the predicted time of every F, B and W."""
        peak, stride = self.cluster.peak_flops(config), config.parallelism.world_size // config.parallelism.pp
        seconds = {
            (kind, schedule.placement(rank, index)): self._seconds(config, work, peak)
            for rank, held in enumerate(chunks)
            for index, chunk in enumerate(held)
            for kind, work in (("F", chunk.forward), ("B", chunk.backward), ("W", chunk.weights))
        }
        return execute(
            schedule,
            config.tokens.batch_accumulation_per_replica,
            lambda kind, stage: seconds[kind, stage],
            transfer=self.cluster.transfer_seconds(chunks[0][0].message, stride),
        )

    def _seconds(self, config: Config, work: Work, peak: float) -> float:
        """Time of counted work with its collectives, of which only blocks' weights and gradients travel meanwhile."""
        traffic = self._traffic_seconds(config, work)
        meanwhile = sum(traffic.pop(axes, 0.0) for axes in _axes_of_shards(config))
        return max(self.cluster.compute_seconds(work, peak) + sum(traffic.values()), meanwhile)

    def _traffic_seconds(self, config: Config, work: Work) -> dict[str, float]:
        """Time of the collectives in some work, by axis."""
        seconds: dict[str, float] = {}
        for key in work:
            if isinstance(key, Traffic) and key.what == "bytes":
                ranks = ranks_of(config, key.axis)
                calls, on_a_node = work[key._replace(what="calls")], bisect_left(ranks, self.cluster.per_node)
                time = self.cluster.collective_seconds(key.kind, work[key], calls, len(ranks), on_a_node)
                seconds[key.axis] = seconds.get(key.axis, 0.0) + time
        return seconds

    def _assembled(
        self,
        config: Config,
        timeline: Timeline,
        chunks: Sequence[Sequence[ChunkCounts]],
        states: Sequence[StateCounts],
        ranks: list[RankPlan],
    ) -> Plan:
        """Add up a step: the pipeline, then what is left of the reductions, the update, the gather."""
        peak = self.cluster.peak_flops(config)
        duration, exposed = timeline.duration, 0.0
        axis_seconds: dict[str, float] = {}
        for rank, held, state in zip(ranks, chunks, states, strict=True):
            traffic = self._traffic_seconds(config, state.update)
            _, end = _last_backward(timeline, rank.pp_rank)
            hidden = self._hidden_seconds(config, timeline, rank.pp_rank, state.update)
            left = end + sum(traffic.values()) - hidden - (timeline.start + duration)
            left += sum(sum(self._traffic_seconds(config, chunk.first).values()) for chunk in held)
            exposed = max(exposed, left)
            busy = self._axis_seconds(config, held, traffic)
            axis_seconds = {axis: max(axis_seconds.get(axis, 0.0), busy[axis]) for axis in axis_seconds | busy}
        samples = config.global_batch_size
        model = config.model.model_config
        return Plan(
            config=config,
            cluster=self.cluster,
            ranks=ranks,
            bubble=timeline.bubble,
            pipeline_seconds=duration,
            axis_seconds=dict(axis_seconds),
            exposed_seconds=max(0.0, exposed),
            update_seconds=max(self.cluster.compute_seconds(state.update, peak) for state in states),
            model_flops=flops_per_step(model, num_samples=samples, sequence_length=config.tokens.sequence_length),
        )

    def _hidden_seconds(self, config: Config, timeline: Timeline, pp_rank: int, update: Work) -> float:
        """Time of an update's collectives in which a rank computes: gradients leave in the last microbatch's backward,
        weights come in the first one's forward, of the next step. One bucket of each has nothing to hide behind.
        """
        start, end = _last_backward(timeline, pp_rank)
        forward = max(span.end for span in timeline.of_rank(pp_rank) if (span.kind, span.microbatch) == ("F", 0))
        sums, hidden = _sums_of_gradients(config), 0.0
        for gathers, room in ((False, end - start), (True, forward - timeline.start)):
            keys = [key for key in update if isinstance(key, Traffic) and key.axis in sums]
            work = Work({key: update[key] for key in keys if (key.kind == "all_gather") == gathers})
            calls = sum(count for key, count in work.items() if isinstance(key, Traffic) and key.what == "calls")
            seconds = sum(self._traffic_seconds(config, work).values())
            hidden += min(seconds * (1 - 1 / calls), room) if calls else 0.0
        return hidden

    def _axis_seconds(
        self, config: Config, chunks: Sequence[ChunkCounts], traffic: dict[str, float]
    ) -> dict[str, float]:
        """A rank's time of communication in a step by axis; ``traffic`` is that of the update."""
        seconds = dict(traffic)
        for chunk in chunks:
            for work in (chunk.forward, chunk.backward, chunk.weights):
                for axis, time in self._traffic_seconds(config, work).items():
                    seconds[axis] = seconds.get(axis, 0.0) + time * config.tokens.batch_accumulation_per_replica
        return seconds


def _last_backward(timeline: Timeline, rank: int) -> tuple[float, float]:
    """Start and end of the work of a rank's last microbatch on the way back, during which its buckets leave."""
    spans = [span for span in timeline.of_rank(rank) if span.kind != "F"]
    last = max(span.microbatch for span in spans)
    return min(span.start for span in spans if span.microbatch == last), max(span.end for span in spans)


def ranks_of(config: Config, axis: str) -> Sequence[int]:
    """The ranks that rank 0 meets in the collectives counted for an axis (``Traffic.axis``), in order."""
    mesh = Mesh(mesh_axes(config))
    if axis == "world":
        return range(mesh.world)
    return mesh.ranks_along("pp")[:: mesh.size("pp") - 1] if axis == "tied" else mesh.ranks_along(*axis.split("+"))


def _sums_of_gradients(config: Config) -> set[str]:
    """The axes that gradients are summed over, as traffic names them: those of experts that replicas share differ."""
    parts = Mesh(mesh_axes(config)).data_parts
    return {"+".join(parts), "+".join(part for part in parts if part != "ep")}


def _axes_of_shards(config: Config) -> set[str]:
    """The axes over which whole blocks come and go in every microbatch, where nothing else travels over them."""
    if not leaves_each_microbatch(config):
        return set()
    shards = {"+".join(Mesh.shards_and_copies(axes.split("+"))[0]) for axes in _sums_of_gradients(config)}
    return shards - {"", "cp", "ep"}


def _traffic(
    config: Config, schedule: Schedule, pp_rank: int, chunks: Sequence[ChunkCounts], state: StateCounts
) -> Counter[Traffic]:
    """Collectives and transfers of one rank in a step, and their bytes."""
    microbatches = config.tokens.batch_accumulation_per_replica
    total: Counter[Traffic] = Counter()
    for index, chunk in enumerate(chunks):
        for work in (chunk.forward, chunk.backward, chunk.weights):
            for key in work:
                if isinstance(key, Traffic):
                    total[key] += microbatches * work[key]
        total += Counter({key: count for key, count in chunk.first.items() if isinstance(key, Traffic)})
        stage = schedule.placement(pp_rank, index)
        for neighbour in (stage - 1, stage + 1):
            if neighbour in schedule.holders and schedule.holders[neighbour][0] != pp_rank:
                total[Traffic("send", "pp", "calls")] += microbatches
                total[Traffic("send", "pp", "bytes")] += microbatches * chunk.message
    return total + Counter({key: count for key, count in state.update.items() if isinstance(key, Traffic)})
