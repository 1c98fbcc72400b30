"""What the proof refuses, and that it says who hangs where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from nanotron.errors import ConfigError
from nanotron.pipeline.communication import Exchange, Program, communication, make_exchange
from nanotron.pipeline.schedules import Action, Schedule, get_schedule, loop, one_f_one_b
from nanotron.pipeline.simulate import Collective, Peak, peak, prove, rendezvous, with_reductions
from nanotron.pipeline.timeline import execute


def receives_first(programs: list[Program]) -> list[Program]:
    """The tempting wrong lists: every receive posted before anything else."""
    wrong = []
    for rank, program in enumerate(programs):
        receives: Program = []
        rest: Program = []
        for step in program:
            for transfer in step.transfers if isinstance(step, Exchange) else ():
                single = make_exchange(rank, (transfer,))
                (receives if single.kind == "RECV" else rest).append(single)
            if isinstance(step, Action):
                rest.append(step)
        wrong.append(receives + rest)
    return wrong


@pytest.mark.parametrize("name", ["afab", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"])
def test_posting_all_receives_first_is_refused(name: str) -> None:
    schedule = get_schedule(name, 2, 2)
    programs = communication(schedule, 4)
    rendezvous(schedule, programs)
    with pytest.raises(ConfigError, match=r"rank 0 hangs in RECV .* for stage \d with pp rank 1, before F0 of stage 0"):
        rendezvous(schedule, receives_first(programs))


def test_two_ranks_that_both_send_first_hang_and_a_crossing_exchange_does_not() -> None:
    schedule = get_schedule("1f1b", 2)
    programs = communication(schedule, 4)
    crossing = [
        next(step for step in program if isinstance(step, Exchange) and step.kind == "SENDRECV") for program in programs
    ]
    assert [step.kind for step in crossing] == ["SENDRECV", "SENDRECV"]
    assert crossing[0].transfers == crossing[1].transfers
    apart: list[Program] = []
    for rank, program in enumerate(programs):
        singles = [make_exchange(rank, (transfer,)) for transfer in crossing[rank].transfers]
        sends_first: Program = sorted(singles, key=lambda single: single.kind, reverse=True)
        place = program.index(crossing[rank])
        apart.append(program[:place] + sends_first + program[place + 1 :])
    with pytest.raises(ConfigError) as error:
        rendezvous(schedule, apart)
    assert "rank 0 hangs in SEND activation 2 for stage 1 with pp rank 1" in str(error.value)
    assert "rank 1 hangs in SEND gradient 1 for stage 0 with pp rank 0" in str(error.value)


def test_reductions_fit_into_the_order_and_a_tied_sum_that_comes_too_early_is_refused() -> None:
    schedule = get_schedule("zb_h1", 3)
    programs = with_reductions(schedule, communication(schedule, 4))
    assert len(programs) == 6
    rendezvous(schedule, programs)
    (tied,) = [step for step in programs[3] if isinstance(step, Collective) and step.name == "tied weights"]
    assert tied.ranks == (3, 5)
    early = list(programs)
    early[3] = [tied, *(step for step in programs[3] if step is not tied)]
    with pytest.raises(ConfigError) as error:
        rendezvous(schedule, early)
    assert r"rank 3 hangs in the reduction of tied weights over ranks (3, 5), before F0 of stage 0" in str(error.value)


def test_replicas_that_reduce_their_buckets_in_different_orders_are_refused() -> None:
    schedule = get_schedule("zbv", 2)
    programs = with_reductions(schedule, communication(schedule, 4))
    places = [index for index, step in enumerate(programs[0]) if isinstance(step, Collective)]
    swapped = list(programs[0])
    swapped[places[0]], swapped[places[1]] = swapped[places[1]], swapped[places[0]]
    with pytest.raises(ConfigError, match="rank 0 hangs in the reduction of buckets complete after"):
        rendezvous(schedule, [swapped, *programs[1:]])


def test_an_action_before_its_receive_is_refused() -> None:
    schedule = get_schedule("1f1b", 2)
    programs = communication(schedule, 2)
    programs[1][0], programs[1][1] = programs[1][1], programs[1][0]
    with pytest.raises(ConfigError, match="rank 1 starts F0 of stage 1 before it receives activation 0 for stage 1"):
        rendezvous(schedule, programs)


def changed(rank_to_change: int, change: object) -> Schedule:
    """1f1b on 2 ranks, with one rank's list changed."""

    def order(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
        actions = list(one_f_one_b(rank, ranks, microbatches))
        yield from change(actions) if rank == rank_to_change else actions  # type: ignore[operator]

    return Schedule("mine", 2, 1, loop, order)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda actions: actions[:-1], "rank 1: B of microbatch 3 in stage 1 appears 0 times instead of 1"),
        (lambda actions: [*actions, actions[0]], "rank 1: F of microbatch 0 in stage 1 appears 2 times instead of 1"),
        (lambda actions: [*actions, Action("F", 4)], "F of microbatch 4 in stage 1 appears 1 times instead of 0"),
        (lambda actions: [*actions, Action("F", 0, 7)], "F of microbatch 0 in chunk 7 appears 1 times instead of 0"),
        (lambda actions: [actions[1], actions[0], *actions[2:]], "rank 1: B0 of stage 1 comes before its F0"),
        (
            lambda actions: (
                [Action("F", i) for i in range(4)]
                + [Action("B", i) for i in range(4)]
                + [Action("W", i) for i in (1, 0, 2, 3)]
            ),
            "rank 1: W1 of stage 1 overtakes W0",
        ),
        (
            lambda actions: [Action("F", i) for i in range(4)] + [Action("BW", i) for i in (3, 2, 1, 0)],
            r"rank 0 waits for ever before BW?0 of stage 0|rank \d waits for ever",
        ),
    ],
)
def test_a_wrong_list_is_refused_with_rank_stage_and_action(change: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prove(changed(1, change), 4)


def test_two_holders_of_one_stage_are_refused() -> None:
    twice = replace(get_schedule("1f1b", 2), place=lambda rank, chunk, ranks: 0)
    with pytest.raises(ConfigError, match=r"places stages \[0, 0\]"):
        prove(twice, 4)


def test_peak_counts_what_is_alive_at_once() -> None:
    program: Program = [Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1), Action("W", 0), Action("W", 1)]
    assert peak(program) == Peak(activations=2, stashes=2, held=2)


