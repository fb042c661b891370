"""Every reachable state of small jobs keeps the invariants, and planted bugs break them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import elastic_world as world
from tests.support.elastic_exploration import digest_of_alike, explore, key
from tutti.elastic.agent_state import AgentState
from tutti.elastic.events import Phase
from tutti.elastic.hosts import Host
from tutti.elastic.membership import Membership
from tutti.elastic.messages import Standing


def test_two_hosts_and_a_fault() -> None:
    found = explore(world.begin(2, faults=1, newcomers=0, late=0), prompt=True)
    assert found > 1_000


def test_hosts_that_are_alike_need_be_told_apart_only_once() -> None:
    """States that differ only in which host is which lead to states that do."""
    start = world.begin(2, faults=1, newcomers=0, late=0)
    seen, todo = dict[bytes, world.World](), [world.promptly(start)]
    while todo:
        for _, following in world.moves(todo.pop()):
            after = world.promptly(following)
            if key(after) not in seen:
                seen[key(after)] = after
                todo.append(after)
    classes = {digest_of_alike(state) for state in (world.promptly(start), *seen.values())}
    assert len(classes) == explore(start, prompt=True, alike=True)
    assert len(classes) < 0.52 * len(seen)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("hosts", "faults", "newcomers", "least"),
    [(3, 1, 0, 40_000), (2, 1, 1, 40_000), (2, 2, 0, 20_000)],
)
def test_more_hosts_and_faults(hosts: int, faults: int, newcomers: int, least: int) -> None:
    start = world.begin(hosts, faults=faults, newcomers=newcomers, late=0)
    found = explore(start, prompt=True, liveness_every=200, alike=True)
    print(f"{hosts} hosts, {faults} faults, {newcomers} newcomers: {found:,} states")
    assert found > least


@pytest.mark.slow
def test_two_hosts_a_fault_and_every_delay_within_a_host() -> None:
    found = explore(world.begin(2, faults=1, newcomers=0, late=0), prompt=False)
    print(f"{found:,} states")
    assert found > 50_000


@pytest.mark.slow
def test_two_hosts_a_fault_and_a_message_that_comes_late_or_twice() -> None:
    found = explore(world.begin(2, faults=1, newcomers=0, late=1), prompt=True)
    print(f"{found:,} states")
    assert found > 5_000


Choices = st.lists(st.integers(min_value=0, max_value=10_000), min_size=20, max_size=160)


def walk(choices: list[int]) -> None:
    """Take a way through the world of three hosts, two faults and a newcomer, with every delay."""
    state = world.begin(3, faults=2, newcomers=1, late=3)
    for choice in choices:
        possible = list(world.moves(state))
        if not possible:
            break
        state = possible[choice % len(possible)][1]
        world.check(state)
    world.require_progress(state)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(Choices)
def test_any_way_through_three_hosts_two_faults_and_a_newcomer(choices: list[int]) -> None:
    walk(choices)


# --- planted bugs ----------------------------------------------------------------------------


def a_generation_keeps_its_number(patch: pytest.MonkeyPatch) -> None:
    real = Membership._answered

    def answered(self: Membership, event: Any) -> Any:
        after = real(self, event)
        return after and replace(after, generation=1)

    patch.setattr(Membership, "_answered", answered)


def a_death_is_not_told(patch: pytest.MonkeyPatch) -> None:
    real = AgentState._died

    def died(self: AgentState, chip: str, death: Any) -> Any:
        after, commands = real(self, chip, death)
        old = self.report(chip)
        return after._with(
            msgspec.structs.replace(after.report(chip), process=old.process)
        ), commands

    patch.setattr(AgentState, "_died", died)


def nobody_need_say_that_it_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_has_left", lambda self, seat: True)


def silent_hosts_get_seats(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Host, "usable", property(lambda self: True))


def every_generation_may_write(patch: pytest.MonkeyPatch) -> None:
    def accepts(self: Membership, generation: int, chip: str, process: int) -> bool:
        return any(seat.chip == chip and seat.process == process for seat in self.seats)

    patch.setattr(Membership, "accepts", accepts)


def one_that_comes_back_counts_as_gone(patch: pytest.MonkeyPatch) -> None:
    real = Membership._has_left

    def has_left(self: Membership, seat: Any) -> bool:
        return self.phase in (Phase.SETTLING, Phase.WAITING) or real(self, seat)

    patch.setattr(Membership, "_has_left", has_left)


BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [
    a_generation_keeps_its_number,
    a_death_is_not_told,
    nobody_need_say_that_it_left,
    silent_hosts_get_seats,
    every_generation_may_write,
    one_that_comes_back_counts_as_gone,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bugs_are_found(bug: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        explore(
            world.begin(2, faults=1, newcomers=0, late=0), prompt=True, liveness_every=5, most=6_000
        )


def test_standings_are_what_the_machine_speaks_of() -> None:
    assert {s.value for s in Standing} == {"starting", "idle", "entering", "running", "done"}
