"""The proof of a schedule before it may run, and what it will cost.

Two questions, two answers. Can it hang? `rendezvous` executes exactly the lists that the engine issues under the worst
rules there are: every transfer and every reduction blocks its ranks until all have come to it. How long does it take?
`execute` (timeline.py) lets transfers overlap computation, as they do over gloo and nccl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from nanotron.errors import ConfigError
from nanotron.pipeline.communication import Exchange, Program, Step, Transfer, communication
from nanotron.pipeline.schedules import Action, Schedule, split_fused
from nanotron.pipeline.timeline import StageCost, Timeline, execute, input_of, unit_costs


class Peak(NamedTuple):
    """The most that one rank holds at once, counted in microbatches of one chunk."""

    activations: int  # forward done, backward not yet: autograd's saved tensors
    stashes: int  # B done, W not yet: what the weight gradients still need
    held: int  # both together


@dataclass(frozen=True)
class Simulation:
    """A proven schedule: what every rank issues, when it runs, and each rank's peak memory."""

    programs: list[Program]
    timeline: Timeline
    peaks: list[Peak]


def simulate(
    schedule: Schedule,
    microbatches: int,
    cost: StageCost = unit_costs,
    *,
    transfer: float = 0.0,
    eager_weights: bool = False,
) -> Simulation:
    """Prove a schedule, then time it (arguments as in `execute`). Raises ConfigError naming rank, stage and action."""
    programs = prove(schedule, microbatches)
    timeline = execute(schedule, microbatches, cost, transfer=transfer, eager_weights=eager_weights)
    return Simulation(programs, timeline, [peak(program) for program in programs])


def prove(schedule: Schedule, microbatches: int) -> list[Program]:
    """Every rank's program, after checking that it does all the work once and cannot hang."""
    check_actions(schedule, microbatches)
    programs = communication(schedule, microbatches)
    rendezvous(schedule, with_reductions(schedule, programs))
    return programs


def check_actions(schedule: Schedule, microbatches: int) -> None:
    """Each microbatch goes forward, backward and into the weights once per chunk, in an order that keeps its sums.

    A rank's W must follow the order of its B: each weight's gradients are summed first-in first-out, whenever W runs.
    """
    places = [(rank, chunk) for rank in range(schedule.ranks) for chunk in range(schedule.num_chunks)]
    stages = sorted(schedule.placement(*place) for place in places)
    if stages != list(range(schedule.num_stages)):
        raise ConfigError(
            f"schedule {schedule.name} places stages {stages}; "
            f"each of 0..{schedule.num_stages - 1} must be held exactly once"
        )
    for rank in range(schedule.ranks):
        actions = split_fused(schedule.actions(rank, microbatches))
        _check_counts(schedule, rank, actions, microbatches)
        _check_order(schedule, rank, actions)


def _check_counts(schedule: Schedule, rank: int, actions: Sequence[Action], microbatches: int) -> None:
    expected = {
        Action(kind, microbatch, chunk)
        for kind in "FBW"
        for microbatch in range(microbatches)
        for chunk in range(schedule.num_chunks)
    }
    counts = Counter(actions)
    for action in sorted(expected | counts.keys()):
        if counts[action] != (action in expected):
            held = 0 <= action.chunk < schedule.num_chunks
            where = f"stage {schedule.placement(rank, action.chunk)}" if held else f"chunk {action.chunk}"
            raise ConfigError(
                f"schedule {schedule.name}, rank {rank}: {action.kind} of microbatch {action.microbatch} in {where} "
                f"appears {counts[action]} times instead of {int(action in expected)}; every rank must do F, B and W "
                f"of each of its {microbatches} microbatches and {schedule.num_chunks} chunks exactly once"
            )


