"""A step of a config as numbers and names: what the page shows, and what tests compare with the planner's traffic."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nanotron.errors import ConfigError
from nanotron.explain.record import PACKAGE, Event, Line, fake_training, record
from nanotron.models.specs import StageModules
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import Box
from nanotron.pipeline.communication import Exchange, Step
from nanotron.pipeline.schedules import Schedule
from nanotron.pipeline.simulate import Simulation, simulate
from nanotron.plan.fakes import counting
from nanotron.plan.stage_costs import counted_costs
from nanotron.training.topology import (
    mesh_axes,
    model_size,
    modules_of_ranks,
    parameter_specs,
    pipeline_schedule,
    tied_stages,
)

if TYPE_CHECKING:
    from nanotron.config import Config

Data = dict[str, Any]
"""As JSON has it."""
AXES = ("pp", "dp", "ep", "cp", "tp")
MOST_RANKS = 64
MOST_WORK = 4096
"""Layers times microbatches: each is really run, which takes some hundredths of a second."""
CONTEXT = 2
"""Lines of code above and below one that is shown."""


def explain(config: Config, tell: Callable[[str], None] = lambda line: None) -> Data:
    """Everything about one step; ``tell`` says how far it is. Raises ConfigError for more than a page can show.

    A lane is that of one pipeline rank, whose dp, cp and tp neighbours do the same. Of tp ranks the last is run: if a
    vocabulary does not divide, it has the largest shard.
    """
    _refuse_too_much(config)
    schedule, layout = pipeline_schedule(config), config.parallelism
    simulation = simulate(schedule, config.tokens.batch_accumulation_per_replica, counted_costs(config))
    meshes = [Mesh(mesh_axes(config), rank) for rank in range(layout.world_size)]
    lines, contents, lanes = _Numbers(), _Numbers(), []
    for pp_rank in range(schedule.ranks):
        tell(f"running the step of pp rank {pp_rank + 1} of {schedule.ranks}")
        events = record(config, meshes[0].rank_at(pp=pp_rank, tp=layout.tp - 1)).events
        lanes.append(_Lane(schedule, simulation, pp_rank, events, lines, contents).cells())
    axes = {axis for content in contents.all for _, axis, *_ in content}
    return {
        "name": config.general.project,
        "facts": _facts(config, schedule),
        "sizes": {axis: meshes[0].size(axis) for axis in AXES},
        "ranks": [{axis: mesh.coord(axis) for axis in AXES} for mesh in meshes],
        "stages": [[_held(modules) for modules in chunks] for chunks in modules_of_ranks(config)],
        "groups": {axis: _groups(config, meshes, axis) for axis in sorted(axes)},
        "lanes": lanes,
        "contents": contents.all,
        "lines": [_code(line) for line in lines.all],
        "parameters": _parameters(config),
    }


def _refuse_too_much(config: Config) -> None:
    world, m = config.parallelism.world_size, config.tokens.batch_accumulation_per_replica
    layers = config.model.model_config.num_hidden_layers
    if world > MOST_RANKS:
        replicas = MOST_RANKS * config.parallelism.dp // world
        smaller = f"parallelism.dp={replicas}" if replicas else "parallelism.pp=2"
        raise ConfigError(
            f"parallelism.dp · cp · tp · pp = {world}: a page has room for {MOST_RANKS} ranks; explain a smaller one, "
            f"as in --override {smaller}"
        )
    if layers * m > MOST_WORK:
        raise ConfigError(
            f"tokens.batch_accumulation_per_replica={m}: {layers} layers have {layers * m:,} microbatches to run, over "
            f"{MOST_WORK:,}; all are alike, so explain fewer, as in "
            f"--override tokens.batch_accumulation_per_replica={2 * config.parallelism.pp}"
        )


def _facts(config: Config, schedule: Schedule) -> Data:
    layout, tokens, optimizer = config.parallelism, config.tokens, config.optimizer
    facts: Data = {
        "parameters": model_size(config),
        "ranks": layout.world_size,
        "schedule": schedule.name,
        "microbatches": f"{tokens.batch_accumulation_per_replica} × {tokens.micro_batch_size} rows",
        "tokens of a row": tokens.sequence_length,
        "tensors of": config.model.dtype,
        "tensor parallelism": layout.tp_mode if layout.tp > 1 else "",
        "context parallelism": layout.cp_mode if layout.context_parallel_size > 1 else "",
        "shards of replicas": layout.dp_shard or "",
        "ZeRO stage": optimizer.zero_stage,
        "optimizer": optimizer.optimizer_factory.name,
        "optimizer state": "in host memory" if optimizer.offload else "",
        "batch ramp": "its last, full batch" if tokens.batch_ramp else "",
    }
    return {name: str(value) for name, value in facts.items() if value != ""}


def _held(modules: StageModules) -> str:
    layers = list(modules.layers)
    middle = [f"layers {layers[0]}–{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"] if layers else []
    return ", ".join(["embedding"] * modules.embed + middle + ["norm, head"] * modules.head)


def _groups(config: Config, meshes: Sequence[Mesh], axis: str) -> list[list[int]]:
    """The groups of ranks that meet in what is counted for an axis (`Traffic.axis`)."""
    if axis == "world":
        return [list(range(len(meshes)))]
    if axis == "tied":
        (stages,) = tied_stages(config).values()
        return _different([mesh.rank_at(pp=stage) for stage in stages] for mesh in meshes)
    return _different(list(mesh.ranks_along(*axis.split("+"))) for mesh in meshes)


def _different(groups: Iterator[list[int]]) -> list[list[int]]:
    return [list(group) for group in dict.fromkeys(map(tuple, groups))]


def _code(line: Line) -> Data:
    """A line, where it is, and the code around it."""
    first = max(1, line.number - CONTEXT)
    code = "".join(linecache.getline(line.file, number) for number in range(first, line.number + CONTEXT + 1))
    file = "nanotron/" + line.file.removeprefix(PACKAGE).replace("\\", "/")
    return {"at": f"{file}:{line.number}", "function": line.function, "code": code.rstrip().split("\n"), "first": first}


class _Numbers:
    """Gives each different thing a number, in the order in which they come."""

    def __init__(self) -> None:
        self._found: dict[Any, int] = {}

    def __getitem__(self, thing: Hashable) -> int:
        return self._found.setdefault(thing, len(self._found))

    @property
    def all(self) -> list[Any]:
        return list(self._found)


class _Lane:
    """A pipeline rank's program, with what happens in each of its steps, between what comes before and after it."""

    def __init__(
        self,
        schedule: Schedule,
        simulation: Simulation,
        pp_rank: int,
        events: Sequence[Event],
        lines: _Numbers,
        contents: _Numbers,
    ) -> None:
        self.schedule, self.pp_rank, self.lines, self.contents = schedule, pp_rank, lines, contents
        self.program = {self._name(step): step for step in simulation.programs[pp_rank]}
        self.during: dict[str | Line, list[Event]] = {}
        for event in events:
            self.during.setdefault(event.during, []).append(event)
        self.spans = {(s.kind[0], s.microbatch, s.stage): (s.start, s.end) for s in simulation.timeline.spans}
        self.end = simulation.timeline.start + simulation.timeline.duration

    def cells(self) -> list[Data]:
        """In order; times in units of the mean rank's work on a microbatch."""
        places = list(self.during)
        begin = next(index for index, place in enumerate(places) if isinstance(place, str))
        outside = [place for place in places if isinstance(place, Line)]
        assert {place for place in places if isinstance(place, str)} <= set(self.program), "none of the program's steps"
        early = [line for line in outside if places.index(line) < begin]
        late = [line for line in outside if line not in early]
        cells = [self._cell(line, "step", i - len(early), i + 1 - len(early)) for i, line in enumerate(early)]
        clock = 0.0
        for name, step in self.program.items():
            start, clock = self._times(step, clock)
            cells.append(self._cell(name, step.kind, start, clock) | self._details(step))
        return cells + [self._cell(line, "step", self.end + i, self.end + i + 1) for i, line in enumerate(late)]

    def _cell(self, place: str | Line, kind: str, start: float, end: float) -> Data:
        name = linecache.getline(place.file, place.number).strip() if isinstance(place, Line) else place
        met = [event for event in self.during.get(place, ()) if event.kind != "kernel"]
        content = tuple(
            (*event[1:4], *(tuple(self.lines[line] for line in lines) for lines in event[4:])) for event in met
        )
        line = self.lines[place] if isinstance(place, Line) else None
        return {"name": name, "kind": kind, "start": start, "end": end, "content": self.contents[content], "line": line}

    def _name(self, step: Step) -> str:
        """As the engine calls it."""
        if isinstance(step, Exchange):
            return str(step)
        stage = self.schedule.placement(self.pp_rank, step.chunk)
        return f"{step.kind} of microbatch {step.microbatch} in stage {stage}"

    def _times(self, step: Step, clock: float) -> tuple[float, float]:
        """An exchange takes no time."""
        if isinstance(step, Exchange):
            return clock, clock
        place = (step.microbatch, self.schedule.placement(self.pp_rank, step.chunk))
        spans = [self.spans[key] for kind in step.kind if (key := (kind, *place)) in self.spans]
        return spans[0][0], spans[-1][1]

    def _details(self, step: Step) -> Data:
        if not isinstance(step, Exchange):
            return {"microbatch": step.microbatch, "stage": self.schedule.placement(self.pp_rank, step.chunk)}
        transfers = [{"for": message._asdict(), "from": source, "to": to} for message, source, to in step.transfers]
        return {"peer": step.peer, "transfers": transfers}


