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
from tutti.elastic.agent_state import AgentState
from tutti.elastic.membership import Host, Membership, Phase
from tutti.elastic.messages import Order, Standing


def test_two_hosts_and_a_fault() -> None:
    found = world.explore(world.begin(2, faults=1, newcomers=0, late=0), prompt=True)
    assert found > 1_000


@pytest.mark.slow
def test_two_hosts_a_fault_and_every_delay_within_a_host() -> None:
    found = world.explore(world.begin(2, faults=1, newcomers=0, late=0), prompt=False)
    print(f"{found:,} states")
    assert found > 50_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hosts_two_faults_a_newcomer_and_a_late_message() -> None:
    found = world.explore(
        world.begin(2, faults=1, newcomers=1, late=1), prompt=True, liveness_every=100
    )
    print(f"{found:,} states")


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
    end = world.fair_end(state).members
    assert end.phase in (*world.OVER, Phase.RUNNING), f"it stays {end.phase} ({end.why})"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(Choices)
def test_any_way_through_three_hosts_two_faults_and_a_newcomer(choices: list[int]) -> None:
    walk(choices)


# --- planted bugs ----------------------------------------------------------------------------


def late_status_believed(patch: pytest.MonkeyPatch) -> None:
    real = Membership._heard

    def heard(self: Membership, status: Any) -> Any:
        host = self.host(status.host)
        if host is not None:
            first = msgspec.structs.replace(host.status, number=0)
            self = self._with_host(status.host, Host(status=first, silent=host.silent))
        return real(self, status)

    patch.setattr(Membership, "_heard", heard)


def old_order_obeyed(patch: pytest.MonkeyPatch) -> None:
    real = AgentState.after

    def after(self: AgentState, event: Any) -> Any:
        if isinstance(event, Order) and self.order is not None:
            self = replace(self, order=msgspec.structs.replace(self.order, number=-1))
        return real(self, event)

    patch.setattr(AgentState, "after", after)


def nobody_need_say_that_it_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_has_left", lambda self, seat: True)


def silent_hosts_get_seats(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Host, "usable", property(lambda self: True))


def every_generation_may_write(patch: pytest.MonkeyPatch) -> None:
    def accepts(self: Membership, generation: int, chip: str, process: int) -> bool:
        return any(seat.chip == chip and seat.process == process for seat in self.seats)

    patch.setattr(Membership, "accepts", accepts)


def a_lost_order_is_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    real = Membership._tell

    def tell(self: Membership) -> Any:
        known = {note[:2] for note in self.told}
        after, sends = real(self)
        return after, tuple(s for s in sends if (s.host, s.order.number) not in known)

    patch.setattr(Membership, "_tell", tell)


def a_fresh_process_has_the_old_one_s_seat(patch: pytest.MonkeyPatch) -> None:
    def seated(self: Membership, seat: Any) -> Any:
        host = self.host(seat.host)
        return None if host is None or host.silent else host.report(seat.chip)

    patch.setattr(Membership, "seated", seated)


BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [
    late_status_believed,
    old_order_obeyed,
    nobody_need_say_that_it_left,
    silent_hosts_get_seats,
    every_generation_may_write,
    a_fresh_process_has_the_old_one_s_seat,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bugs_are_found(bug: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        world.explore(world.begin(2, faults=1, newcomers=0, late=1), prompt=True, liveness_every=1)


def test_standings_are_what_the_machine_speaks_of() -> None:
    assert {s.value for s in Standing} == {"starting", "idle", "entering", "running", "done"}
