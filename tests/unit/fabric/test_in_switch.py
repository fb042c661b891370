"""Switches that add up: half of a ring's bytes, wherever the chips are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.fabric.support import RATE, clos
from tutti.collective import Group, build
from tutti.errors import InputError
from tutti.fabric.failures import Failures
from tutti.fabric.in_switch import Trees, addable, in_switch_all_reduce
from tutti.fabric.replay import replay
from tutti.hardware.topology import Position


def test_each_chip_sends_once() -> None:
    wiring = clos(16, in_switch_reduction=True)
    for nodes, latency in ((4, 2e-6), (8, 4e-6), (16, 6e-6)):
        chips = [Position("h", node, 0) for node in range(nodes)]
        added = in_switch_all_reduce(chips, wiring, 1e9)
        assert added.seconds - added.latency_s == pytest.approx(1e9 / RATE)
        assert added.latency_s == pytest.approx(2 * latency)
        ring = replay(build("all_reduce", "ring", Group.of([[i] for i in range(nodes)])), chips,
                      wiring, 1e9)  # fmt: skip
        assert ring.seconds / added.seconds == pytest.approx(2 * (nodes - 1) / nodes, rel=0.02)
    half = in_switch_all_reduce(chips, wiring, 1e9, efficiency=0.5)
    assert half.seconds - half.latency_s == pytest.approx(2e9 / RATE)


def test_chips_of_a_node_share_its_nics() -> None:
    """Two of each of 8 nodes: 0.5 GB per NIC, 10 ms; 1 GB around each pair, at its native rate."""
    wiring = clos(8, in_switch_reduction=True)
    native = float(wiring.rates[wiring.island_out])
    chips = [Position("h", node, slot) for node in range(8) for slot in (0, 3)]
    added = in_switch_all_reduce(chips, wiring, 1e9)
    assert native > RATE
    assert added.seconds - added.latency_s == pytest.approx(max(0.5e9 / RATE, 1e9 / native))
    # on other rails at every other node: rails meet at the spines, no faster, no slower
    mixed = [Position("h", node, slot) for node in range(8) for slot in (node % 2, 3)]
    other = in_switch_all_reduce(mixed, wiring, 1e9)
    assert other.seconds == pytest.approx(added.seconds)


def test_a_narrow_spine_is_crossed_once_by_each_leaf() -> None:
    """4 nodes on a leaf, 8:1: ways up are half a NIC's rate, 40 ms for what it sends in 20."""
    wiring = clos(16, tiers=2, in_switch_reduction=True,
                  oversubscription={"spine": {"oversubscription": 8}})  # fmt: skip
    chips = [Position("h", node, 0) for node in range(16)]
    found = in_switch_all_reduce(chips, wiring, 1e9)
    assert found.seconds - found.latency_s == pytest.approx(2e9 / RATE)
    seats = [[wiring.chip(Position("h", n, slot)) for n in range(16)] for slot in range(8)]
    rails = np.array(seats)
    assert Trees(wiring, rails, 1e9).paces() == pytest.approx(np.full(8, RATE / 2e9))
    twice = np.concatenate([rails[:1], rails[:1]])
    assert Trees(wiring, twice, 1e9).paces() == pytest.approx(np.full(2, RATE / 4e9))
    # four chips of each node, each its own rail: a quarter each, on four leaves
    four = [Position("h", node, slot) for node in range(16) for slot in range(4)]
    native = float(wiring.rates[wiring.island_out])
    some = in_switch_all_reduce(four, wiring, 1e9)
    assert some.seconds - some.latency_s == pytest.approx(max(0.5e9 / RATE, 1.5e9 / native))


def test_who_cannot_be_added_up() -> None:
    apart = clos(16, in_switch_reduction=True, rail_only=True)
    same = [[apart.chip(Position("h", node, 2)) for node in (0, 5)]]
    other = [[apart.chip(Position("h", node, slot)) for node, slot in ((0, 2), (5, 3))]]
    assert addable(apart, np.array(same))
    assert not addable(apart, np.array(other))
    one_node = [[apart.chip(Position("h", 0, slot)) for slot in (0, 1)]]
    assert not addable(apart, np.array(one_node))
    with pytest.raises(InputError, match="on several nodes of one pool"):
        in_switch_all_reduce([Position("h", 0, slot) for slot in (0, 1)], apart, 1e9)
    rail = in_switch_all_reduce([Position("h", n, 2) for n in range(16)], apart, 1e9)
    assert rail.seconds - rail.latency_s == pytest.approx(1e9 / RATE)


def test_switches_that_add_nothing_up_are_refused_and_cut_trees_too() -> None:
    chips = [Position("h", node, 0) for node in range(16)]
    with pytest.raises(InputError, match="'in_switch_reduction: true'"):
        in_switch_all_reduce(chips, clos(16), 1e9)
    wiring = clos(16, in_switch_reduction=True)
    gone = Failures.parse(wiring, [f"spine {i}" for i in range(4)])
    with pytest.raises(InputError, match="no link left"):
        in_switch_all_reduce(chips, wiring, 1e9, failures=gone)
