"""Seconds of a stage boundary: what travels between two stages for one micro-batch.

Both ends bound a transfer: what the busiest sender puts on its link, and what the busiest receiver
takes from its own. Ranks of one replica group do alike, so the first and the last copy of each
group stand for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tutti.cost.links import link_of
from tutti.cost.programs import Efficiency
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import LinkKind
from tutti.plan.plan import Stage
from tutti.schedule.boundary import Boundary, Transfer


def boundary_seconds(
    wire: Boundary, cluster: Cluster, token_bytes: float, efficiency: Efficiency
) -> float:
    """Return how long one micro-batch's tensor takes; `token_bytes` is hidden · element size."""
    senders, receivers = wire.sender.chips, wire.receiver.chips
    seconds = 0.0
    for transfers in _telling_transfers(wire):
        latency = 0.0
        busy: dict[str, float] = defaultdict(float)
        for sender, receiver, batch, sequence in transfers:
            link = link_of(cluster, senders.at(sender), receivers.at(receiver))
            inside = link.kind in (LinkKind.SELF, LinkKind.ISLAND, LinkKind.NODE)
            share = efficiency.island if inside else efficiency.fabric
            moved = (batch[1] - batch[0]) * (sequence[1] - sequence[0]) * token_bytes
            busy[link.kind] += moved / (link.contended_bandwidth * share)
            extra = efficiency.startup_s if inside else efficiency.hop_s
            latency = max(latency, link.latency_s + extra)
        seconds = max(seconds, latency + sum(busy.values()))
    return seconds


def _telling_transfers(wire: Boundary) -> Iterator[list[Transfer]]:
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
