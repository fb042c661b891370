"""Seconds of a stage boundary: what travels between two stages for one micro-batch.

Both ends bound a transfer: what the busiest sender puts on its link, and what the busiest receiver
takes from its own. Ranks of one replica group do alike, so the first and the last copy of each
group stand for all.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from tutti.cost.network.group_links import link_of
from tutti.cost.network.programs import Efficiency
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import LinkKind
from tutti.plan.plan import Replica, Stage
from tutti.schedule.boundary import Boundary, Transfer

# tp, cp, whether sequences are parallel, sequences, pools
_Shape = tuple[int, int, bool, int, tuple[str, ...]]


class BoundaryPrice(NamedTuple):
    """How long one micro-batch's tensor takes, and whether any of it leaves a node."""

    seconds: float
    leaves_node: bool


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
    for rank in _telling_ranks(wire.sender, wire.receiver):
        yield wire.from_rank(rank)
    for rank in _telling_ranks(wire.receiver, wire.sender):
        yield wire.to_rank(rank)


def _telling_ranks(stage: Stage, other: Stage) -> Iterator[int]:
    """The ranks of the first and the last copy of each kind of replica group.

    Groups are of one kind if they are alike and what they meet on the other side is, too.
    """
    opposite = _Opposite(other)
    starts: dict[tuple[_Shape, tuple[object, ...]], list[int]] = {}
    first = sequence = 0
    for replica in stage.replicas:
        for copy in sorted({0, replica.count - 1}):
            begin = sequence + copy * replica.sequences
            key = (_shape(replica), opposite.met_by(begin, begin + replica.sequences))
            starts.setdefault(key, []).append(first + copy * replica.width)
        first += replica.num_chips
        sequence += replica.count * replica.sequences
    for (shape, _), ranks in starts.items():
        for start in sorted({ranks[0], ranks[-1]}):
            yield from range(start, start + shape[0] * shape[1])


def _shape(replica: Replica) -> _Shape:
    pools = replica.chips.pools
    return (replica.tp, replica.cp, replica.sequence_parallel, replica.sequences, pools)


class _Opposite:
    """The other side of a boundary: which groups an interval of the batch meets, and how."""

    def __init__(self, stage: Stage) -> None:
        self._shapes = [_shape(replica) for replica in stage.replicas]
        sizes = [replica.count * replica.sequences for replica in stage.replicas]
        self._starts = [0, *itertools.accumulate(sizes)]

    def met_by(self, begin: int, end: int) -> tuple[object, ...]:
        """Return shape and offset of every group that shares sequences with the interval."""
        index = bisect.bisect_right(self._starts, begin) - 1
        met: list[object] = []
        while index < len(self._shapes) and self._starts[index] < end:
            shape, low = self._shapes[index], max(begin, self._starts[index])
            offset = (low - self._starts[index]) % shape[3]
            met.append((shape, low - begin, offset, self._starts[index + 1] < end))
            index += 1
        return tuple(met)
