"""The keyed permutation and its blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotron.data.order.permutation import derive_key, permute, permute_in_blocks


@given(length=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_every_epoch_is_a_permutation(length, key):
    images = permute(np.arange(length), length, key)
    assert sorted(images.tolist()) == list(range(length))


@given(length=st.integers(1, 2000), key=st.integers(0, 2**64 - 1), block=st.integers(1, 300))
def test_shuffling_within_blocks_is_a_permutation_that_keeps_neighbours_together(length, key, block):
    images = permute_in_blocks(np.arange(length), length, key, block)
    assert sorted(images.tolist()) == list(range(length))
    for start in range(0, length, block):
        assert len(set((images[start : start + block] // block).tolist())) == 1


@given(length=st.integers(1, 2**61), key=st.integers(0, 2**64 - 1), data=st.data())
def test_one_index_alone_equals_the_same_index_in_a_batch(length, key, data):
    indices = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20)))
    together = permute(indices, length, key)
    assert ((together >= 0) & (together < length)).all()
    assert together.tolist() == [int(permute(indices[i : i + 1], length, key)[0]) for i in range(len(indices))]


def test_different_keys_give_different_orders():
    orders = {tuple(permute(np.arange(20), 20, derive_key("epoch", epoch)).tolist()) for epoch in range(100)}
    assert len(orders) == 100


def test_every_window_comes_first_about_equally_often():
    counts = np.bincount([int(permute(np.array([0]), 10, derive_key(seed))[0]) for seed in range(5000)], minlength=10)
    assert counts.min() > 400
    assert counts.max() < 600


@pytest.mark.parametrize("block", [None, 64])
def test_neighbouring_places_are_not_neighbouring_windows(block):
    images = permute(np.arange(4096), 4096, 7) if block is None else permute_in_blocks(np.arange(4096), 4096, 7, block)
    assert (np.abs(np.diff(images)) == 1).mean() < 0.05


def test_key_parts_do_not_run_together():
    assert derive_key("ab", "c") != derive_key("a", "bc")
    assert derive_key(1) != derive_key("1")


def test_the_order_is_the_same_in_every_version():
    assert permute(np.arange(8), 8, derive_key("order", 42, "stage", 0, 0)).tolist() == [3, 2, 6, 4, 5, 1, 0, 7]
