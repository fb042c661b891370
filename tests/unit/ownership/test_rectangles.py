"""Ranges of boxes as rectangles: all elements, in order, once, in few and bounded pieces."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tutti.ownership.rectangles import Rectangle, intersection, rectangles

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(SHAPES)
    size = math.prod(shape)
    start = draw(st.integers(0, size))
    return shape, start, draw(st.integers(start, size))


@given(ranges(), st.none() | st.integers(1, 20))
def test_a_range_is_its_rectangles_in_order(given_range, most):
    shape, start, stop = given_range
    numbers = np.arange(math.prod(shape)).reshape(shape)
    at = start
    for first, rectangle in rectangles(shape, start, stop, most=most):
        assert first == at
        found = numbers[rectangle.slices]
        assert found.size == rectangle.count > 0
        assert np.array_equal(found.reshape(-1), np.arange(at, at + found.size))
        assert most is None or rectangle.count <= most
        at += found.size
    assert at == stop


@given(ranges())
def test_there_are_few_of_them(given_range):
    shape, start, stop = given_range
    count = len(list(rectangles(shape, start, stop)))
    assert count <= max(1, 2 * len(shape) - 1)


@st.composite
def pairs(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))

    def rectangle():
        low = [draw(st.integers(0, size - 1)) for size in sizes]
        extent = [draw(st.integers(1, size - at)) for size, at in zip(sizes, low, strict=True)]
        return Rectangle(tuple(low), tuple(extent))

    return sizes, rectangle(), rectangle()


@given(pairs())
def test_an_intersection_is_what_both_cover(pair):
    sizes, a, b = pair
    covered = [np.zeros(sizes, bool) for _ in range(2)]
    covered[0][a.slices] = True
    covered[1][b.slices] = True
    both = covered[0] & covered[1]
    shared = intersection(a, b)
    assert both.sum() == (shared.count if shared else 0)
    if shared:
        assert both[shared.slices].all()
        inside = shared.within(a)
        assert np.zeros(a.sizes)[inside.slices].shape == shared.sizes
