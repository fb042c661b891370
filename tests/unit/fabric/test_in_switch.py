"""Switches that add up: half of a ring's bytes, wherever the chips are."""

from __future__ import annotations

import pytest

from tests.unit.fabric.support import RATE, clos
from tutti.collective import Group, build
from tutti.errors import InputError
from tutti.fabric.failures import Failures
from tutti.fabric.in_switch import in_switch_all_reduce
from tutti.fabric.replay import replay
from tutti.hardware.topology import Position


def test_each_chip_sends_once() -> None:
    wiring = clos(16, in_switch_reduction=True)
    for nodes, latency in ((4, 2e-6), (8, 4e-6), (16, 6e-6)):
        chips = [Position("h", node, 0) for node in range(nodes)]
        found = in_switch_all_reduce(chips, wiring, 1e9)
        assert found.seconds - found.latency_s == pytest.approx(1e9 / RATE)
        assert found.latency_s == pytest.approx(2 * latency)
        ring = replay(build("all_reduce", "ring", Group.of([[i] for i in range(nodes)])), chips,
                      wiring, 1e9)  # fmt: skip
        assert ring.seconds / found.seconds == pytest.approx(2 * (nodes - 1) / nodes, rel=0.02)
    assert in_switch_all_reduce(chips[:1], wiring, 1e9).seconds == 0.0
    half = in_switch_all_reduce(chips, wiring, 1e9, efficiency=0.5)
    assert half.seconds - half.latency_s == pytest.approx(2e9 / RATE)


def test_switches_that_add_nothing_up_are_refused_and_cut_trees_too() -> None:
    chips = [Position("h", node, 0) for node in range(16)]
    with pytest.raises(InputError, match="'in_switch_reduction: true'"):
        in_switch_all_reduce(chips, clos(16), 1e9)
    wiring = clos(16, in_switch_reduction=True)
    gone = Failures.parse(wiring, [f"spine {i}" for i in range(4)])
    with pytest.raises(InputError, match="no link left"):
        in_switch_all_reduce(chips, wiring, 1e9, failures=gone)
