"""Prices of collective programs: closed forms where there are some, sane choices elsewhere."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.collective import Group, Operation, build
from tutti.collective.group import Edge
from tutti.cost.network.group_links import GroupLinks, Wire, group_links
from tutti.cost.network.program_choice import Efficiency, choose_program, program_seconds
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position

PERFECT = Efficiency(island=1.0, fabric=1.0, startup_s=0.0, hop_s=0.0)


def links(num_islands: int, size: int, island: float, fabric: float, latency: float = 0.0):
    wires = {
        Edge.ISLAND: Wire(latency_s=latency, bandwidth=island),
        Edge.RAIL: Wire(latency_s=latency, bandwidth=fabric),
        Edge.CROSS: Wire(latency_s=latency, bandwidth=fabric),
    }
    return GroupLinks(group=Group.regular(num_islands, size), wires=tuple(wires.items()))


@given(st.integers(2, 12), st.floats(1e3, 1e9))
def test_a_ring_all_reduce_costs_two_passes_of_n_minus_1_over_n(size, num_bytes):
    found = links(1, size, island=1e9, fabric=1.0)
    program = build(Operation.ALL_REDUCE, "ring", found.group)
    expected = 2 * (size - 1) / size * num_bytes / 1e9
    assert program_seconds(program, num_bytes, found, PERFECT) == pytest.approx(expected, rel=1e-9)


@given(st.integers(2, 6), st.integers(2, 8), st.floats(1e6, 1e9))
def test_the_hierarchical_all_reduce_is_the_sum_of_its_levels(islands, size, num_bytes):
    found = links(islands, size, island=100e9, fabric=10e9)
    program = build(Operation.ALL_REDUCE, "hierarchical", found.group)
    inside = 2 * (size - 1) / size * num_bytes / 100e9
    across = 2 * (islands - 1) / islands * (num_bytes / size) / 10e9
    price = program_seconds(program, num_bytes, found, PERFECT)
    assert price == pytest.approx(inside + across, rel=1e-9)


def test_start_up_counts_rounds_between_islands():
    found = links(8, 1, island=1e9, fabric=1e9, latency=1e-6)
    program = build(Operation.ALL_REDUCE, "ring", found.group)
    assert program_seconds(program, 0.0, found, PERFECT) == pytest.approx(14e-6)


def test_efficiency_scales_bandwidth():
    found = links(1, 4, island=1e9, fabric=1.0)
    program = build(Operation.ALL_GATHER, "ring", found.group)
    half = Efficiency(island=0.5, fabric=1.0, startup_s=0.0, hop_s=0.0)
    assert program_seconds(program, 1e6, found, half) == pytest.approx(
        2 * program_seconds(program, 1e6, found, PERFECT)
    )


@pytest.mark.parametrize(
    "operation", [Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.REDUCE_SCATTER]
)
def test_the_choice_is_the_cheapest_and_names_the_others(operation):
    found = links(4, 8, island=200e9, fabric=25e9, latency=2e-6)
    choice = choose_program(operation, 64e6, found, Efficiency())
    assert choice.seconds == min(seconds for _, _, seconds in choice.alternatives)
    assert choice.algorithm == "hierarchical"
    assert {"ring", "hierarchical"} <= {name for name, _, _ in choice.alternatives}


def test_small_messages_prefer_few_rounds():
    found = links(16, 1, island=1e9, fabric=25e9, latency=5e-6)
    small = choose_program(Operation.ALL_REDUCE, 1e3, found, Efficiency())
    ring = {name: seconds for name, _, seconds in small.alternatives}["ring"]
    assert small.seconds < ring / 2


def test_a_group_of_one_and_an_empty_buffer_cost_nothing():
    assert choose_program(Operation.ALL_REDUCE, 1e6, links(1, 1, 1.0, 1.0), PERFECT).seconds == 0
    assert choose_program(Operation.ALL_REDUCE, 0.0, links(2, 2, 1.0, 1.0), PERFECT).seconds == 0


def test_native_libraries_do_not_span_islands_by_themselves():
    found = links(2, 4, island=200e9, fabric=25e9)
    choice = choose_program(Operation.ALL_REDUCE, 1e6, found, Efficiency())
    assert "native" not in {name for name, _, _ in choice.alternatives}
    one = choose_program(Operation.ALL_REDUCE, 1e6, links(1, 4, 200e9, 1.0), Efficiency())
    assert "native" in {name for name, _, _ in one.alternatives}


# --- from chips to groups --------------------------------------------------------------------


def test_chips_of_one_node_are_one_island():
    cluster = Cluster.load("B1024")
    found = group_links(cluster, [Position("a800", 0, slot) for slot in range(8)])
    assert [len(island.ranks) for island in found.group.islands] == [8]
    assert set(dict(found.wires)) == {Edge.ISLAND}


def test_ascend_nodes_are_two_islands():
    cluster = Cluster.load("B1024")
    found = group_links(cluster, [Position("ascend", 0, slot) for slot in range(16)])
    assert [len(island.ranks) for island in found.group.islands] == [8, 8]


def test_the_slowest_link_counts_across_pools():
    cluster = Cluster.load("B1024")
    near = group_links(cluster, [Position("a800", n, 0) for n in range(4)])
    mixed = group_links(
        cluster, [Position("a800", 0, 0), Position("p800", 0, 0), Position("ascend", 0, 0)]
    )
    assert mixed.wire(Edge.RAIL).bandwidth == near.wire(Edge.RAIL).bandwidth / 2
    assert mixed.wire(Edge.RAIL).host_forwarded
    assert not near.wire(Edge.RAIL).host_forwarded


def test_scattered_ranks_are_ordered_along_the_wire():
    cluster = Cluster.load("B1024")
    scattered = [Position("a800", rank % 2, rank // 2) for rank in range(8)]
    found = group_links(cluster, scattered)
    assert [island.ranks for island in found.group.islands] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_every_edge_that_a_program_uses_has_a_wire():
    """Islands of one node, of two per node, alone on their rail: prices exist for all."""
    cluster = Cluster.load("B1024")
    groups = [
        [Position("ascend", n, s) for n in range(4) for s in (0, 8)],
        [Position("a800", n, n % 8) for n in range(8)],
        [Position("a800", n, s) for n in range(3) for s in (0, 5)]
        + [Position("ascend", n, s) for n in range(2) for s in range(16)],
    ]
    for chips in groups:
        found = group_links(cluster, chips)
        choice = choose_program(Operation.ALL_REDUCE, 1e7, found, Efficiency())
        assert math.isfinite(choice.seconds)
        assert choice.seconds > 0


@pytest.mark.parametrize("chunks", [2, 4, 16])
def test_a_chunked_program_costs_what_the_choice_said(chunks):
    found = links(4, 8, island=200e9, fabric=25e9, latency=2e-6)
    program = build(Operation.ALL_REDUCE, "hierarchical", found.group, chunks=chunks)
    once = build(Operation.ALL_REDUCE, "hierarchical", found.group)
    many = program_seconds(program, 64e6, found, Efficiency())
    assert many < program_seconds(once, 64e6, found, Efficiency())
    choice = choose_program(Operation.ALL_REDUCE, 64e6, found, Efficiency())
    assert choice.seconds <= many * (1 + 1e-9)
