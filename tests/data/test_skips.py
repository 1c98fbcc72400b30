"""Samples that are left out: those that stay keep their order, on every layout, resumed anywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotron.check import examine, summary
from nanotron.data.order.blend import Blend
from nanotron.data.order.changes import order_changes
from nanotron.data.order.skips import Skips
from tests.config.test_mistakes import QUIET, problems
from tests.data.fixtures import make_config
from tests.data.test_feed import global_rows, stage
from tests.data.test_stream import EXAMPLES

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda pair: [pair[0], sum(pair)]), max_size=4)


@given(ranges=RANGES, weights=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_what_stays_is_every_number_outside_of_the_ranges_in_order(ranges: list[list[int]], weights: list[int]) -> None:
    skips, blend = Skips(ranges), Blend(weights)
    staying = [number for number in range(300) if not any(first <= number < end for first, end in ranges)]
    assert skips.numbers(np.arange(len(staying))).tolist() == staying
    assert skips.skipped == 300 - len(staying)
    owners = blend.locate(np.array(staying))[0].tolist()
    for count in range(0, len(staying), 7):
        end = staying[count - 1] + 1 if count else 0
        assert skips.end(count) == end
        assert skips.stay(end) == count
        assert skips.taken(blend, count) == [owners[:count].count(source) for source in range(len(weights))]


@pytest.mark.parametrize("kind", ["files", "stream"])
def test_the_samples_that_stay_come_in_the_same_order_on_every_layout_and_resumed(nanoset: Path, kind: str) -> None:
    def stages(ranges: list[list[int]]) -> list[dict]:
        if kind == "files":
            return [stage(str(nanoset), skip_samples=ranges)]
        dataset = {"python": [f"{EXAMPLES}:counting"] * 2, "arguments": [{"step": 3}, {"step": 5}]}
        return [stage("", skip_samples=ranges) | {"data": {"dataset": dataset, "skip_samples": ranges}}]

    whole, _ = global_rows(stages([]), 6)  # 4 samples a step
    ranges = [[2, 5], [13, 18]]
    stay = [whole[number] for number in range(24) if not any(first <= number < end for first, end in ranges)]
    rows, _ = global_rows(stages(ranges), 4)
    assert rows == stay
    # a range that is added before its samples come takes nothing back
    begun, feed = global_rows(stages([[2, 5]]), 2)
    rest, _ = global_rows(stages(ranges), 2, first_step=3, state=feed.state_dict())
    assert begun + rest == stay


def test_data_that_may_not_repeat_gives_as_much_less_as_is_left_out(nanoset: Path) -> None:
    def samples(**skips: list[list[int]]) -> int:
        _, feed = global_rows([stage(str(nanoset), repeat=False, **skips)], 0)
        count = feed._stages[0].stage.num_samples
        assert count is not None
        return count

    assert samples(skip_samples=[[3, 10], [10**6, 10**7]]) == samples() - 7


def test_a_range_before_the_position_may_not_change_and_one_after_it_may() -> None:
    def plain(*ranges: list[int]) -> dict:
        return make_config(data_stages=[stage(None, name="a", skip_samples=list(ranges))]).to_dict()

    def changes(saved: dict, now: dict) -> list[str]:
        return order_changes(saved, now, {"a": 20}, {}, {})

    assert changes(plain(), plain([20, 30], [40, 50])) == []
    assert changes(plain([5, 10]), plain([5, 10], [25, 50])) == []
    assert changes(plain(), plain([19, 30])) == [
        "data_stages[0].data.skip_samples was [] in the checkpoint and is [[19, 20]] now, 20 samples into stage 'a'"
    ]
    assert len(changes(plain([5, 10]), plain())) == 1


def test_ranges_are_checked_and_shown(tmp_path: Path) -> None:
    text = QUIET + "data_stages:\n- name: a\n  start_training_step: 1\n  data: {dataset: null, skip_samples: RANGES}\n"
    text = text.replace("hidden_size: 64", "hidden_size: 64\n    vocab_size: 100")
    assert problems(tmp_path, text.replace("RANGES", "[[5, 5], [1], [2, 9]]")) == [
        f"{text.count(chr(10))}: data_stages[0].data.skip_samples[{number}]: {shown} is no range of samples; write"
        " [first, end], the first below the end"
        for number, shown in ((0, [5, 5]), (1, [1]))
    ]
    (tmp_path / "x.yaml").write_text(text.replace("RANGES", "[[8, 1008], [100000, 100001]]"))
    checked = examine(tmp_path / "x.yaml")
    assert summary(checked.config)[-1] == "data        a, from step 1: random tokens without 1,001 samples"
    (notice,) = checked.notices
    assert "data_stages[0].data.skip_samples: [100000, 100001] has no effect: the stage ends with its sample " in notice
