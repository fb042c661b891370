"""Every reachable state of a small job (`elastic_world`).

Of states that nothing could ever tell apart one is visited: numbers that only rise are taken as
their order alone; of an order that a host has, whether it is the newest; and with `alike` hosts
have no names. A test compares the three keys, each coarser than the one before.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tests.support.elastic_invariants import check, promptly, require_progress
from tests.support.elastic_moves import moves
from tests.support.elastic_world import Process, World, live_only
from tutti.elastic.agent_state import AgentState, Enter, Free, Leave
from tutti.elastic.events import Settle
from tutti.elastic.membership import Membership
from tutti.elastic.messages import Order, Report, Seat, Status

_ENCODER = msgspec.msgpack.Encoder()
Names = tuple[int, ...]  # the new number of each host


def explore(
    start: World,
    *,
    prompt: bool,
    liveness_every: int = 20,
    most: int | None = None,
    alike: bool = False,
    tell: Callable[[int, int], None] = lambda _count, _open: None,
) -> int:
    """Visit every state that can be reached, or the first `most`; return how many there are.

    With `alike`, of states that differ only in which host is which, one is visited. `tell` hears
    now and then how many were visited, and how many are known that were not yet.
    """
    digest_of = digest_of_alike if alike else _digest
    fresh = Fresh(prompt=prompt)
    first = fresh.settled(start)
    seen, todo, count = {digest_of(first)}, [first], 0
    chance = random.Random(0)
    while todo and count != most:
        at = chance.randrange(len(todo)) if most is not None else -1  # a sample of all depths
        todo[at], todo[-1] = todo[-1], todo[at]
        world = todo.pop()
        check(world)
        if count % liveness_every == 0:
            require_progress(world)
        count += 1
        if count % 10_000 == 0:
            tell(count, len(todo))
        for _, following in moves(world):
            after = fresh(following)
            digest = b"" if after is None else digest_of(after)
            if after is not None and digest not in seen:
                seen.add(digest)
                todo.append(after)
    return count


class Fresh:
    """Passes states on that were not met in this very form: moves that commute lead to the same.

    What was met is known by its hash of 64 bits, before and after what is in it has been settled:
    that takes a tenth of what a digest does. Of ten million states two have one by chance once in
    some hundred thousand explorations.
    """

    def __init__(self, *, prompt: bool = True) -> None:
        self._prompt = prompt
        self._met: set[int] = set()
        self._settled: set[int] = set()

    def settled(self, world: World) -> World:
        """Return a state as it is visited."""
        return live_only(promptly(world) if self._prompt else world)

    def __call__(self, world: World) -> World | None:
        """Return a state as it is visited; None if it was met."""
        form = hash(world)
        if form in self._met:
            return None
        self._met.add(form)
        after = self.settled(world)
        form = hash(after)
        if form in self._settled:
            return None
        self._settled.add(form)
        return after


def digest_of_alike(world: World) -> bytes:
    """Return what tells states apart whose hosts have no names.

    Hosts are put in the order of what can be said of each without naming another; of those that
    are alike by that, every order is tried, and the least key counts.
    """
    hosts = range(len(world.agents))
    parts = _parts(world)
    signs = [_signature(parts, host, len(hosts)) for host in hosts]
    groups = [list(g) for _, g in itertools.groupby(sorted(hosts, key=signs.__getitem__),
                                                    key=signs.__getitem__)]  # fmt: skip
    least = b""
    for orders in itertools.product(*(itertools.permutations(group) for group in groups)):
        order = [host for group in orders for host in group]
        new = tuple(order.index(old) for old in hosts)
        found = b"".join(_told(part, new, order) for part in parts)
        least = min(least, found) if least else found
    return hashlib.blake2b(least, digest_size=12).digest()


class ByHost(tuple[Any, ...]):
    """Entries of which each is of a host, in the order of hosts."""

    __slots__ = ()


class Unordered(tuple[Any, ...]):
    """Things whose order only comes from hosts' names."""

    __slots__ = ()


def _signature(parts: Sequence[Any], host: int, total: int) -> bytes:
    """Return what can be said of a host without naming another."""
    mine = tuple(0 if other == host else 1 for other in range(total))
    return b"".join(
        renamed(part[host], mine) for part in parts if isinstance(part, ByHost)
    ) + b"".join(
        renamed(part, mine) for part in parts if isinstance(part, Unordered)
    )  # fmt: skip


def _told(part: Any, names: Names, order: Sequence[int]) -> bytes:
    if isinstance(part, ByHost):
        return b"".join(renamed(part[host], names) for host in order)
    return renamed(part, names)


@functools.lru_cache(maxsize=1 << 20)
def renamed(value: Any, names: Names) -> bytes:
    return _ENCODER.encode(_with_names(value, names))


