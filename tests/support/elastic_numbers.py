"""Numbers that only rise, in the parts of a small job's state: found, and made small.

Generations, orders, questions and each host's statuses are only ever compared and counted on from
the largest. A state in which they are taken by their order goes on exactly as the one before, and
the parts of such states are few: they come back again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from typing import Any

from msgspec.structs import replace

from tests.support.elastic_world import Link, Process
from tutti.elastic.agent_state import AgentState, Enter, Leave
from tutti.elastic.events import Settle
from tutti.elastic.hosts import Host
from tutti.elastic.membership import Membership
from tutti.elastic.messages import Order, Report, Status

Ranks = tuple[int, ...]  # numbers in their order; where one stands is its new number


@dataclass(slots=True)
class Numbers:
    """The numbers in one part of a state, or in all of it."""

    generations: set[int] = field(default_factory=lambda: {0})
    orders: set[int] = field(default_factory=lambda: {0})
    requests: set[int] = field(default_factory=lambda: {0})
    statuses: dict[int, set[int]] = field(default_factory=dict)  # by host
    stale: bool = False  # whether there are some of which nothing will ever depend

    def find(self, value: Any) -> Numbers:
        """Add those of a part."""
        match value:
            case Membership():
                self.generations.add(value.generation)
                self.orders.add(value.order)
                self.requests.add(value.request)
                self.stale |= value != _without_stale(value)
                for _, host in _without_stale(value).hosts:
                    self.find(host.status)
            case AgentState():
                self._status(value.host, value.number)
                self._reports(value.reports)
                self.generations.update(generation for _, generation, _ in value.leaving)
                self.find(value.order)
            case Status():
                self._status(value.host, value.number)
                self.orders.add(value.order)
                self._reports(value.reports)
            case Order():
                self.orders.add(value.number)
                self.generations.add(value.generation)
            case Process():
                self.generations.add(value.generation)
                for command in value.mail:
                    if isinstance(command, Leave):
                        self.generations.add(command.generation)
                    elif isinstance(command, Enter):
                        self.find(command.order)
            case Settle():
                self.requests.add(value.request)
                self._reports(value.left)
            case Link():
                self.find(value.newest)
                self.find(value.before)
        return self

    def _status(self, name: str, number: int) -> None:
        self.statuses.setdefault(int(name[1:]), {0}).add(number)

    def _reports(self, reports: tuple[Report, ...]) -> None:
        self.generations.update(report.generation for report in reports)


@dataclass(frozen=True, slots=True)
class Renaming:
    """The new numbers of all of a state."""

    generations: Ranks
    orders: Ranks
    requests: Ranks
    statuses: tuple[Ranks, ...]

    def of(self, value: Any) -> Any:
        """Return a part with its new numbers, and without what is only words."""
        generation, order = self.generations.index, self.orders.index
        match value:
            case Membership():
                value = _without_stale(value)
                hosts = tuple(
                    (name, Host(status=self.of(host.status), silent=host.silent))
                    for name, host in value.hosts
                )
                told = ((n, order(o), self._status(n, number)) for n, o, number in value.told)
                return with_fields(
                    value, generation=generation(value.generation), order=order(value.order),
                    request=self.requests.index(value.request), why="words" * bool(value.why),
                    hosts=hosts, told=tuple(told), faults=(),
                )  # fmt: skip
            case AgentState():
                leaving = ((chip, generation(g), gently) for chip, g, gently in value.leaving)
                return with_fields(
                    value, number=self._status(value.host, value.number),
                    order=self.of(value.order), reports=self._reports(value.reports),
                    leaving=tuple(leaving),
                )  # fmt: skip
            case Status():
                return replace(
                    value, number=self._status(value.host, value.number),
                    order=order(value.order), reports=self._reports(value.reports),
                )  # fmt: skip
            case Order():
                numbers = {
                    "number": order(value.number),
                    "generation": generation(value.generation),
                }
                return replace(value, **numbers, why="")
            case Process():
                return value._replace(
                    generation=generation(value.generation), mail=tuple(map(self.of, value.mail))
                )
            case Enter():
                return with_fields(value, order=self.of(value.order))
            case Leave():
                return with_fields(value, generation=generation(value.generation), why="")
            case Settle():
                request = self.requests.index(value.request)
                return with_fields(value, request=request, left=self._reports(value.left))
            case Link():
                return Link(self.of(value.newest), self.of(value.before))
        return value

    def _status(self, name: str, number: int) -> int:
        return self.statuses[int(name[1:])].index(number)

    def _reports(self, reports: tuple[Report, ...]) -> tuple[Report, ...]:
        # deaths in a small job are of step 0, which are never counted
        generation: Callable[[int], int] = self.generations.index
        return tuple(replace(r, generation=generation(r.generation), deaths=()) for r in reports)


def _without_stale(members: Membership) -> Membership:
    """Return it with 0 for what will never count again.

    Of the order that a host had when it was last heard of it is only asked if it is the newest;
    of what was told when, whether it is what would be told now.
    """
    order = members.order
    hosts = tuple(
        (name, host if host.status.order in (0, order) else _with_no_order(host))
        for name, host in members.hosts
    )
    numbers = {name: host.status.number for name, host in members.hosts}
    told = tuple(
        known if known == (known[0], order, numbers[known[0]]) else (known[0], 0, 0)
        for known in members.told
    )
    return with_fields(members, hosts=hosts, told=told)


def _with_no_order(host: Host) -> Host:
    return Host(status=replace(host.status, order=0), silent=host.silent)
