"""Every reachable state of small jobs keeps the invariants, and planted bugs break them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.elastic_states import explore_by_many
from tests.support import elastic_world as world
from tests.support.elastic_exploration import digest_of_alike, explore
from tests.support.elastic_invariants import check, promptly, require_progress
from tests.support.elastic_moves import moves
from tutti.elastic.agent_state import AgentState
from tutti.elastic.events import Phase
from tutti.elastic.hosts import Host
from tutti.elastic.membership import Membership
from tutti.elastic.messages import Standing


def test_two_hosts_and_a_fault() -> None:
    found = explore(world.begin(2, faults=1, newcomers=0, late=0), prompt=True)
    assert found > 1_000


def test_many_processes_visit_the_same_states() -> None:
    start = world.begin(2, faults=1, newcomers=0, late=0)
    row = explore_by_many(start, workers=3, minutes=2)
    assert row["whole"]
    assert row["visited"] == explore(start, prompt=True, alike=True, liveness_every=200)


def require_alike(start: world.World, most: int | None = None) -> tuple[int, int]:
    """See that states of one key lead to states of the same keys; return how many of each."""
    first = promptly(start)
    seen, todo, led = {repr(first)}, [first], dict[bytes, set[bytes]]()
    while todo and len(led) != most:
        state = todo.pop()
        own, following = digest_of_alike(world.live_only(state)), set[bytes]()
        for _, moved in moves(state):
            after = promptly(moved)
            following.add(digest_of_alike(world.live_only(after)))
            if repr(after) not in seen:
                seen.add(repr(after))
                todo.append(after)
        following.discard(own)
        assert led.setdefault(own, following) == following
    return len(seen), len(led)


@pytest.mark.parametrize("late", [0, 1])
def test_states_that_are_taken_as_one_lead_to_the_same(late: int) -> None:
    """Neither dead messages, names of hosts nor what numbers there are make any difference."""
    states, keys = require_alike(world.begin(2, faults=1, newcomers=0, late=late), most=300)
    assert states > 2 * keys


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_states_that_are_taken_as_one_lead_to_the_same() -> None:
    start = world.begin(2, faults=1, newcomers=0, late=0)
    states, keys = require_alike(start)
    print(f"{states:,} states are {keys:,}")
    assert states > 10 * keys
    assert keys == explore(start, prompt=True, alike=True)


@pytest.mark.slow
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize(
    ("hosts", "faults", "newcomers", "late", "least"),
    [
        (2, 2, 0, 0, 25_000), (3, 1, 0, 0, 20_000), (2, 1, 1, 0, 20_000),
        (2, 1, 0, world.ANY, 4_000), (2, 1, 1, world.ANY, 100_000),
        (2, 2, 1, 0, 100_000), (3, 2, 0, 0, 100_000),
    ],
)  # fmt: skip
def test_more_hosts_and_faults(
    hosts: int, faults: int, newcomers: int, late: int, least: int
) -> None:
    start = world.begin(hosts, faults=faults, newcomers=newcomers, late=late)
    named = f"{hosts} hosts, {faults} faults, {newcomers} newcomers, {late} late"

    def tell(count: int, known: int) -> None:
        print(f"{named}: {count:,} visited, {known:,} to visit", flush=True)

    found = explore(start, prompt=True, liveness_every=200, alike=True, tell=tell)
    print(f"{named}: {found:,} states")
    assert found > least


@pytest.mark.slow
def test_two_hosts_a_fault_and_every_delay_within_a_host() -> None:
    found = explore(world.begin(2, faults=1, newcomers=0, late=0), prompt=False, alike=True)
    print(f"{found:,} states")
    assert found > 10_000


Choices = st.lists(st.integers(min_value=0, max_value=10_000), min_size=20, max_size=160)


def walk(choices: list[int]) -> None:
    """Take a way through the world of three hosts, two faults and a newcomer, with every delay."""
    state = world.begin(3, faults=2, newcomers=1, late=3)
    for choice in choices:
        possible = list(moves(state))
        if not possible:
            break
        state = possible[choice % len(possible)][1]
        check(state)
    require_progress(state)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(Choices)
def test_any_way_through_three_hosts_two_faults_and_a_newcomer(choices: list[int]) -> None:
    walk(choices)


class _LooksAtAll(Membership):
    """The machine without its short ways for news of one host."""

    def _next(self, only: str) -> Any:
        del only
        return super()._next("")

    def _tell(self, only: str) -> Any:
        del only
        return super()._tell("")


def test_news_of_one_host_lead_where_a_look_at_all_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    real, compared = Membership.after, Counter[str]()

    def values(members: Membership) -> dict[str, Any]:
        return {one.name: getattr(members, one.name) for one in fields(Membership)}

    def after(self: Membership, event: Any) -> Any:
        mine = real(self, event)
        if not isinstance(self, _LooksAtAll):
            other = real(_LooksAtAll(**values(self)), event)
            assert (values(mine[0]), mine[1]) == (values(other[0]), other[1])
            compared[type(event).__name__] += 1
        return mine

    monkeypatch.setattr(Membership, "after", after)
    draw = random.Random(24)
    for _ in range(12):
        walk([draw.randrange(10_000) for _ in range(160)])
    assert compared["Heard"] > 200


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


def test_a_bug_that_one_of_many_processes_meets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    a_generation_keeps_its_number(monkeypatch)
    with pytest.raises(AssertionError, match="Error"):
        explore_by_many(world.begin(2, faults=1, newcomers=0, late=0), workers=2, minutes=2)


def test_standings_are_what_the_machine_speaks_of() -> None:
    assert {s.value for s in Standing} == {"starting", "idle", "entering", "running", "done"}
