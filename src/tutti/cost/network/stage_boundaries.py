"""Seconds of a stage boundary: what travels between two stages for one micro-batch.

Both ends bound a transfer: what the busiest sender puts on its link, and what the busiest receiver
takes from its own. Ranks of one replica group do alike, so the first and the last copy of each
group stand for all. Plans that are compared share most of their boundaries: prices are remembered.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tutti.cost.network.cluster_key import ClusterKey
from tutti.cost.network.group_links import link_of
from tutti.cost.network.program_choice import Efficiency
from tutti.cost.network.reach import Limits
from tutti.fabric.wiring import Integers
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Link, LinkKind, Position
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Replica, Stage
from tutti.schedule.boundary import Boundary, Transfer, alike_copies

_MANY = 256  # ranks of a side that are asked one by one what they send
_KEPT = 1024  # boundaries whose price is remembered
_KINDS = 256  # of boundaries, whose transfers are
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
    shared: SharedTiers | None = None,
) -> BoundaryPrice:
    """Price a boundary; what passes through host memory has at most `host_bandwidth` there.

    `shared` says what a pair gets of tiers that limit; where there is none, everybody crosses.
    """
    return _remembered(
        _WireKey(wire), wire.sender.chips, wire.receiver.chips, ClusterKey(cluster), token_bytes,
        efficiency, host_bandwidth, shared,
    )  # fmt: skip


class _WireKey:
    """A boundary as a dictionary key: equal to those over which the same ranks send the same."""

    __slots__ = ("_shapes", "wire")

    def __init__(self, wire: Boundary) -> None:
        self.wire = wire
        sides = (wire.sender, wire.receiver)
        ends = (tuple((_shape(r), r.count) for r in side.replicas) for side in sides)
        self._shapes = (*ends, wire.sequence_length)

    def __hash__(self) -> int:
        return hash(self._shapes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _WireKey) and other._shapes == self._shapes


@functools.lru_cache(maxsize=_KEPT)
def _remembered(
    key: _WireKey,
    senders: ChipSet,
    receivers: ChipSet,
    known: ClusterKey,
    token_bytes: float,
    efficiency: Efficiency,
    host_bandwidth: float,
    shared: SharedTiers | None,
) -> BoundaryPrice:
    seconds, leaves = 0.0, False
    for transfers in _told(key):
        latency = 0.0
        busy: dict[str, float] = defaultdict(float)
        for sender, receiver, batch, sequence in transfers:
            link = link_of(known.cluster, senders.at(sender), receivers.at(receiver))
            inside = link.kind in (LinkKind.SELF, LinkKind.ISLAND, LinkKind.NODE)
            leaves = leaves or not inside
            share = efficiency.island if inside else efficiency.fabric
            moved = (batch[1] - batch[0]) * (sequence[1] - sequence[0]) * token_bytes
            rate = link.contended_bandwidth
            if shared is not None and not inside:
                rate = shared.rate(link, senders.at(sender), receivers.at(receiver))
            if link.host_forwarded:
                rate = min(rate, host_bandwidth)
            busy[link.kind] += moved / (rate * share)
            extra = efficiency.startup_s if inside else efficiency.hop_s
            latency = max(latency, link.latency_s + extra)
        seconds = max(seconds, latency + sum(busy.values()))
    return BoundaryPrice(seconds, leaves)


class SharedTiers:
    """What the boundaries of one plan share of the fabric's tiers, all under way at once."""

    def __init__(self, limits: Limits, boundaries: Iterable[Boundary]) -> None:
        self._limits = limits
        self._crossers = limits.crossers_of_pairs(_chip_pairs(limits, wire) for wire in boundaries)
        self._key = (id(limits), *(counts.tobytes() for counts in self._crossers.counts))
        self._known: dict[tuple[Position, Position], float] = {}

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedTiers) and other._key == self._key

    def rate(self, link: Link, first: Position, second: Position) -> float:
        """Return the bytes per second of a pair of chips on two nodes."""
        if (first, second) not in self._known:
            rate = self._limits.pair_rate(first, second, self._crossers)
            if link.kind is LinkKind.CROSS_POOL:
                rate = min(rate, link.chip_bandwidth)
            self._known[first, second] = rate
        return self._known[first, second]


def _chip_pairs(limits: Limits, wire: Boundary) -> tuple[Integers, Integers]:
    """Return who sends to whom, as numbers of chips; copies that are alike are not asked twice."""
    here, there = (limits.numbers([side.chips]) for side in (wire.sender, wire.receiver))
    copies, own, other = alike_copies(wire)
    ranks = range(wire.sender.num_chips // copies)
    if len(ranks) > _MANY:  # unlike copies: the batch lies over both sides in their order
        longer = np.arange(max(len(here), len(there)))
        return here[longer * len(here) // len(longer)], there[longer * len(there) // len(longer)]
    rows = [(sender, receiver) for rank in ranks for sender, receiver, _, _ in wire.from_rank(rank)]
    table = np.array(rows, dtype=np.int64).reshape(-1, 2)
    steps = np.arange(copies)[:, None]
    return here[(table[:, 0] + steps * own).ravel()], there[(table[:, 1] + steps * other).ravel()]


def telling_transfers(wire: Boundary) -> Iterator[list[Transfer]]:
    """Yield what each rank that stands for others sends, then what each receives."""
    yield from _told(_WireKey(wire))


@functools.lru_cache(maxsize=_KINDS)
def _told(key: _WireKey) -> list[list[Transfer]]:
    wire = key.wire
    sent = [wire.from_rank(rank) for rank in _telling_ranks(wire.sender, wire.receiver)]
    return sent + [wire.to_rank(rank) for rank in _telling_ranks(wire.receiver, wire.sender)]


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
