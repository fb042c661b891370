"""Seconds of a stage boundary: what travels between two stages for one micro-batch.

Both ends bound a transfer: what the busiest sender puts on its link, and what the busiest receiver
takes from its own. Ranks of one replica group do alike, so the first and the last copy of each
group stand for all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from tutti.cost.links import link_of
from tutti.cost.programs import Efficiency
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import LinkKind
from tutti.plan.plan import Stage
from tutti.schedule.boundary import Boundary, Transfer


class BoundaryPrice(NamedTuple):
    """How long one micro-batch's tensor takes, and whether any of it leaves a node."""

    seconds: float
    leaves_node: bool


def boundary_seconds(
    wire: Boundary, cluster: Cluster, token_bytes: float, efficiency: Efficiency
) -> float:
    """Return how long one micro-batch's tensor takes; `token_bytes` is hidden · element size."""
    return boundary_price(wire, cluster, token_bytes, efficiency).seconds


def boundary_price(
    wire: Boundary,
    cluster: Cluster,
    token_bytes: float,
    efficiency: Efficiency,
    *,
    host_bandwidth: float = math.inf,
) -> BoundaryPrice:
    """Price a boundary; what passes through host memory has at most `host_bandwidth` there."""
    senders, receivers = wire.sender.chips, wire.receiver.chips
    seconds, leaves = 0.0, False
    for transfers in telling_transfers(wire):
        latency = 0.0
        busy: dict[str, float] = defaultdict(float)
        for sender, receiver, batch, sequence in transfers:
            link = link_of(cluster, senders.at(sender), receivers.at(receiver))
            inside = link.kind in (LinkKind.SELF, LinkKind.ISLAND, LinkKind.NODE)
            leaves = leaves or not inside
            share = efficiency.island if inside else efficiency.fabric
            moved = (batch[1] - batch[0]) * (sequence[1] - sequence[0]) * token_bytes
            rate = link.contended_bandwidth
            if link.host_forwarded:
                rate = min(rate, host_bandwidth)
            busy[link.kind] += moved / (rate * share)
            extra = efficiency.startup_s if inside else efficiency.hop_s
            latency = max(latency, link.latency_s + extra)
        seconds = max(seconds, latency + sum(busy.values()))
    return BoundaryPrice(seconds, leaves)


def telling_transfers(wire: Boundary) -> Iterator[list[Transfer]]:
    """Yield what each rank that stands for others sends, then what each receives."""
    for rank in _telling_ranks(wire.sender):
        yield wire.from_rank(rank)
    for rank in _telling_ranks(wire.receiver):
        yield wire.to_rank(rank)


def _telling_ranks(stage: Stage) -> Iterator[int]:
    """The ranks of the first and the last copy of each replica group."""
    first = 0
    for replica in stage.replicas:
        starts = {first, first + replica.num_chips - replica.width}
        for start in sorted(starts):
            yield from range(start, start + replica.width)
        first += replica.num_chips
