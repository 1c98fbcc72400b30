"""Every schedule: complete, proven, as short as its formula says, within its memory, and drawn as it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotron.pipeline import schedules
from nanotron.pipeline.communication import Exchange, Transfer
from nanotron.pipeline.schedules import SCHEDULE_NAMES, Schedule, get_schedule, schedule_problems
from nanotron.pipeline.simulate import simulate
from nanotron.pipeline.timeline import Timeline, execute


@st.composite
def legal(draw: st.DrawFn, name: str) -> tuple[Schedule, int]:
    ranks = draw(st.integers(1, 8))
    microbatches = draw(st.integers(1, 32 // ranks)) * ranks if name.startswith("inter") else draw(st.integers(1, 32))
    chunks = draw(st.integers(1, 4)) if name.startswith("inter") else 1
    assert schedule_problems(name, ranks, chunks, microbatches) == []
    return get_schedule(name, ranks, chunks), microbatches


@given(st.sampled_from(SCHEDULE_NAMES).flatmap(legal))
def test_every_schedule_is_proven_and_its_ends_agree_on_the_order_of_messages(case: tuple[Schedule, int]) -> None:
    schedule, microbatches = case
    programs = simulate(schedule, microbatches).programs
    orders = []
    for program in programs:
        order: dict[tuple[str, int, int], list[Transfer]] = {}  # one first-in first-out lane: group and pair of ranks
        for step in program:
            for transfer in step.transfers if isinstance(step, Exchange) else ():
                order.setdefault((transfer.message.kind, transfer.source, transfer.target), []).append(transfer)
        orders.append(order)
    for rank, order in enumerate(orders):
        for (kind, source, target), transfers in order.items():
            assert orders[target if rank == source else source][kind, source, target] == transfers
    sent = sum(len(transfers) for order in orders for transfers in order.values()) // 2
    crossings = sum(
        schedule.holders[stage][0] != schedule.holders[stage + 1][0] for stage in range(schedule.num_stages - 1)
    )
    assert sent == 2 * crossings * microbatches


@given(st.integers(1, 8), st.integers(1, 32))
def test_bubble_of_1f1b(ranks: int, microbatches: int) -> None:
    """The textbook's (p−1)/(m+p−1) when the input's gradient leaves with the weights'; less, as it leaves first."""
    schedule = get_schedule("1f1b", ranks)
    textbook = execute(schedule, microbatches, lambda kind, stage: {"F": 1.0, "B": 2.0, "W": 0.0}[kind])
    assert textbook.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-12)
    assert execute(schedule, microbatches).duration == 3 * microbatches + 2 * (ranks - 1)


