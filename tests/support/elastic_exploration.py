"""Every reachable state of a small job (`elastic_world`)."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import msgspec

from tests.support.elastic_world import World, check, moves, promptly, require_progress
from tutti.elastic.agent_state import Enter, Free, Leave
from tutti.elastic.messages import Order, Status

_ENCODER = msgspec.msgpack.Encoder()


def explore(
    start: World, *, prompt: bool, liveness_every: int = 20, most: int | None = None
) -> int:
    """Visit every state that can be reached, or the first `most`; return how many there are."""
    first = promptly(start) if prompt else start
    seen, todo, count = {_digest(first)}, [first], 0
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
            digest = _digest(after)
            if digest not in seen:
                seen.add(digest)
                todo.append(after)
    return count


def _digest(world: World) -> bytes:
    return hashlib.blake2b(key(world), digest_size=12).digest()


def key(world: World) -> bytes:
    """Return what tells states apart: without words, and with rising numbers as their ranks."""
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
        words = found.kind, found.gentle, found.seats, found.donors, found.source
        return rank[found.number], found.generation, *words

    late = bool(world.late)
    return _ENCODER.encode((
        members.phase, members.generation, rank[members.order], asked[members.request],
        members.seats, members.source, members.asked, bool(members.why),
        members.donors, members.gentle, members.drained, members.counted,
        [(n, h.silent, rank[h.status.order], h.status.reports) for n, h in members.hosts],
        [(a and (order(a.order), a.reports, a.leaving)) for a in world.agents],
        [p and (*p[:7], [_mailed(c) for c in p.mail], *p[8:]) for p in world.processes],
        [(status(u.newest, h), late and status(u.before, h)) for h, u in enumerate(world.up)],
        [(order(d.newest), late and order(d.before)) for d in world.down],
        [q and (asked[q.request], q.chips, q.left)
         for q in (world.asked.newest, world.asked.before if late else None)],
        world.faults, world.newcomers, world.late, world.wishes,
    ))  # fmt: skip


def _mailed(command: Enter | Free | Leave) -> Any:
    if isinstance(command, Free):
        return "free"
    if isinstance(command, Leave):
        return command.generation, command.gentle
    order = command.order
    return order.generation, order.seats, order.donors, order.source
