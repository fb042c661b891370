"""Every reachable state of a small job (`elastic_world`)."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from tests.support.elastic_world import Process, World, check, moves, promptly, require_progress
from tutti.elastic.agent_state import Enter, Free, Leave
from tutti.elastic.messages import Order, Seat, Status

_ENCODER = msgspec.msgpack.Encoder()


def explore(
    start: World,
    *,
    prompt: bool,
    liveness_every: int = 20,
    most: int | None = None,
    alike: bool = False,
) -> int:
    """Visit every state that can be reached, or the first `most`; return how many there are.

    With `alike`, of states that differ only in which host is which, one is visited.
    """
    digest_of = digest_of_alike if alike else _digest
    first = promptly(start) if prompt else start
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
        for _, following in moves(world):
            after = promptly(following) if prompt else following
            digest = digest_of(after)
            if digest not in seen:
                seen.add(digest)
                todo.append(after)
    return count


def digest_of_alike(world: World) -> bytes:
    """Return what tells states apart whose hosts have no names.

    Hosts are put in the order of what can be said of each without naming another; of those that
    are alike by that, every order is tried, and the least key counts.
    """
    hosts = range(len(world.agents))
    parts = _parts(world)
    signs = [_signature(world, parts, host) for host in hosts]
    groups = [list(g) for _, g in itertools.groupby(sorted(hosts, key=signs.__getitem__),
                                                    key=signs.__getitem__)]  # fmt: skip
    least = b""
    for orders in itertools.product(*(itertools.permutations(group) for group in groups)):
        order = [host for group in orders for host in group]
        found = _ENCODER.encode(_renamed(parts, {old: new for new, old in enumerate(order)}, order))
        least = min(least, found) if least else found
    return hashlib.blake2b(least, digest_size=12).digest()


class _ByHost(list[Any]):
    """Entries of which each is of a host, in the order of hosts."""


class _Names(tuple[Any, ...]):
    """Things whose order only comes from hosts' names."""

    __slots__ = ()


def _signature(world: World, parts: Any, host: int) -> bytes:
    """Return what can be said of a host without naming another."""
    mine = {other: (0 if other == host else 1) for other in range(len(world.agents))}
    own = [entry[host] for entry in parts if isinstance(entry, _ByHost)]
    return _ENCODER.encode(_renamed(own, mine, ()))


def _renamed(value: Any, names: dict[int, int], order: Sequence[int]) -> Any:
    """Return a value with other numbers of hosts, and what is by host in another order."""
    if isinstance(value, str):
        at = 1 if value[:1] == "h" and value[1:].isdigit() else 2 if value[:2] == "p/" else 0
        return value if not at else f"{value[:at]}{names[int(value[at])]}{value[at + 1 :]}"
    if isinstance(value, _ByHost):
        return [_renamed(value[host], names, order) for host in order or range(len(value))]
    if isinstance(value, _Names):
        return sorted((_renamed(entry, names, order) for entry in value), key=_ENCODER.encode)
    if isinstance(value, (list, tuple)):
        return [_renamed(entry, names, order) for entry in value]
    if isinstance(value, Seat):  # which rank it is only comes from the names
        return [_renamed(value.chip, names, order), value.process, value.incarnation]
    if isinstance(value, msgspec.Struct):
        fields = [(name, getattr(value, name)) for name in value.__struct_fields__]
        return [_renamed(_Names(v) if name in _SETS else v, names, order) for name, v in fields]
    return value


_SETS = ("holders", "chips")


def _digest(world: World) -> bytes:
    return hashlib.blake2b(key(world), digest_size=12).digest()


def key(world: World) -> bytes:
    """Return what tells states apart: without words, and with rising numbers as their ranks."""
    return _ENCODER.encode(_parts(world))


def _parts(world: World) -> tuple[Any, ...]:
    members = world.members
    statuses = [host.status for _, host in members.hosts]
    statuses += [m for link in world.up for m in link if m is not None]
    orders = [m for link in world.down for m in link if m is not None]
    orders += [agent.order for agent in world.agents if agent is not None and agent.order]
    rank = {n: i for i, n in enumerate(sorted(
        {members.order, 0, *(o.number for o in orders), *(s.order for s in statuses)}
    ))}  # fmt: skip
    questions = [q for q in world.asked if q is not None]
    asked = {n: i for i, n in enumerate(sorted({members.request, *(q.request for q in questions)}))}

    def status(found: Status | None, host: int) -> Any:
        if found is None:
            return None
        known = members.host(f"h{host}")
        newer = known is None or found.number > known.status.number
        return newer, rank[found.order], found.reports

    def order(found: Order | None) -> Any:
        if found is None:
            return None
        seats = _Names(found.seats), _Names(found.donors)
        words = found.kind, found.gentle, *seats, found.source
        return rank[found.number], found.generation, *words

    late = bool(world.late)
    told = set(members.told)
    known = {
        name: (h.silent, rank[h.status.order], h.status.reports,
               (name, members.order, h.status.number) in told)
        for name, h in members.hosts
    }  # fmt: skip
    return (
        members.phase, members.generation, rank[members.order], asked[members.request],
        _Names(members.seats), members.source, _Names(members.asked), bool(members.why),
        _Names(members.donors), members.gentle, members.last,
        _Names(members.drained), _Names(members.counted),
        _ByHost(known.get(f"h{h}") for h in range(len(world.agents))),
        _ByHost((a and (order(a.order), a.reports, a.leaving)) for a in world.agents),
        _ByHost(p and _process(p) for p in world.processes),
        _ByHost((status(u.newest, h), late and status(u.before, h))
                for h, u in enumerate(world.up)),
        _ByHost((order(d.newest), late and order(d.before)) for d in world.down),
        [q and (asked[q.request], _Names(q.chips), _Names(q.left))
         for q in (world.asked.newest, world.asked.before if late else None)],
        world.faults, world.newcomers, world.late, world.wishes,
    )  # fmt: skip


def _process(process: Process) -> Any:
    mail = [_mailed(command) for command in process.mail]
    seats = _Names(process.seats), _Names(process.donors)
    return (*process[:4], *seats, process.source, mail, *process[8:])


def _mailed(command: Enter | Free | Leave) -> Any:
    if isinstance(command, Free):
        return "free"
    if isinstance(command, Leave):
        return command.generation, command.gentle
    order = command.order
    return order.generation, _Names(order.seats), _Names(order.donors), order.source