def test_transfers_cost_time_only_where_somebody_waits() -> None:
    schedule = get_schedule("afab", 2)
    assert execute(schedule, 4, transfer=0.5).duration == execute(schedule, 4).duration + 2 * 0.5


@pytest.mark.parametrize("name", ["afab", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_backward_in_one_piece_is_proven_too_and_stashes_no_more(name: str, ranks: int) -> None:
    apart = get_schedule(name, ranks, 2 if name == "interleaved_1f1b" else 1)
    in_one_piece = replace(apart, sends_before_weights=False)
    for rank, program in enumerate(prove(in_one_piece, 4 * ranks)):
        explicit = sum(action.kind == "W" for action in apart.actions(rank, 4 * ranks))
        assert sum(step.kind == "W" for step in program if isinstance(step, Action)) == explicit


def test_a_backward_in_one_piece_keeps_its_neighbour_waiting_and_stashes_nothing() -> None:
    apart = get_schedule("1f1b", 4)
    in_one_piece = replace(apart, sends_before_weights=False)
    assert execute(apart, 8).duration == 3 * 8 + 2 * 3
    assert execute(in_one_piece, 8).duration == 3 * 8 + 3 * 3  # each of the 3 ranks on the way waits for W as well
    peaks = {schedule: [peak(program) for program in prove(schedule, 8)] for schedule in (apart, in_one_piece)}
    assert [found.stashes for found in peaks[apart]] == [0, 1, 1, 1]  # rank 0 sends no gradient: its BW is one piece
    assert [found.stashes for found in peaks[in_one_piece]] == [0, 0, 0, 0]