def _parameters(config: Config) -> list[Data]:
    """Every parameter: how it is cut, and what of it, its gradient and its optimizer's state each rank keeps."""
    found: dict[str, dict[str, Data]] = {}
    for rank in range(config.parallelism.world_size):
        with counting(), fake_training(config, rank) as training:
            buckets = {
                slot.spec.name: {
                    "bucket": f"{index} of {len(training.buckets.all)}, {bucket.numel:,} elements",
                    "gradient": str(bucket.grad_shard.dtype).removeprefix("torch."),
                    "whole": bucket.grads is not None,
                    "updates": [box for _, box, _ in bucket.boxes(bucket.grad_shard, bucket.shard, slot)],
                }
                for index, bucket in enumerate(training.buckets.all)
                for slot in bucket.slots
            }
            kept: dict[str, dict[str, list[Box]]] = {}
            for shard in training.state_shards():
                dtype = str(shard.tensor.dtype).removeprefix("torch.")
                one = kept.setdefault(shard.name, {}).setdefault(f"{shard.kind} {dtype}", [])
                one.append(shard.box)
            for name, parts in kept.items():
                hold: Data = {"parts": parts, **buckets.get(name, {})}
                found.setdefault(name, {}).setdefault(repr(hold), hold | {"ranks": []})["ranks"].append(rank)
    return [
        {
            "name": spec.name,
            "shape": spec.shape,
            "cut": [f"dim {dim} over {axis}" for axis, dim in spec.shard],
            "decay": spec.weight_decay,
            "optimizer": spec.optimizer if spec.learns else "none: moved by a rule of its own",
            "holds": list(found[spec.name].values()),
        }
        for spec in parameter_specs(config).values()
    ]
