"""Pipeline schedules: who holds which stage, and in what order every rank works.

A schedule is data. Its order is a short generator `(rank, ranks, microbatches) -> actions`; everything else is derived
from it: the sends and receives (communication.py), the proof that it cannot hang (simulate.py), the picture
(timeline.py) and the run (engine.py). A rank holds `num_chunks` chunks of the model; a *stage* is a chunk's position in
the whole model, 0..ranks * num_chunks - 1. The drawings have one row per rank, time runs to the right, F = B = W = 1:

    3    forward of microbatch 3           b3   its backward: gradient of the chunk's input, which leaves at once
    3'   the same in the rank's chunk 1    w3   its backward: gradients of the chunk's weights
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple


class Action(NamedTuple):
    """One unit of work of a rank: `kind` of one microbatch through one of its chunks.

    F: forward. B: gradient of the chunk's input. W: gradients of the chunk's weights. BW: B and W; see Schedule for
    when B's result leaves.
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


def split_fused(actions: Iterable[Action]) -> list[Action]:
    """Write every BW as B, W."""
    return [Action(kind, *action[1:]) for action in actions for kind in action.kind]


Placement = Callable[[int, int, int], int]
ActionOrder = Callable[[int, int, int], Iterable[Action]]


@dataclass(frozen=True)
class Schedule:
    """The placement of stages on `ranks` ranks and every rank's order of actions.

    `place(rank, chunk, ranks)` is a stage, `order(rank, ranks, microbatches)` yields that rank's actions.
    """

    name: str
    ranks: int
    num_chunks: int
    place: Placement
    order: ActionOrder
    sends_before_weights: bool = True
    """Whether the gradient of a BW leaves between its B and its W.

    Else the neighbour waits for both, but no W's inputs are kept: under recomputation a whole chunk's would come back.
    """

    @property
    def num_stages(self) -> int:
        """How many pieces the model is cut into."""
        return self.ranks * self.num_chunks

    def placement(self, rank: int, chunk: int) -> int:
        """The stage that is this rank's chunk."""
        return self._stages[rank][chunk]

    def actions(self, rank: int, microbatches: int) -> list[Action]:
        """What a rank does with a batch of this many microbatches, in order."""
        return [Action(*action) for action in self.order(rank, self.ranks, microbatches)]

    def pieces(self, rank: int, microbatches: int) -> list[Action]:
        """The same, each action in as many pieces as there are moments at which its results may leave."""
        actions = self.actions(rank, microbatches)
        return split_fused(actions) if self.sends_before_weights else actions

    @cached_property
    def holders(self) -> dict[int, tuple[int, int]]:
        """stage -> (rank, chunk)."""
        return {
            self.placement(rank, chunk): (rank, chunk) for rank in range(self.ranks) for chunk in range(self.num_chunks)
        }

    @property
    def edges(self) -> set[tuple[int, int]]:
        """The ranks of neighbouring stages, which send to each other."""
        ranks = [self.holders[stage][0] for stage in range(self.num_stages)]
        return {(a, b) for a, b in pairwise(ranks) if a != b}

    @cached_property
    def _stages(self) -> list[list[int]]:
        return [[self.place(rank, chunk, self.ranks) for chunk in range(self.num_chunks)] for rank in range(self.ranks)]


def loop(rank: int, chunk: int, ranks: int) -> int:
    """Stages run round and round the ranks: chunk 1 of rank 0 follows chunk 0 of the last rank."""
    return rank + chunk * ranks


def vee(rank: int, chunk: int, ranks: int) -> int:
    """Stages run down the ranks and back up: rank 0 holds the first and the last one."""
    return rank if chunk == 0 else 2 * ranks - 1 - rank


