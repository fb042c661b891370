"""Slow wires are found in a few steps, and named: a wire, or the link between two."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.diagnose.slow_wires import Edge, SlowWires, Traffic, WireVerdict, explain

RATE = 12.5e6  # bytes per second
STEPS = 500
Change = tuple[int, set[Edge], float]  # from a step on some edges take so many times as long


def ring(hosts: int) -> list[Edge]:
    return [(f"box/{n}", f"box/{(n + 1) % hosts}") for n in range(hosts)]


def line(hosts: int) -> list[Edge]:
    there = [(f"box/{n}", f"box/{n + 1}") for n in range(hosts - 1)]
    return [*there, *((b, a) for a, b in there)]


def at(wire: str, edges: list[Edge]) -> set[Edge]:
    return {edge for edge in edges if wire in edge}


def run(
    edges: list[Edge], changes: list[Change], chance: random.Random, *, busy: float = 0.0
) -> list[WireVerdict]:
    """Return what is said in 500 steps of 5 % noise; `busy`: how often a host is, for a step."""
    watch, said = SlowWires(), list[WireVerdict]()
    size = {edge: chance.uniform(1e6, 8e6) for edge in edges}
    for step in range(1, STEPS + 1):
        host = chance.uniform(1.0, 2.0) if chance.random() < busy else 1.0
        traffic = {}
        for edge in edges:
            factors = [factor for first, slow, factor in changes if step >= first and edge in slow]
            took = size[edge] / RATE * (factors[-1] if factors else 1.0)
            traffic[edge] = Traffic(size[edge], took * host * max(chance.gauss(1.0, 0.05), 0.5))
        said += watch.step(step, 1.0, traffic)
    return said


@pytest.mark.parametrize("edges", [ring(3), ring(4), ring(8), line(3), line(5), line(2)])
@pytest.mark.parametrize("busy", [0.0, 0.1])
def test_noise_and_single_busy_steps_say_nothing(edges: list[Edge], busy: float) -> None:
    for seed in range(6):
        assert run(edges, [], random.Random(seed), busy=busy) == []


@pytest.mark.parametrize("shape", [ring, line])
def test_a_wire_of_half_rate_is_named_within_ten_steps_and_once(
    shape: Callable[[int], list[Edge]],
) -> None:
    """Of drawn hosts, wires and steps; and it is well again once, as soon."""
    right = 0
    for seed in range(20):
        chance = random.Random(seed)
        edges = shape(chance.randint(3, 8))
        wire = chance.choice(edges)[0]
        begins, ends = chance.randint(40, 200), chance.randint(260, 460)
        said = run(edges, [(begins, at(wire, edges), 2.0), (ends, at(wire, edges), 1.0)], chance)
        assert [v.slow for v in said] == [True, False], (seed, said)
        slow, well = said
        assert 0 <= slow.step - begins <= 10
        assert 0 <= well.step - ends <= 10
        assert slow.factor == pytest.approx(2.0, rel=0.1)
        right += slow.ends == well.ends == (wire,)
    assert right == 20


def test_a_link_between_two_that_are_quick_with_others_is_named() -> None:
    for seed in range(10):
        chance = random.Random(seed)
        edges = line(chance.randint(4, 8))
        place = chance.randint(1, len(edges) // 2 - 2)
        ends = {f"box/{place}", f"box/{place + 1}"}
        slow = {edge for edge in edges if set(edge) == ends}
        (said,) = run(edges, [(100, slow, 2.0)], chance)
        assert set(said.ends) == ends


def test_what_slows_all_ways_alike_is_no_wires() -> None:
    for hosts in (3, 4, 8):
        edges = ring(hosts)
        assert run(edges, [(100, set(edges), 2.0)], random.Random(hosts)) == []


@pytest.mark.parametrize("far", [1, 2])
@pytest.mark.parametrize("hosts", [3, 4, 5, 8])
def test_two_wires_that_slow_alike_are_named_where_some_way_is_left_that_does_not(
    hosts: int, far: int
) -> None:
    """Of three hosts, or opposite ones of four, all ways have a slow end: others would do, too."""
    edges = ring(hosts)
    wires = {edges[0][0], edges[far][0]}
    slow = {edge for edge in edges if wires & set(edge)}
    said = run(edges, [(100, slow, 2.0)], random.Random(hosts))
    if slow == set(edges):
        assert said == []
    else:
        assert {ends for verdict in said for ends in verdict.ends} == wires


@settings(max_examples=300)
@given(st.integers(3, 9), st.data())
def test_nobody_is_blamed_whose_wire_is_well(hosts: int, data: st.DataObject) -> None:
    """In rings with further ways, any wires being slow; and what is said explains what is seen."""
    more = st.tuples(st.integers(0, hosts - 1), st.integers(0, hosts - 1))
    further = {(f"box/{a}", f"box/{b}") for a, b in data.draw(st.sets(more)) if a != b}
    edges = {*ring(hosts), *further}
    wires = {f"box/{n}" for n in data.draw(st.sets(st.integers(0, hosts - 1)))}
    slow = {edge for edge in edges if wires & set(edge)}
    said = explain(slow, edges)
    assert {ends[0] for ends in said if len(ends) == 1} <= wires
    covered = {edge for edge in edges if any(set(ends) <= set(edge) for ends in said)}
    assert covered == (slow if said else set())


def test_an_edge_that_is_hardly_busy_is_not_looked_at() -> None:
    watch = SlowWires()
    for step in range(1, 60):
        busy_s = 0.01 if step < 30 else 0.03
        assert watch.step(step, 1.0, {("a/0", "a/1"): Traffic(1e6, busy_s)}) == []


@pytest.mark.parametrize(
    ("slow", "edges", "ends"),
    [
        ({("a", "b"), ("c", "a")}, {("a", "b"), ("b", "c"), ("c", "a")}, [("a",)]),
        ({("a", "b"), ("b", "a")}, {("a", "b"), ("b", "a")}, [("a", "b")]),
        ({("a", "b")}, {("a", "b"), ("b", "c"), ("c", "a")}, [("a", "b")]),
        ({("a", "b"), ("b", "c")}, {("a", "b"), ("b", "c")}, [("b",)]),
        (
            {("a", "b"), ("c", "d")},
            {("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")},
            [("a", "b"), ("c", "d")],
        ),
        (set(), {("a", "b")}, []),
    ],
)
def test_which_wires_and_links_explain_slow_edges(
    slow: set[Edge], edges: set[Edge], ends: list[tuple[str, ...]]
) -> None:
    assert explain(slow, edges) == ends
