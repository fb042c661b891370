"""Between measured shapes: smooth functions are found again, edges are kept."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tutti.cost.measured.curve import Curve


def points(steps):
    return np.asarray(list(itertools.product(steps, repeat=2)), dtype=np.float64)


def slowdown(where):
    return 1.0 + 0.5 * np.exp2(-0.3 * where[:, 0]) + 0.02 * where[:, 1]


def test_measurements_come_back_and_what_lies_between_is_near():
    known = points(range(0, 11, 2))
    curve = Curve.of(known, slowdown(known))
    np.testing.assert_allclose(curve.slowdowns(known), slowdown(known), rtol=2e-3)
    between = points((1.0, 2.5, 5.3, 8.9))
    np.testing.assert_allclose(curve.slowdowns(between), slowdown(between), rtol=1e-2)
    assert curve.expected_error < 0.02


def test_noise_is_not_followed():
    known = points(np.linspace(0, 10, 12))
    noisy = slowdown(known) * np.exp(np.random.default_rng(0).normal(0, 0.05, len(known)))
    curve = Curve.of(known, noisy)
    left = np.abs(curve.slowdowns(known) / slowdown(known) - 1.0)
    assert left.mean() < 0.03, "less than the noise itself"
    assert 0.03 < curve.expected_error < 0.08


@pytest.mark.parametrize("count", [1, 2])
def test_few_measurements_give_their_mean(count):
    curve = Curve.of(points((0, 1))[:count], np.full(count, 1.5))
    np.testing.assert_allclose(curve.slowdowns(np.asarray([[9.0, 9.0]])), 1.5)


def test_outside_begins_half_an_octave_beyond_the_box():
    curve = Curve.of(points((2.0, 8.0)), np.full(4, 1.5))
    where = np.asarray([[1.6, 5.0], [1.4, 5.0], [5.0, 8.4], [5.0, 8.6]])
    assert curve.outside(where).any(axis=1).tolist() == [False, True, False, True]
    np.testing.assert_array_equal(curve.clamped(where)[1], [2.0, 5.0])
