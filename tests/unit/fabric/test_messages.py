"""Messages, store and forward: known rings, and a queue of events against a plain one."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from tests.support.fabric_messages import MessageRing, all_reduce_ring, ring_seconds

# 1,024 MB among so many on one switch, 50 GiB/s and 500 ns per link: milliseconds that ASTRA-sim's
# network library gives for it
KNOWN = {64: 75.2, 512: 77.2, 1024: 78.3}


@pytest.mark.parametrize(("members", "milliseconds"), KNOWN.items())
@pytest.mark.parametrize("queue", [False, True])
def test_a_ring_on_one_switch_takes_what_astra_sim_says(
    members: int, milliseconds: float, queue: bool
) -> None:
    found = 1e3 * all_reduce_ring(members, 1.024e9, 50 * 2**30, 500e-9, queue=queue)
    assert found == pytest.approx(milliseconds, rel=1e-3)


@pytest.mark.slow
def test_the_largest_ring_of_them() -> None:
    both = [1e3 * all_reduce_ring(4096, 1.024e9, 50 * 2**30, 500e-9, queue=q) for q in (0, 1)]
    assert both == pytest.approx([84.5, 84.5], rel=1e-3)


def plain_queue(ring: MessageRing) -> float:
    """Return the end, by a heap and in few words."""
    members, hops = ring.links.shape
    free = np.zeros(len(ring.rates))
    left, came = np.full((2, members, ring.rounds), np.nan)
    events = [(0.0, i, 0, 0) for i in range(members)]  # when, member, round, hop
    started, end = [0] * members, 0.0
    heapq.heapify(events)
    while events:
        now, i, turn, hop = heapq.heappop(events)
        link = ring.links[i, hop] if hop < hops else -1
        touched = i
        if link >= 0:
            free[link] = max(now, free[link]) + ring.message_bytes / ring.rates[link]
            if hop == 0:
                left[i, turn] = free[link]
            heapq.heappush(events, (free[link] + ring.latencies[link], i, turn, hop + 1))
        else:
            touched = (i + 1) % members
            came[touched, turn] = end = max(end, now)
        here = started[touched]
        if here + 1 < ring.rounds and not np.isnan(left[touched, here] + came[touched, here]):
            started[touched] += 1
            at = max(left[touched, here], came[touched, here])
            heapq.heappush(events, (at, touched, here + 1, 0))
    return end


@pytest.mark.parametrize("seed", range(6))
def test_shared_links_of_unlike_rates_are_served_in_order(seed: int) -> None:
    dice = np.random.default_rng(seed)
    members, links = 7, 9
    ring = MessageRing(
        rounds=40, message_bytes=1e6,
        links=np.stack([dice.permutation(links)[:3] for _ in range(members)]),
        rates=dice.uniform(1e9, 2e10, links), latencies=dice.uniform(1e-7, 3e-5, links),
    )  # fmt: skip
    assert ring.shares_links
    assert ring_seconds(ring) == pytest.approx(plain_queue(ring), rel=1e-9)
    with pytest.raises(ValueError, match="edges share links"):
        ring_seconds(ring, queue=False)


def test_unlike_edges_that_share_nothing_follow_a_recurrence() -> None:
    dice = np.random.default_rng(9)
    ring = MessageRing(
        rounds=30, message_bytes=1e6, links=np.arange(10).reshape(5, 2),
        rates=dice.uniform(1e9, 2e10, 10), latencies=dice.uniform(1e-7, 3e-5, 10),
    )  # fmt: skip
    assert ring_seconds(ring) == pytest.approx(plain_queue(ring), rel=1e-9)
    assert ring_seconds(ring, queue=True) == pytest.approx(plain_queue(ring), rel=1e-9)
    with pytest.raises(ValueError, match="two members, a round and bytes"):
        MessageRing(rounds=0, message_bytes=1.0, links=ring.links, rates=ring.rates,
                    latencies=ring.latencies)  # fmt: skip
