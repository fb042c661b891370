"""Messages, store and forward: each passes its links one after the other, first come first served.

The finest grain. A message occupies a link for its bytes ÷ the link's rate, then travels for the
link's latency; only when it has arrived as a whole does it ask for the next link. A rank enters its
next round when its messages of this one have left it and those for it have arrived. Where no two
edges share a link, times follow from a recurrence over rounds; otherwise from a queue of events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tutti.fabric.wiring import Floats, Integers
from tutti.loops import compiled

_BUCKETS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageRing:
    """A ring whose every member sends one message per round to the next: all rounds alike.

    `links` are those between each member and the next, in order; −1: none.
    """

    rounds: int
    message_bytes: float
    links: Integers  # member × hop
    rates: Floats  # of all links
    latencies: Floats

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.message_bytes <= 0 or len(self.links) < 2:
            raise ValueError("a ring needs two members, a round and bytes to send")

    @property
    def shares_links(self) -> bool:
        """Whether two edges of the ring pass one link."""
        used = self.links[self.links >= 0]
        return len(np.unique(used)) < len(used)


def all_reduce_ring(
    members: int, num_bytes: float, rate: float, latency_s: float, *, queue: bool | None = None
) -> float:
    """Return the seconds of a ring all-reduce on one switch, two links between each two members."""
    at = np.arange(members)
    ring = MessageRing(
        rounds=2 * (members - 1), message_bytes=num_bytes / members,
        links=np.stack([at, members + (at + 1) % members], axis=1),
        rates=np.full(2 * members, rate), latencies=np.full(2 * members, latency_s),
    )  # fmt: skip
    return ring_seconds(ring, queue=queue)


def ring_seconds(ring: MessageRing, *, queue: bool | None = None) -> float:
    """Return when the last message has arrived; `queue` asks for events where none are needed."""
    occupied = np.where(ring.rates > 0, ring.message_bytes / np.maximum(ring.rates, 1e-300), np.inf)
    if queue is None:
        queue = ring.shares_links
    if queue:
        end, depth = -1.0, 4
        while end < 0:  # more messages of one member were under way than there was room for
            end = float(compiled(by_events)(
                ring.links, ring.rounds, occupied, ring.latencies, _bucket_width(ring, occupied),
                depth,
            ))  # fmt: skip
            depth *= 4
        return end
    if ring.shares_links:
        raise ValueError("edges share links: only a queue of events knows who comes first")
    hops = np.where(ring.links >= 0, occupied[ring.links], 0.0)
    waits = np.where(ring.links >= 0, ring.latencies[ring.links], 0.0)
    return float(compiled(by_recurrence)(hops, waits, ring.rounds))


def _bucket_width(ring: MessageRing, occupied: Floats) -> float:
    """Return the width of the queue's buckets: far apart enough that none wraps around."""
    used = ring.links[ring.links >= 0]
    shortest = float((occupied + ring.latencies)[used].min())
    return max(shortest / 64.0, 1e-12)


def by_recurrence(hops: Any, waits: Any, rounds: Any) -> Any:
    """Return the end of rings that share nothing: times of a round from those of the last."""
    members, width = hops.shape
    ready = np.zeros(members)  # when each may send
    free = np.zeros((members, width))  # when each link of its edge is free
    after = np.zeros(members)
    end = 0.0
    for _ in range(rounds):
        for i in range(members):
            at = ready[i]
            left = at
            for hop in range(width):
                if hops[i, hop] > 0:
                    at = max(at, free[i, hop]) + hops[i, hop]
                    free[i, hop] = at
                    if hop == 0:
                        left = at
                    at += waits[i, hop]
            follows = i + 1 if i + 1 < members else 0
            after[follows] = max(after[follows], at)
            after[i] = max(after[i], left)
            end = max(end, at)
        for i in range(members):
            ready[i] = after[i]
            after[i] = 0.0
    return end


def by_events(
    links: Any, rounds: Any, occupied: Any, latencies: Any, bucket: Any, depth: Any
) -> Any:
    """Return the end by a queue of events: buckets of time, each in order (compiled).

    An event is a message that asks for its next link. A member waits for its last one to leave,
    not to arrive, so that several may be under way; −1: more than `depth` were.
    """
    members, width = links.shape
    slots = depth * members  # a member's messages of successive rounds
    busy = np.zeros(slots, dtype=np.bool_)
    turn = np.zeros(slots, dtype=np.int64)
    hop = np.zeros(slots, dtype=np.int64)
    when = np.zeros(slots)
    following = np.full(slots, -1, dtype=np.int64)
    head = np.full(_BUCKETS, -1, dtype=np.int64)
    tail = np.full(_BUCKETS, -1, dtype=np.int64)
    free = np.zeros(len(occupied))
    current = np.zeros(members, dtype=np.int64)  # the round that each is in
    has_left = np.full(members, -1, dtype=np.int64)  # the last round whose message has left
    arrived = np.full(members, -1, dtype=np.int64)  # the last round whose message has come
    left_at, came_at = np.zeros(members), np.zeros(members)
    for i in range(members):
        following[i] = i + 1 if i + 1 < members else -1
        busy[i] = True
    head[0], tail[0] = 0, members - 1
    day, pending, end = 0, members, 0.0
    while pending > 0:
        at = day % _BUCKETS
        slot, before = head[at], -1
        while slot >= 0 and when[slot] >= (day + 1) * bucket:  # of a later lap
            before, slot = slot, following[slot]
        if slot < 0:
            day += 1
            continue
        if before < 0:
            head[at] = following[slot]
        else:
            following[before] = following[slot]
        if tail[at] == slot:
            tail[at] = before
        pending -= 1
        i, now = slot % members, when[slot]
        put, again = -1, slot
        link = links[i, hop[slot]] if hop[slot] < width else -1
        if link >= 0:
            done = max(now, free[link]) + occupied[link]
            free[link] = done
            if hop[slot] == 0:
                has_left[i], left_at[i] = turn[slot], done
                put = i
            hop[slot] += 1
            when[slot] = done + latencies[link]
        else:  # arrived
            j = i + 1 if i + 1 < members else 0
            arrived[j], came_at[j] = turn[slot], max(came_at[j], now)
            end = max(end, now)
            put, again, busy[slot] = j, -1, False
        for entry in range(2):
            one = again
            if entry == 1:
                if put < 0:
                    continue
                here = current[put]
                if has_left[put] < here or arrived[put] < here or here + 1 >= rounds:
                    continue
                current[put] = here + 1
                one = ((here + 1) % depth) * members + put
                if busy[one]:
                    return -1.0
                busy[one] = True
                turn[one], hop[one] = here + 1, 0
                when[one] = max(left_at[put], came_at[put])
            if one < 0:
                continue
            home = np.int64(when[one] / bucket) % _BUCKETS
            pending += 1
            last = tail[home]
            following[one] = -1
            if last < 0 or head[home] < 0:
                head[home] = one
                tail[home] = one
            elif when[last] <= when[one]:
                following[last] = one
                tail[home] = one
            else:  # between others
                previous, here_ = -1, head[home]
                while here_ >= 0 and when[here_] <= when[one]:
                    previous, here_ = here_, following[here_]
                following[one] = here_
                if previous < 0:
                    head[home] = one
                else:
                    following[previous] = one
    return end
