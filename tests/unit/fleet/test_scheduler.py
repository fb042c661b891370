"""The state machine: nothing twice, nothing lost, promises kept, nobody forgotten."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fleet_machine import live
from tutti.fleet.policy import Order, Placement

POLICIES = [
    "/".join((order, place, *extra))
    for order, place in itertools.product(Order, Placement)
    for extra in ((), ("wait", "move"), ("preempt",), ("strict",))
]
seeds = st.integers(0, 2**32)


@settings(max_examples=12, deadline=None)
@given(seed=seeds, policy=st.sampled_from(POLICIES))
def test_whatever_happens_all_jobs_are_done_and_no_chip_is_held_twice(
    seed: int, policy: str
) -> None:
    one = live(seed, policy)
    assert one.done == set(one.submitted)


@settings(max_examples=10, deadline=None)
@given(seed=seeds, place=st.sampled_from(list(Placement)))
def test_what_is_promised_is_kept(seed: int, place: str) -> None:
    """Owners never expect less than the truth, and nothing fails: then nobody starts later."""
    one = live(seed, f"fifo/{place}", failures=False)
    assert not one.disturbed


@settings(max_examples=4, deadline=None)
@given(seed=seeds, policy=st.sampled_from(POLICIES))
def test_a_replay_says_the_same(seed: int, policy: str) -> None:
    assert live(seed, policy, jobs=25).said == live(seed, policy, jobs=25).said


@pytest.mark.slow
@pytest.mark.parametrize("order", list(Order))
@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_thousands_of_lives(order: Order, data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from([one for one in POLICIES if one.startswith(order)]))
    one = live(data.draw(seeds), policy, jobs=30)
    assert one.done == set(one.submitted)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(seed=seeds, place=st.sampled_from(list(Placement)))
def test_thousands_of_promises(seed: int, place: str) -> None:
    live(seed, f"fifo/{place}", jobs=30, failures=False)
