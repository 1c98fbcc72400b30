"""Boxes, shards and initial values: pure facts about a parameter, whatever the layout."""

from __future__ import annotations

import tracemalloc
from math import prod
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotron.parallel import params
from nanotron.parallel.mesh import Mesh, training_axes
from nanotron.parallel.params import TILE, Box, Init, ParamSpec, draw, flat_range_boxes, intersect

Array = np.ndarray[Any, np.dtype[np.int64]]

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def flat_ranges(generate: Any) -> tuple[tuple[int, ...], int, int]:
    """(shape, lo, hi) with 0 ≤ lo ≤ hi ≤ the number of elements."""
    shape = generate(shapes)
    lo, hi = sorted((generate(st.integers(0, prod(shape))), generate(st.integers(0, prod(shape)))))
    return shape, lo, hi


@st.composite
def box_pairs(generate: Any) -> tuple[tuple[int, ...], Box, Box]:
    """(shape, two boxes inside it)."""
    shape = generate(shapes)
    boxes = []
    for _ in range(2):
        offset = tuple(generate(st.integers(0, n - 1)) for n in shape)
        boxes.append(Box(offset, tuple(generate(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))))
    return shape, boxes[0], boxes[1]


def numbered(shape: tuple[int, ...]) -> Array:
    """A tensor whose elements are their own row-major positions."""
    return np.arange(prod(shape)).reshape(shape)


@given(flat_ranges())
def test_a_flat_range_is_covered_exactly_and_in_order_by_few_boxes(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, lo, hi = case
    boxes = flat_range_boxes(shape, lo, hi)
    elements = [element for box in boxes for element in numbered(shape)[box.slices()].ravel().tolist()]
    assert elements == list(range(lo, hi))
    assert len(boxes) <= 2 * len(shape) - 1
    assert all(box.numel > 0 for box in boxes)


@given(box_pairs())
def test_the_intersection_is_what_both_boxes_hold(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, a, b = case
    elements = numbered(shape)
    common = set(elements[a.slices()].ravel().tolist()) & set(elements[b.slices()].ravel().tolist())
    shared = intersect(a, b)
    assert (set() if shared is None else set(elements[shared.slices()].ravel().tolist())) == common
    assert shared == intersect(b, a)
    if shared is not None:
        assert np.array_equal(elements[a.slices()][shared.slices(a)], elements[b.slices()][shared.slices(b)])


def spec_of(shape: tuple[int, ...], **facts: Any) -> ParamSpec:
    return ParamSpec("layers.0.some.weight", shape, Init("normal", 0.02), decay=True, **facts)


def grad_axes(spec: ParamSpec, mesh: Mesh) -> tuple[str, ...]:
    return spec.reduce_axes(mesh) + spec.partial_axes(mesh)


@pytest.mark.parametrize("length", [8, 257, 5])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_shards_of_any_length_cover_the_parameter_once(length: int, tp: int) -> None:
    spec = spec_of((2, length, 3), shard=(("tp", 1),))
    seen = np.zeros(spec.shape, dtype=int)
    sizes = []
    for rank in range(tp):
        box = spec.local_box(Mesh({"tp": tp}, rank))
        seen[box.slices()] += 1
        sizes.append(box.shape[1])
    assert (seen == 1).all()
    assert max(sizes) - min(sizes) <= 1


def test_key_value_heads_are_shared_by_neighbouring_ranks_when_tp_exceeds_them() -> None:
    axes = training_axes(dp=2, tp=4, pp=1, num_key_value_heads=2)
    spec = spec_of((2, 16, 8), shard=(("tp_kv", 1),), partial_grad=("tp_rep",))
    meshes = [Mesh(axes, rank) for rank in range(4)]
    assert [spec.local_box(mesh).offset[1] for mesh in meshes] == [0, 0, 8, 8]
    assert [spec.is_owner(mesh) for mesh in meshes] == [True, False, True, False]
    assert grad_axes(spec, meshes[0]) == ("dp", "tp_rep")


def test_a_gradient_is_summed_over_the_data_axes_and_the_partial_ones_only() -> None:
    mesh = Mesh(training_axes(dp=3, tp=2, pp=2, num_key_value_heads=2))
    assert grad_axes(spec_of((4, 4), shard=(("tp", 0),)), mesh) == ("dp",)
    assert grad_axes(spec_of((4,), partial_grad=("tp",)), mesh) == ("dp", "tp")
    assert grad_axes(spec_of((4,), partial_grad=("tp_rep",)), mesh) == ("dp",)


@st.composite
def boxes_of_large_tensors(generate: Any) -> tuple[tuple[int, ...], Box]:
    """(shape, box): 1 to 3 dims that straddle several tiles."""
    shape = generate(
        st.sampled_from([(700,), (300, 700), (2, 200, 530), (TILE[0], TILE[1]), (3, TILE[0] // 2 + 5, TILE[1] + 1)])
    )
    offset = tuple(generate(st.integers(0, n - 1)) for n in shape)
    return shape, Box(offset, tuple(generate(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))


@given(boxes_of_large_tensors())
def test_a_part_is_drawn_as_the_whole_would_have_been(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    whole = draw(spec_of(shape), Box((0,) * len(shape), shape), seed=3)
    assert np.array_equal(draw(spec_of(shape), box, seed=3), whole[box.slices()])


def test_threads_draw_tiles_at_once_and_the_values_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, box = spec_of((300, 700)), Box((0, 0), (300, 700))  # 3 × 2 tiles
    alone, draw_tile, three = draw(spec, box, seed=3), params._draw_tile, Barrier(3)

    def meet(*args: Any) -> Any:
        three.wait(timeout=20)  # raises where not as many are at work
        return draw_tile(*args)

    monkeypatch.setattr(params, "_draw_tile", meet)
    assert np.array_equal(draw(spec, box, seed=3, threads=3), alone)


def test_a_draw_takes_no_more_memory_than_its_values_and_a_tile() -> None:
    box = Box((0, 0), (2048, 512))
    tracemalloc.start()
    draw(spec_of(box.shape), box, seed=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * (box.numel + 3 * TILE[0] * TILE[1])


def test_values_depend_on_seed_and_name_and_follow_the_declared_law() -> None:
    shape = (512, 1024)
    box = Box((0, 0), shape)
    values = draw(spec_of(shape), box, seed=1)
    assert values.dtype == np.float32
    assert abs(float(values.mean())) < 1e-4
    assert float(values.std()) == pytest.approx(0.02, rel=0.01)
    assert len(np.unique(values[:: TILE[0], 0])) == 4  # tiles do not repeat each other
    assert not np.array_equal(values, draw(spec_of(shape), box, seed=2))
    other = ParamSpec("layers.1.some.weight", shape, Init("normal", 0.02), decay=True)
    assert not np.array_equal(values, draw(other, box, seed=1))
    ones = ParamSpec("norm.weight", (7,), Init("ones"), decay=False)
    assert np.array_equal(draw(ones, Box((2,), (3,)), seed=1), np.ones(3))
