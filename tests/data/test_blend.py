"""Blending by weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotron.data.order.blend import RESOLUTION, Blend, earliest_deadline_owners, round_weights
from nanotron.errors import ConfigError

weight_lists = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)
unit_lists = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(weights=weight_lists)
def test_rounded_weights_sum_to_one_and_are_off_by_less_than_the_resolution(weights):
    units = round_weights(weights)
    assert sum(units) == RESOLUTION
    for weight, unit in zip(weights, units, strict=True):
        assert abs(weight / sum(weights) - unit / RESOLUTION) < 1 / RESOLUTION + 1e-12


@given(units=unit_lists)
def test_after_any_sample_each_share_is_within_one_sample_of_its_weight(units):
    owners = earliest_deadline_owners(units)
    taken = np.cumsum(owners[:, None] == np.arange(len(units)), axis=0)
    due = np.arange(1, len(owners) + 1)[:, None] * np.array(units) / sum(units)
    assert np.abs(taken - due).max() < 1


@given(weights=weight_lists, start=st.integers(0, 10**15))
def test_turns_count_up_by_one_per_source(weights, start):
    blend = Blend(weights)
    owners, turns = blend.locate(np.arange(start, start + 500))
    before = blend.taken(start)
    for source in range(len(weights)):
        mine = turns[owners == source]
        assert mine.tolist() == list(range(before[source], before[source] + len(mine)))
    assert blend.taken(start + 500) == (np.array(before) + np.bincount(owners, minlength=len(weights))).tolist()


@given(weights=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_exhaustion_is_the_first_sample_that_asks_too_much(weights, data):
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=len(weights), max_size=len(weights)))
    blend = Blend(weights)
    count = blend.samples_before_exhaustion(lengths)
    assert all(taken <= length for taken, length in zip(blend.taken(count), lengths, strict=True))
    assert any(taken > length for taken, length in zip(blend.taken(count + 1), lengths, strict=True))


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, 1e-9]])
def test_a_weight_that_would_be_ignored_is_refused(weights):
    with pytest.raises(ConfigError, match=r"dataset_weights\[1\]"):
        round_weights(weights)
