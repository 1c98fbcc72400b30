"""The sends and receives of a schedule, merged into every rank's list of actions.

The order in which ranks talk decides whether they can hang. Here it cannot go wrong by construction: the schedule is
executed once with unit costs, every transfer becomes an event at the moment its sender has computed it, and each
rank's list is its share of that one global order of events. The earliest event not done yet always has nothing
before it on either of its ranks: so somebody can go on, even when every transfer blocks both its ends.
"""

from __future__ import annotations

from typing import NamedTuple

from nanotron.pipeline.schedules import Action, Schedule, split_fused
from nanotron.pipeline.timeline import Message, Span, execute, output_of


class Transfer(NamedTuple):
    """One message between two pipeline ranks; each direction has a process group of its own."""

    message: Message
    source: int
    target: int


class Exchange(NamedTuple):
    """What a rank and one peer hand each other at one point of both their lists, in the same order on both ends."""

    kind: str  # SEND, RECV, or SENDRECV when transfers cross
    peer: int
    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return f"{self.kind} {', '.join(str(transfer.message) for transfer in self.transfers)} with pp rank {self.peer}"


Step = Action | Exchange
Program = list[Step]


def make_exchange(rank: int, transfers: tuple[Transfer, ...]) -> Exchange:
    """Transfers between this rank and one peer, as this rank sees them."""
    kinds = {"SEND" if transfer.source == rank else "RECV" for transfer in transfers}
    peer = transfers[0].target if transfers[0].source == rank else transfers[0].source
    return Exchange("SENDRECV" if len(kinds) == 2 else kinds.pop(), peer, transfers)


def communication(schedule: Schedule, microbatches: int) -> list[Program]:
    """Every rank's actions with its sends and receives between them; the actions must be complete (check_actions).

    A BW whose gradient leaves the rank before the weights' are computed is written B, send, W; any other stays one BW.
    Transfers of one pair of ranks at the same moment are one exchange.
    """
    spans = execute(schedule, microbatches).spans
    meetings: dict[tuple[float, int, int], list[Transfer]] = {}  # (when, lower rank, higher rank) -> transfers
    for span in spans:
        transfer = _transfer_after(schedule, span)
        if transfer is not None:
            pair = (min(transfer[1:]), max(transfer[1:]))
            meetings.setdefault((span.end, *pair), []).append(transfer)

    # A transfer at time t comes after the action that ends at t and before the one that starts at t.
    events: list[list[tuple[tuple[float, ...], Step]]] = [[] for _ in range(schedule.ranks)]
    for (when, low, high), transfers in meetings.items():
        # Activations first on both ends: gloo and nccl alike would accept it one transfer at a time.
        ordered = tuple(sorted(transfers, key=lambda transfer: (transfer.message.kind != "F", transfer)))
        for rank in (low, high):
            events[rank].append(((when, 0, low, high), make_exchange(rank, ordered)))
    for rank in range(schedule.ranks):
        actions = _fuse(schedule, rank, schedule.actions(rank, microbatches))
        starts = {(span.kind[0], span.microbatch, span.chunk): span.start for span in spans if span.rank == rank}
        events[rank] += [((starts[(action.kind[0], *action[1:])], 1), action) for action in actions]
    return [[step for _, step in sorted(row, key=lambda event: event[0])] for row in events]


def _transfer_after(schedule: Schedule, span: Span) -> Transfer | None:
    """What leaves the rank when this action is done."""
    message = output_of(schedule, span.rank, Action(span.kind, span.microbatch, span.chunk))
    if message is None:
        return None
    target = schedule.holders[message.stage][0]
    return None if target == span.rank else Transfer(message, span.rank, target)


def _fuse(schedule: Schedule, rank: int, actions: list[Action]) -> list[Action]:
    """Split each BW whose gradient leaves the rank between its B and its W."""
    steps: list[Action] = []
    for action in actions:
        message = output_of(schedule, rank, action)
        leaves = message is not None and schedule.holders[message.stage][0] != rank
        if leaves and schedule.sends_before_weights:
            steps += split_fused([action])
        else:
            steps.append(action)
    return steps
