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
from tutti.elastic.agent_state import Enter, Free, Leave
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


class _ByHost(tuple[Any, ...]):
    """Entries of which each is of a host, in the order of hosts."""

    __slots__ = ()


class _Names(tuple[Any, ...]):
    """Things whose order only comes from hosts' names."""

    __slots__ = ()


def _signature(parts: Sequence[Any], host: int, total: int) -> bytes:
    """Return what can be said of a host without naming another."""
    mine = tuple(0 if other == host else 1 for other in range(total))
    return b"".join(
        _renamed(part[host], mine) for part in parts if isinstance(part, _ByHost)
    ) + b"".join(
        _renamed(part, mine) for part in parts if isinstance(part, _Names)
    )  # fmt: skip


def _told(part: Any, names: Names, order: Sequence[int]) -> bytes:
    if isinstance(part, _ByHost):
        return b"".join(_renamed(part[host], names) for host in order)
    return _renamed(part, names)


@functools.lru_cache(maxsize=1 << 20)
def _renamed(value: Any, names: Names) -> bytes:
    return _ENCODER.encode(_with_names(value, names))


def _with_names(value: Any, names: Names) -> Any:
    """Return a value with other numbers of hosts."""
    if isinstance(value, str):
        at = 1 if value[:1] == "h" and value[1:].isdigit() else 2 if value[:2] == "p/" else 0
        return value if not at else f"{value[:at]}{names[int(value[at])]}{value[at + 1 :]}"
    if isinstance(value, _Names):
        return sorted((_with_names(entry, names) for entry in value), key=_ENCODER.encode)
    if isinstance(value, tuple):
        return [_with_names(entry, names) for entry in value]
    if isinstance(value, Seat):  # which rank it is only comes from the names
        return [_with_names(value.chip, names), value.process, value.incarnation]
    if isinstance(value, msgspec.Struct):
        fields = [(name, getattr(value, name)) for name in value.__struct_fields__]
        return [_with_names(_Names(v) if name in _SETS else v, names) for name, v in fields]
    return value


_SETS = ("holders", "chips")


def _digest(world: World) -> bytes:
    return hashlib.blake2b(key(world), digest_size=12).digest()


def key(world: World) -> bytes:
    """Return what tells states apart: without words, and with numbers as what they are told by."""
    return _ENCODER.encode(_parts(world))


def _parts(world: World) -> tuple[Any, ...]:
    members = world.members
    newest = members.order
    generation = {n: i for i, n in enumerate(sorted(_generations(world)))}

    def reports(found: Sequence[Report]) -> Any:
        return tuple((r.process, r.standing, generation[r.generation], r.step) for r in found)

    def status(found: Status | None) -> Any:
        return found and (found.order >= newest, reports(found.reports))

    def order(found: Order | None) -> Any:
        if found is None:
            return None
        seats = _Names(found.seats), _Names(found.donors)
        words = found.kind, found.gentle, *seats, found.source
        return found.number >= newest, generation[found.generation], words

    def process(found: Process) -> Any:
        mail = tuple(mailed(command) for command in found.mail)
        seats = _Names(found.seats), _Names(found.donors)
        own = found.number, found.standing, generation[found.generation], found.step
        return (*own, *seats, found.source, mail, *found[8:])

    def mailed(command: Enter | Free | Leave) -> Any:
        if isinstance(command, Free):
            return "free"
        if isinstance(command, Leave):
            return generation[command.generation], command.gentle
        found = command.order
        seats = _Names(found.seats), _Names(found.donors)
        return generation[found.generation], *seats, found.source

    told = set(members.told)
    known = {
        name: (h.silent, status(h.status), (name, newest, h.status.number) in told)
        for name, h in members.hosts
    }  # fmt: skip
    leaving = [
        a and tuple((name, generation[g], gently) for name, g, gently in a.leaving)
        for a in world.agents
    ]
    return (
        (members.phase, generation[members.generation], bool(members.why), members.source,
         members.gentle, members.last, not newest),
        _Names(members.seats), _Names(members.asked), _Names(members.donors),
        _Names(members.drained), _Names(members.counted),
        _ByHost(known.get(f"h{h}") for h in range(len(world.agents))),
        _ByHost((a and (order(a.order), reports(a.reports), left))
                for a, left in zip(world.agents, leaving, strict=True)),
        _ByHost(p and process(p) for p in world.processes),
        _ByHost((status(u.newest), status(u.before)) for u in world.up),
        _ByHost((order(d.newest), order(d.before)) for d in world.down),
        tuple(q and (_Names(q.chips), q.last, _Names((r.chip, reports((r,))) for r in q.left))
              for q in world.asked),
        (world.faults, world.newcomers, world.late, world.wishes),
    )  # fmt: skip


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
