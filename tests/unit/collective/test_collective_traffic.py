"""How much goes where: the algorithms move no more than they must, and `load` counts it right."""

from __future__ import annotations

import time
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from collective_cases import EVERY, calls
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tutti.collective import Edge, Group, Island, Layout, Operation, algorithms, build, load
from tutti.collective.columns import columns, proportional_shares
from tutti.collective.interpret import interpret


def traffic(program, count):
    sizes = {Operation.ALL_TO_ALL: program.group.size, Operation.REDUCE_SCATTER: program.group.size}
    length = count * sizes.get(program.operation, 1)
    inputs = {rank: np.zeros(length, np.int8) for rank in program.group.ranks}
    if program.operation is Operation.BROADCAST:
        inputs = {program.group.ranks[program.root]: np.zeros(count, np.int8)}
    return interpret(program, inputs, count).traffic


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(data=st.data())
def test_load_counts_what_the_interpreter_moves(operation, algorithm, data):
    call = data.draw(calls(operation, algorithm))
    program = call.program
    moved = interpret(program, call.inputs(), call.counts).traffic
    layout = Layout.of(program, call.counts)
    sent, received = Counter(), Counter()
    for chunk, index in program.issue_order():
        found = load(program, index, layout, chunk)
        for edge in Edge:
            for seat, rank in enumerate(program.group.ranks):
                sent[rank, edge] += found.sent[edge][seat]
                received[rank, edge] += found.received[edge][seat]
    for rank in program.group.ranks:
        for edge in Edge:
            assert sent[rank, edge] == moved.sent(rank, edge)
            assert received[rank, edge] == moved.received(rank, edge)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 12])
@pytest.mark.parametrize("algorithm", ["ring", "doubling", "direct"])
def test_flat_all_reduce_moves_twice_all_but_one_share(size, algorithm):
    count = 10 * size
    found = traffic(build("all_reduce", algorithm, Group.regular(1, size)), count)
    for rank in range(size):
        assert found.sent(rank) == found.received(rank) == 2 * (size - 1) * count // size


def test_a_flat_ring_crosses_each_border_once():
    program = build("all_reduce", "ring", Group.of([[3, 0, 5], [1, 4, 2]]))
    crossing = {
        pair
        for pair in traffic(program, 60).pairs
        if (pair[0] in {3, 0, 5}) != (pair[1] in {3, 0, 5})
    }
    assert len(crossing) == 4  # two borders, two directions (back to reduce, forth to gather)
    scattered = build("all_reduce", "ring", program.group, order=[3, 1, 0, 4, 5, 2])
    assert traffic(scattered, 60).between_islands == 3 * traffic(program, 60).between_islands


@pytest.mark.parametrize("sizes", [(4, 4), (2, 2, 2), (1, 3), (4, 2, 3), (1, 1, 2, 5)])
def test_hierarchical_all_reduce_crosses_with_the_least(sizes):
    starts = np.cumsum([0, *sizes])
    group = Group.of([range(a, b) for a, b in pairwise(starts)])
    count, number = 720, len(sizes)
    found = traffic(build("all_reduce", "hierarchical", group), count)
    assert found.between_islands == 2 * (number - 1) * count
    for island in group.islands:
        sent = sum(found.sent(r, Edge.RAIL) + found.sent(r, Edge.CROSS) for r in island.ranks)
        assert sent == 2 * (number - 1) * count // number
        shares = {found.sent(r, Edge.RAIL) + found.sent(r, Edge.CROSS) for r in island.ranks}
        assert max(shares) - min(shares) <= 2 * number * len(columns(group))


def test_equal_islands_stay_on_their_rails():
    group = Group.regular(3, 4)
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        assert traffic(build(operation, "hierarchical", group), 48).by_edge()[Edge.CROSS] == 0
    rail = traffic(build("all_to_all", "rail", group), 5)
    direct = traffic(build("all_to_all", "direct", group), 5)
    assert rail.by_edge()[Edge.CROSS] == 0
    assert rail.between_islands == direct.between_islands
    assert direct.by_edge()[Edge.CROSS] > 0