def afab(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards: the plainest, but every microbatch is alive at once.

    0  1  2  3  .  .  b0 w0 b1 w1 b2 w2 b3 w3
    .  0  1  2  3  b0 w0 b1 w1 b2 w2 b3 w3 .
    """
    for microbatch in range(microbatches):
        yield Action("F", microbatch)
    for microbatch in range(microbatches):
        yield Action("BW", microbatch)


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """One forward, one backward in turn: as long as afab, but rank r keeps at most ranks - r microbatches alive.

    0  1  .  b0 w0 2  b1 w1 3  b2 w2 .  b3 w3
    .  0  b0 w0 1  b1 w1 2  b2 w2 3  b3 w3 .

    arXiv 2104.04473, section 2.2.1 (PipeDream-Flush).
    """
    warmup = min(ranks - 1 - rank, microbatches)
    for microbatch in range(warmup):
        yield Action("F", microbatch)
    for microbatch in range(microbatches):
        if warmup + microbatch < microbatches:
            yield Action("F", warmup + microbatch)
        yield Action("BW", microbatch)


def interleaved_1f1b(rank: int, ranks: int, microbatches: int, *, num_chunks: int) -> Iterator[Action]:
    """1f1b over several small chunks per rank, ranks microbatches at a time: the bubble shrinks num_chunks-fold.

    0   1   0'  1'  .   b0' w0' 2   b1' w1' 3   b0  w0  2'  b1  w1  3'  b2' w2' .   b3' w3' b2  w2  b3  w3
    .   0   1   0'  b0' w0' 1'  b1' w1' 2   b0  w0  3   b1  w1  2'  b2' w2' 3'  b3' w3' b2  w2  b3  w3  .

    The price is num_chunks times the messages. arXiv 2104.04473, section 2.2.2; there, ranks warm up with
    ranks - 1 - rank more forwards, which pays only when a transfer takes longer than half a forward, and keeps as many
    more alive.
    """

    def turn(kind: str, index: int) -> Action:
        group, place = divmod(index, ranks * num_chunks)
        chunk = place // ranks if kind == "F" else num_chunks - 1 - place // ranks
        return Action(kind, group * ranks + place % ranks, chunk)

    total = microbatches * num_chunks
    warmup = min(total, ranks - 1 - rank + (num_chunks - 1) * ranks)
    for index in range(warmup):
        yield turn("F", index)
    for index in range(total):
        if warmup + index < total:
            yield turn("F", warmup + index)
        yield turn("BW", index)


def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1f1b whose later ranks put weight gradients off: none holds more than rank 0 did, and the bubble shrinks.

    0  1  2  .  .  b0 w0 3  b1 w1 b2 w2 b3 w3
    .  0  1  .  b0 2  b1 w0 3  b2 w1 b3 w2 w3
    .  .  0  b0 1  b1 2  b2 w0 3  b3 w1 w2 w3

    Rank r is r microbatches behind with W, so B reaches rank 0 sooner, and W fills what 1f1b leaves idle at the end.
    arXiv 2401.10241, section 3.1.
    """
    warmup = min(ranks - 1 - rank, microbatches)
    for microbatch in range(warmup):
        yield Action("F", microbatch)
    for microbatch in range(microbatches):
        if warmup + microbatch < microbatches:
            yield Action("F", warmup + microbatch)
        yield Action("B", microbatch)
        if microbatch >= rank:
            yield Action("W", microbatch - rank)
    for microbatch in range(max(0, microbatches - rank), microbatches):
        yield Action("W", microbatch)


def zbv(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Two chunks per rank laid out as a V (`vee`): almost no bubble, every rank holds as much as 1f1b's rank 0.

    0   1   2   0'  b0' w0' 1'  b1' w1' 3   b0  w0  2'  b2' w2' b1  w1  3'  b3' w3' b2  w2  b3  w3  .
    .   0   0'  1   1'  b0' w0' 2   b0  w0  2'  b1' w1' 3   b1  w1  3'  b2' w2' b2  b3' b3  w2  w3' w3

    The last stage sits on rank 0, so backwards start there early and every rank is as loaded as any other.
    arXiv 2401.10241, section 6. With fewer than 2 * ranks - 1 microbatches the missing ones are left out.
    """
    count = max(microbatches, 2 * ranks - 1)
    for action in _zbv_full(rank, ranks, count):
        if action.microbatch < microbatches:
            yield action


def _zbv_full(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    done: Counter[tuple[str, int]] = Counter()
    stash: deque[Action] = deque()  # B done, W not yet; oldest first

    def following(kinds: str, chunk: int) -> Iterator[Action]:
        for kind in kinds:
            action = stash.popleft()._replace(kind="W") if kind == "W" else Action(kind, done[kind, chunk], chunk)
            done[kind, chunk] += 1
            if kind == "B":
                stash.append(action)
            yield action

    for _ in range(2 * (ranks - rank) - 1):  # fill the way down
        yield from following("F", 0)
    for _ in range(rank):  # and the way back up
        yield from following("F", 1)
        yield from following("F", 0)
    for _ in range(ranks - rank):  # backwards come down from rank 0's last stage
        yield from following("FBW", 1)
    while done["F", 1] < microbatches:  # steady: both chunks in turn
        yield from following("F" if done["F", 0] < microbatches else "", 0)
        yield from following("BW", 0)
        yield from following("FBW", 1)
    for _ in range(rank):  # drain: B as soon as possible, W where nothing else is left
        yield from following("B", 0)
        yield from following("B", 1)
    for _ in range(ranks - rank):
        yield from following("BW", 0)
    while stash:
        yield from following("W", 0)


@dataclass(frozen=True)
class _BuiltIn:
    """What a name of `parallelism.pp_engine` stands for."""

    order: Callable[..., Iterable[Action]]
    place: Placement = loop
    virtual_stages: int | None = 1
    """Chunks of every rank; None: `parallelism.pp_virtual_stages` says how many, and `order` takes `num_chunks`."""
    in_rounds: bool = False
    """Whether it takes as many microbatches at a time as there are ranks, so that their number must be a multiple."""


_BUILT_IN = {
    "afab": _BuiltIn(afab),
    "1f1b": _BuiltIn(one_f_one_b),
    "interleaved_1f1b": _BuiltIn(interleaved_1f1b, virtual_stages=None, in_rounds=True),
    "zb_h1": _BuiltIn(zb_h1),
    "zbv": _BuiltIn(zbv, place=vee, virtual_stages=2),
}
SCHEDULE_NAMES = tuple(_BUILT_IN)


def default_virtual_stages(name: str) -> int:
    """Stages of each rank where the config does not say: one, but for the schedules that are made for two."""
    built_in = _BUILT_IN.get(name, _BuiltIn(afab))  # a schedule of the user's own has one
    return built_in.virtual_stages or 2


def get_schedule(name: str, ranks: int, virtual_stages: int = 1) -> Schedule:
    """A built-in schedule for this many ranks; `virtual_stages` counts where it leaves the chunks per rank free."""
    built_in = _BUILT_IN[name]
    if built_in.virtual_stages is not None:
        return Schedule(name, ranks, built_in.virtual_stages, built_in.place, built_in.order)
    return Schedule(name, ranks, virtual_stages, built_in.place, partial(built_in.order, num_chunks=virtual_stages))


def schedule_problems(name: str, ranks: int, virtual_stages: int, microbatches: int) -> list[str]:
    """Why this built-in schedule cannot run so, one line per rule broken; empty when it can."""
    problems = []
    built_in = _BUILT_IN[name]
    fixed = built_in.virtual_stages
    if virtual_stages < 1:
        problems.append(f"parallelism.pp_virtual_stages={virtual_stages} must be at least 1")
    elif fixed is not None and virtual_stages not in (1, fixed):
        problems.append(
            f"parallelism.pp_virtual_stages={virtual_stages} does not fit parallelism.pp_engine={name}, which has "
            f"{fixed} per rank; leave pp_virtual_stages out, or use pp_engine: interleaved_1f1b"
        )
    if built_in.in_rounds and microbatches % ranks:
        below = microbatches // ranks * ranks
        nearest = below if below and microbatches - below <= ranks // 2 else below + ranks
        problems.append(
            f"tokens.batch_accumulation_per_replica={microbatches} is not a multiple of parallelism.pp={ranks}, which "
            f"pp_engine: {name} needs; the nearest is {nearest}"
        )
    return problems


def microbatch_unit(name: str, ranks: int) -> int:
    """What the number of a step's microbatches has to be a multiple of."""
    return ranks if name in _BUILT_IN and _BUILT_IN[name].in_rounds else 1


def forward_only(schedule: Schedule) -> Schedule:
    """The same placement, forwards only, for any number of microbatches: as many at a time as there are ranks."""

    def order(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
        chunks = sorted(range(schedule.num_chunks), key=lambda chunk: schedule.placement(rank, chunk))
        for first in range(0, microbatches, ranks):
            for chunk in chunks:
                for microbatch in range(first, min(first + ranks, microbatches)):
                    yield Action("F", microbatch, chunk)

    return replace(schedule, name=f"{schedule.name}, forward only", order=order)