def _check_order(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    position = {action: index for index, action in enumerate(actions)}
    for action in actions:
        for earlier, later in ("FB", "BW"):
            before = action._replace(kind=earlier)
            if action.kind == later and position[before] > position[action]:
                raise ConfigError(
                    f"schedule {schedule.name}, rank {rank}: {action} of stage "
                    f"{schedule.placement(rank, action.chunk)} comes before its {before}; move it behind"
                )
    order = {kind: [action for action in actions if action.kind == kind] for kind in "BW"}
    for backward, weights in zip(order["B"], order["W"], strict=True):
        if weights[1:] != backward[1:]:
            raise ConfigError(
                f"schedule {schedule.name}, rank {rank}: {weights} of stage "
                f"{schedule.placement(rank, weights.chunk)} overtakes {backward._replace(kind='W')}; a rank's W must "
                f"follow the order of its B, so that weight gradients are summed in one order"
            )


class Collective(NamedTuple):
    """A reduction of gradients, which ends when all its ranks have come to it."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"the reduction of {self.name} over ranks {self.ranks}"


BlockingStep = Step | Collective


def with_reductions(schedule: Schedule, programs: Sequence[Program], replicas: int = 2) -> list[list[BlockingStep]]:
    """The programs of several replicas, with all that the optimizer adds to them; replica d's ranks follow d - 1's.

    Gradient buckets are reduced over the replicas when a chunk's last B and its last W complete them; what the first
    and the last stage share is summed over these two after all actions, then reduced too.
    """
    ranks = schedule.ranks
    ends = {schedule.holders[0][0], schedule.holders[schedule.num_stages - 1][0]}
    result: list[list[BlockingStep]] = []
    for replica, rank in product(range(replicas), range(ranks)):
        first = replica * ranks
        everywhere = tuple(other * ranks + rank for other in range(replicas))
        last = {(kind, step.chunk): step for step in programs[rank] if isinstance(step, Action) for kind in step.kind}
        steps: list[BlockingStep] = []
        for step in programs[rank]:
            steps.append(_moved(step, first) if isinstance(step, Exchange) else step)
            if isinstance(step, Action):
                done = [kind for kind in step.kind if kind != "F" and last[kind, step.chunk] is step]
                steps += [
                    Collective(f"buckets complete after {kind} of chunk {step.chunk}", everywhere) for kind in done
                ]
        if len(ends) > 1 and rank in ends:
            steps.append(Collective("tied weights", tuple(first + end for end in sorted(ends))))
        result.append([*steps, Collective("the last buckets", everywhere)])
    return result


def _moved(step: Exchange, by: int) -> Exchange:
    transfers = tuple(Transfer(message, source + by, target + by) for message, source, target in step.transfers)
    return Exchange(step.kind, step.peer + by, transfers)


def rendezvous(schedule: Schedule, programs: Sequence[Sequence[BlockingStep]]) -> None:
    """Execute programs with everything blocking until all its ranks are there; ConfigError names who hangs, where."""
    positions = [0] * len(programs)
    done: set[Transfer] = set()

    def current(rank: int) -> BlockingStep | None:
        return programs[rank][positions[rank]] if positions[rank] < len(programs[rank]) else None

    runnable = list(range(len(programs)))
    while runnable:
        rank = runnable.pop()
        while (step := current(rank)) is not None:
            if isinstance(step, Exchange):
                offer = current(step.peer)
                met = set(step.transfers) & set(offer.transfers) if isinstance(offer, Exchange) else set()
                done |= met
                if met:
                    runnable.append(step.peer)
                if not done.issuperset(step.transfers):
                    break
            elif isinstance(step, Collective):
                if any(current(other) != step for other in step.ranks):
                    break
                for other in set(step.ranks) - {rank}:
                    positions[other] += 1
                    runnable.append(other)
            else:
                _check_input(schedule, rank, step, done)
            positions[rank] += 1
    hangs = [_hang(schedule, rank, programs[rank][positions[rank] :]) for rank in range(len(programs)) if current(rank)]
    if hangs:
        raise ConfigError(hangs)


def _check_input(schedule: Schedule, rank: int, action: Action, done: set[Transfer]) -> None:
    first = rank - rank % schedule.ranks  # of its replica
    need = input_of(schedule, rank - first, action)
    if need is None:
        return
    source = first + schedule.holders[need.stage - 1 if need.kind == "F" else need.stage + 1][0]
    if source != rank and Transfer(need, source, rank) not in done:
        raise ConfigError(
            f"schedule {schedule.name}: rank {rank} starts {action} of stage {need.stage} before it receives {need}"
        )


def _hang(schedule: Schedule, rank: int, left: Sequence[BlockingStep]) -> str:
    following = next((step for step in left if isinstance(step, Action)), None)
    before = ", after its last action"
    if following is not None:
        before = f", before {following} of stage {schedule.placement(rank % schedule.ranks, following.chunk)}"
    return f"schedule {schedule.name}: rank {rank} hangs in {left[0]}{before}; the other side never comes to it"


def peak(program: Sequence[Step]) -> Peak:
    """What one rank holds at most while it executes its program; taking a W early can only make it less."""
    done: Counter[str] = Counter()
    most = Peak(0, 0, 0)
    for step in program:
        if isinstance(step, Action):
            done.update(step.kind)  # BW is one B and one W, and its stash lives no longer than itself
        most = Peak(*map(max, most, (done["F"] - done["B"], done["B"] - done["W"], done["F"] - done["W"])))
    return most