def test_rails_are_found_whatever_the_order_of_positions():
    group = Group(
        (Island(ranks=(0, 1, 2), rails=(0, 1, 2)), Island(ranks=(3, 4, 5), rails=(2, 0, 1)))
    )
    assert traffic(build("all_reduce", "hierarchical", group), 60).by_edge()[Edge.CROSS] == 0
    assert traffic(build("all_to_all", "rail", group), 3).by_edge()[Edge.CROSS] == 0


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
def test_each_section_enters_or_leaves_an_island_once(operation):
    group = Group.of([[0, 1, 2, 3], [4, 5], [6, 7, 8]])
    count = 12
    found = traffic(build(operation, "hierarchical", group), count)
    for island in group.islands:
        moved = found.received if operation == "all_gather" else found.sent
        crossed = sum(moved(r, Edge.RAIL) + moved(r, Edge.CROSS) for r in island.ranks)
        assert crossed == count * (group.size - island.size)


def test_a_hierarchical_broadcast_enters_each_island_once():
    group = Group.of([[0, 1, 2, 3], [4, 5], [6, 7, 8]])
    assert traffic(build("broadcast", "hierarchical", group, root=5), 120).between_islands == 240


def test_unequal_nics_of_an_island_share_in_proportion():
    pair = Island(ranks=(0, 1), bandwidths=(1.0, 4.0)), Island(ranks=(2, 3), bandwidths=(1.0, 4.0))
    for algorithm in ("hierarchical", "proportional"):
        found = traffic(build("all_reduce", algorithm, Group(pair)), 1000)
        assert found.sent(0, Edge.RAIL) == found.received(0, Edge.RAIL) == 200
        assert found.sent(1, Edge.RAIL) == found.received(1, Edge.RAIL) == 800
    unlike = Group((pair[0], Island(ranks=(2, 3, 4), bandwidths=(1.0, 0.0, 1.0))))
    found = traffic(build("all_reduce", "hierarchical", unlike), 1000)
    out = {r: found.sent(r, Edge.RAIL) + found.sent(r, Edge.CROSS) for r in unlike.ranks}
    assert out == {0: 200, 1: 800, 2: 500, 3: 0, 4: 500}


def test_a_slow_island_sends_its_data_once_and_no_more():
    """Four islands, NICs 1:4:4:4: the slow one reduces nothing for others."""
    nics = (1.0, 4.0, 4.0, 4.0)
    group = Group(tuple(Island(ranks=(r,), bandwidths=(b,)) for r, b in enumerate(nics)))
    count = 1200
    fair = traffic(build("all_reduce", "proportional", group), count)
    ring = traffic(build("all_reduce", "ring", group), count)
    assert fair.sent(0) == fair.received(0) == count  # the lower bound of any all-reduce
    assert ring.sent(0) == 2 * 3 * count // 4
    assert {fair.sent(r) for r in (1, 2, 3)} == {count + 2 * count // 3}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
@settings(deadline=None, derandomize=True)
def test_shares_follow_bandwidth(bandwidths):
    number = len(bandwidths)
    shares = proportional_shares([Fraction(b) for b in bandwidths]) or (1,) * number
    total = sum(shares)
    sent = [1 + Fraction((number - 2) * share, total) for share in shares]
    paces = {s / b for s, b, w in zip(sent, bandwidths, shares, strict=True) if w}
    if number > 2:
        assert len(paces) == 1
        (pace,) = paces
        assert all(
            1 / Fraction(b) >= pace for b, w in zip(bandwidths, shares, strict=True) if not w
        )


def test_columns_give_each_island_one_owner():
    group = Group.of([[0, 1, 2], [3, 4]])
    found = columns(group)
    assert [(c.owners, c.start, c.stop) for c in found] == [
        ((0, 3), 0, Fraction(1, 3)),
        ((1, 3), Fraction(1, 3), Fraction(1, 2)),
        ((1, 4), Fraction(1, 2), Fraction(2, 3)),
        ((2, 4), Fraction(2, 3), 1),
    ]


def test_sixteen_thousand_ranks_are_built_and_loaded_quickly():
    begun = time.process_time()
    group = Group.regular(2048, 8)
    programs = [
        build(operation, algorithm, group, root=5 if operation.has_root else None)
        for operation in Operation
        for algorithm in algorithms(operation, group)
    ]
    built = time.process_time() - begun
    assert built < 5.0, f"{len(programs)} programs took {built:.1f} s"
    program = next(p for p in programs if str(p).startswith("all_reduce/hierarchical"))
    layout = Layout.of(program, 1 << 30)
    across = load(program, 1, layout)
    assert across.rounds == 2 * 2047
    sent = across.busiest({Edge.RAIL: 1.0, Edge.CROSS: 1.0})
    assert sent == pytest.approx(2 * 2047 / 2048 * (1 << 27), rel=1e-6)
    assert not across.uses(Edge.CROSS)
    assert not across.uses(Edge.ISLAND)