def _with_names(value: Any, names: Names) -> Any:
    """Return a value with other numbers of hosts."""
    if isinstance(value, str):
        at = 1 if value[:1] == "h" and value[1:].isdigit() else 2 if value[:2] == "p/" else 0
        return value if not at else f"{value[:at]}{names[int(value[at])]}{value[at + 1 :]}"
    if isinstance(value, Unordered):
        return sorted((_with_names(entry, names) for entry in value), key=_ENCODER.encode)
    if isinstance(value, tuple):
        return [_with_names(entry, names) for entry in value]
    if isinstance(value, Seat):  # which rank it is only comes from the names
        return [_with_names(value.chip, names), value.process, value.incarnation]
    if isinstance(value, msgspec.Struct):
        fields = [(name, getattr(value, name)) for name in value.__struct_fields__]
        return [_with_names(Unordered(v) if name in _SETS else v, names) for name, v in fields]
    return value


_SETS = ("holders", "chips")


def _digest(world: World) -> bytes:
    return hashlib.blake2b(key(world), digest_size=12).digest()


def key(world: World) -> bytes:
    """Return what tells states apart: without words, and with numbers as what they are told by."""
    return _ENCODER.encode(_parts(world))


def _parts(world: World) -> tuple[Any, ...]:
    members = world.members
    number = {n: i for i, n in enumerate(sorted(_generations(world)))}
    telling = Telling(members.order, number.__getitem__)
    hosts = range(len(world.agents))
    return (
        *telling.members(members),
        ByHost(telling.known(members, host) for host in hosts),
        ByHost(map(telling.agent, world.agents)),
        ByHost(map(telling.process, world.processes)),
        ByHost((telling.status(u.newest), telling.status(u.before)) for u in world.up),
        ByHost((telling.order(d.newest), telling.order(d.before)) for d in world.down),
        tuple(map(telling.question, world.asked)),
        (world.faults, world.newcomers, world.late, world.wishes),
    )


class Telling:
    """What tells the parts of a state apart, where the newest order has a number."""

    def __init__(self, newest: int, generation: Callable[[int], int] = lambda number: number):
        """Take the number of the newest order, and what generations are told by."""
        self._newest, self._generation = newest, generation

    def members(self, members: Membership) -> tuple[Any, ...]:
        """Tell of the controller, without what it knows of hosts."""
        return (
            (members.phase, self._generation(members.generation), bool(members.why),
             members.source, members.gentle, members.last, not self._newest),
            Unordered(members.seats), Unordered(members.asked), Unordered(members.donors),
            Unordered(members.drained), Unordered(members.counted),
        )  # fmt: skip

    def known(self, members: Membership, host: int) -> Any:
        """Tell of what the controller knows of a host."""
        name = f"h{host}"
        known = members.host(name)
        if known is None:
            return None
        told = (name, self._newest, known.status.number) in members.told
        return known.silent, self.status(known.status), told

    def agent(self, agent: AgentState | None) -> Any:
        """Tell of an agent."""
        if agent is None:
            return None
        leaving = tuple((n, self._generation(g), gently) for n, g, gently in agent.leaving)
        return self.order(agent.order), self.reports(agent.reports), leaving

    def process(self, found: Process | None) -> Any:
        """Tell of a process."""
        if found is None:
            return None
        mail = tuple(map(self._mailed, found.mail))
        seats = Unordered(found.seats), Unordered(found.donors)
        generation = self._generation(found.generation)
        own = found.number, found.standing, generation, found.step
        return (*own, *seats, found.source, mail, *found[8:])

    def status(self, found: Status | None) -> Any:
        """Tell of a status."""
        return found and (found.order >= self._newest, self.reports(found.reports))

    def order(self, found: Order | None) -> Any:
        """Tell of an order."""
        if found is None:
            return None
        seats = Unordered(found.seats), Unordered(found.donors)
        words = found.kind, found.gentle, *seats, found.source
        return found.number >= self._newest, self._generation(found.generation), words

    def question(self, found: Settle | None) -> Any:
        """Tell of a question to who settles generations."""
        if found is None:
            return None
        left = Unordered((report.chip, self.reports((report,))) for report in found.left)
        return Unordered(found.chips), found.last, left

    def reports(self, found: Sequence[Report]) -> Any:
        """Tell of what is said of processes."""
        return tuple((r.process, r.standing, self._generation(r.generation), r.step) for r in found)

    def _mailed(self, command: Enter | Free | Leave) -> Any:
        if isinstance(command, Free):
            return "free"
        if isinstance(command, Leave):
            return self._generation(command.generation), command.gentle
        found = command.order
        seats = Unordered(found.seats), Unordered(found.donors)
        return self._generation(found.generation), *seats, found.source


def _generations(world: World) -> set[int]:
    """Return every number of a generation that somebody knows."""
    members = world.members
    statuses = [host.status for _, host in members.hosts]
    statuses += [m for link in world.up for m in link if m is not None]
    agents = [agent for agent in world.agents if agent is not None]
    found = {0, members.generation, *(r.generation for s in statuses for r in s.reports)}
    found |= {order.generation for link in world.down for order in link if order is not None}
    for agent in agents:
        found |= {report.generation for report in agent.reports}
        found |= {generation for _, generation, _ in agent.leaving}
        if agent.order is not None:
            found.add(agent.order.generation)
    for question in world.asked:
        found |= {r.generation for r in question.left} if question is not None else set()
    for process in world.processes:
        if process is not None:
            found.add(process.generation)
            for command in process.mail:
                if isinstance(command, Leave):
                    found.add(command.generation)
                elif isinstance(command, Enter):
                    found.add(command.order.generation)
    return found