@given(st.integers(1, 8).flatmap(lambda p: st.tuples(st.just(p), st.integers(1, 32 // p), st.integers(1, 4))))
def test_bubble_of_interleaved_1f1b(case: tuple[int, int, int]) -> None:
    ranks, groups, chunks = case
    work = chunks * groups * ranks
    schedule = get_schedule("interleaved_1f1b", ranks, chunks)
    textbook = execute(schedule, groups * ranks, lambda kind, stage: {"F": 1.0, "B": 2.0, "W": 0.0}[kind])
    assert textbook.bubble == pytest.approx((ranks - 1) / (work + ranks - 1), abs=1e-12)
    mine = simulate(schedule, groups * ranks)
    assert mine.timeline.duration == 3 * work + 2 * (ranks - 1)
    assert max(peak.held for peak in mine.peaks) == ranks * chunks  # of 1/chunks of the layers: 1f1b's memory


@given(st.integers(2, 8).flatmap(lambda p: st.tuples(st.just(p), st.integers(p, 32))))
def test_zb_h1_is_shorter_than_1f1b_in_the_same_memory(case: tuple[int, int]) -> None:
    ranks, microbatches = case
    one, zero = (simulate(get_schedule(name, ranks), microbatches) for name in ("1f1b", "zb_h1"))
    assert zero.timeline.duration == 3 * microbatches + ranks - 1
    assert zero.timeline.bubble < one.timeline.bubble
    assert max(peak.held for peak in zero.peaks) == max(peak.held for peak in one.peaks) == ranks


@given(st.integers(2, 8).flatmap(lambda p: st.tuples(st.just(p), st.integers(2 * p - 1, 32))))
def test_zbv_has_almost_no_bubble_in_the_memory_of_1f1b(case: tuple[int, int]) -> None:
    ranks, microbatches = case
    one = simulate(get_schedule("1f1b", ranks), microbatches)
    zero = simulate(get_schedule("zbv", ranks), microbatches)
    assert zero.timeline.duration == 6 * microbatches + ranks - 1  # its actions are half as long as 1f1b's
    assert zero.timeline.bubble < one.timeline.bubble
    assert max(peak.held for peak in zero.peaks) == 2 * max(peak.held for peak in one.peaks)  # of half the layers


@given(st.integers(2, 8), st.integers(2, 32))
def test_zero_bubble_schedules_beat_1f1b_with_few_microbatches_too(ranks: int, microbatches: int) -> None:
    one = execute(get_schedule("1f1b", ranks), microbatches).duration
    assert execute(get_schedule("zb_h1", ranks), microbatches).duration < one
    assert execute(get_schedule("zbv", ranks), microbatches).duration < 2 * one


@given(st.integers(1, 8), st.integers(1, 32))
def test_1f1b_keeps_fewer_microbatches_alive_on_later_ranks(ranks: int, microbatches: int) -> None:
    peaks = simulate(get_schedule("1f1b", ranks), microbatches).peaks
    assert [peak.activations for peak in peaks] == [min(ranks - rank, microbatches) for rank in range(ranks)]
    assert {peak.activations for peak in simulate(get_schedule("afab", ranks), microbatches).peaks} == {microbatches}


def test_taking_weights_while_waiting_only_shortens() -> None:
    def busy(timeline: Timeline, kind: str) -> float:
        return sum(span.end - span.start for span in timeline.spans if span.kind == kind)

    def uneven(kind: str, stage: int) -> float:
        return {"F": 1.0, "B": 1.3, "W": 0.6}[kind] * (1 + 0.2 * (stage % 3))

    for name in ("zb_h1", "zbv"):
        schedule = get_schedule(name, 4)
        static = execute(schedule, 8, uneven, transfer=0.3)
        eager = execute(schedule, 8, uneven, transfer=0.3, eager_weights=True)
        assert eager.duration < static.duration
        for kind in "FBW":
            assert busy(eager, kind) == pytest.approx(busy(static, kind))


def test_impossible_numbers_are_refused_with_the_nearest() -> None:
    (problem,) = schedule_problems("interleaved_1f1b", 4, 2, 9)
    assert "tokens.batch_accumulation_per_replica=9" in problem
    assert "nearest is 8" in problem
    assert "nearest is 4" in schedule_problems("interleaved_1f1b", 4, 2, 3)[0]
    assert "nearest is 12" in schedule_problems("interleaved_1f1b", 4, 2, 11)[0]
    assert "pp_virtual_stages=3" in schedule_problems("zbv", 4, 3, 8)[0]
    assert "pp_virtual_stages=2" in schedule_problems("1f1b", 4, 2, 8)[0]
    assert schedule_problems("interleaved_1f1b", 4, 0, 8)
    assert schedule_problems("zbv", 4, 2, 3) == []


def drawing(timeline: Timeline, width: int) -> str:
    rows = []
    for rank in range(timeline.ranks):
        row = [".".ljust(width)] * int(timeline.duration)
        for span in timeline.of_rank(rank):
            kind = "" if span.kind == "F" else span.kind.lower()
            row[int(span.start)] = f"{kind}{span.microbatch}{chr(39) * span.chunk}".ljust(width)
        rows.append("    " + "".join(row).rstrip())
    return "\n".join(rows)


@pytest.mark.parametrize(
    ("name", "order", "ranks"),
    [
        ("afab", schedules.afab, 2),
        ("1f1b", schedules.one_f_one_b, 2),
        ("interleaved_1f1b", schedules.interleaved_1f1b, 2),
        ("zb_h1", schedules.zb_h1, 3),
        ("zbv", schedules.zbv, 2),
    ],
)
def test_the_drawing_in_a_docstring_is_the_schedule(name: str, order: object, ranks: int) -> None:
    timeline = execute(get_schedule(name, ranks, 2), 4)
    assert order.__doc__ is not None
    assert any(drawing(timeline, width) in order.__doc__ for width in (3, 4)), drawing(timeline, 4)
