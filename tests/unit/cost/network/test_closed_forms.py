"""Closed forms of collectives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.cost.arrays import Machine
from tutti.cost.constants import Constants
from tutti.cost.network.closed_forms import (
    all_reduce_seconds,
    all_to_all_seconds,
    rails,
    ring_pass_seconds,
)

MACHINE = Machine.filled(
    peak=312e12, memory_bandwidth=2e12, compute_units=108, link=300e9, nic=200e9, nics=8
)
CONSTANTS = Constants()


@pytest.mark.parametrize("price", [ring_pass_seconds, all_reduce_seconds, all_to_all_seconds])
def test_a_group_of_one_costs_nothing(price: object) -> None:
    assert price(1e9, 1.0, 8.0, MACHINE, CONSTANTS) == 0  # type: ignore[operator]


def test_inside_a_node() -> None:
    once = 4.5e-5 + 1e9 * 7 / 8 / (0.78 * 300e9)
    assert ring_pass_seconds(1e9, 8.0, 1.0, MACHINE, CONSTANTS) == pytest.approx(once)
    twice = 4.5e-5 + 2 * 1e9 * 7 / 8 / (0.78 * 300e9)
    assert all_reduce_seconds(1e9, 8.0, 1.0, MACHINE, CONSTANTS) == pytest.approx(twice)


def test_across_nodes() -> None:
    whole = 4.5e-5 + 4 * 2e-5 + 2e9 * 7 / 8 / (0.78 * 300e9) + 2e9 * 3 / 4 / (0.8 * 200e9)
    assert all_reduce_seconds(1e9, 32.0, 1.0, MACHINE, CONSTANTS) == pytest.approx(whole)
    # One member per node drives one of eight NICs.
    single = 4.5e-5 + 4 * 2e-5 + 2e9 * 3 / 4 / (0.8 * 200e9 / 8)
    assert all_reduce_seconds(1e9, 4.0, 8.0, MACHINE, CONSTANTS) == pytest.approx(single)


def test_rails_where_chips_share_nics() -> None:
    shared = Machine.filled(peak=1, memory_bandwidth=1, compute_units=1, link=1, nic=100e9, nics=4)
    inside = np.array([1.0, 2.0, 4.0, 8.0])
    assert rails(inside, MACHINE) == pytest.approx([1 / 8, 2 / 8, 4 / 8, 1])
    assert rails(inside, shared) == pytest.approx([1 / 8, 1 / 8, 2 / 8, 1])


def test_an_exchange_leaves_by_the_slower_way() -> None:
    inside = 4.5e-5 + 1e9 * 7 / 8 / (0.78 * 300e9)
    assert all_to_all_seconds(1e9, 8.0, 1.0, MACHINE, CONSTANTS) == pytest.approx(inside)
    outside = 4.5e-5 + 1e9 * 3 / 4 / (0.8 * 200e9 / 8)
    assert all_to_all_seconds(1e9, 32.0, 1.0, MACHINE, CONSTANTS) == pytest.approx(outside)


def test_a_row_for_several_members_crosses_to_a_node_once() -> None:
    """What crosses is what drawing members at random gives: nodes that are asked at least once."""
    nodes, copies, rows = 4, 8, 20_000
    drawn = np.random.default_rng(0).integers(0, nodes * 8, (rows, copies)) // 8
    crossed = sum(len(set(row) - {0}) for row in drawn.tolist()) / rows  # of a row of node 0
    num_bytes = 1e9  # of all copies together
    found = all_to_all_seconds(num_bytes, 32.0, 1.0, MACHINE, CONSTANTS, copies=float(copies))
    expected = 4.5e-5 + num_bytes / copies * crossed / (0.8 * 200e9 / 8)
    assert found == pytest.approx(expected, rel=0.01)
    plain = all_to_all_seconds(num_bytes, 32.0, 1.0, MACHINE, CONSTANTS)
    assert found < 0.6 * plain
    # inside a node nothing is saved
    inside = all_to_all_seconds(num_bytes, 8.0, 1.0, MACHINE, CONSTANTS, copies=8.0)
    assert inside == pytest.approx(all_to_all_seconds(num_bytes, 8.0, 1.0, MACHINE, CONSTANTS))


@given(st.sampled_from([2, 4, 8, 16, 64, 256]), st.floats(1, 1e11), st.sampled_from([1, 2, 8]))
def test_more_bytes_take_longer(size: int, num_bytes: float, stride: int) -> None:
    for price in (ring_pass_seconds, all_reduce_seconds, all_to_all_seconds):
        one = price(num_bytes, float(size), float(stride), MACHINE, CONSTANTS)
        two = price(2 * num_bytes, float(size), float(stride), MACHINE, CONSTANTS)
        assert 0 < one <= two
