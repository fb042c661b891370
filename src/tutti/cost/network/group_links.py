"""From chips of a cluster to the group of a collective and the links that it runs over.

A group's islands are its chips that share native links. Per kind of edge the *slowest* link that
a pair of its ranks can meet is taken: rings and exchanges run at the pace of their slowest edge.
Where the fabric's tiers limit what crosses them, or nodes have bridges between islands, the group's
reach says what its ranks share.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tutti.collective.group import Edge, Group, Island
from tutti.cost.network.cluster_key import ClusterKey
from tutti.cost.network.reach import Crossers, Reach, bridged_limits, group_limits
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Link, Position
from tutti.plan.chips import ChipSet

_FEW = 16  # islands of which every pair is looked at
_BRIDGED = 10  # nodes; of an exchange over more, less than a tenth takes the bridges


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The α and β of one kind of edge, contention of the whole group included."""

    latency_s: float
    bandwidth: float  # bytes per second, direction and chip
    host_forwarded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLinks:
    """A group and what its edges are made of; an edge that no pair has is absent."""

    group: Group
    wires: tuple[tuple[Edge, Wire], ...]
    pools: tuple[str, ...] = ()  # whose chips take part, in the order of `_place`
    nodes: int = 1
    rates: tuple[float, ...] = ()  # bytes per second of each seat's share of its NIC, where known
    reach: Reach | None = None  # what seats share, where the fabric's tiers limit anybody

    def wire(self, edge: Edge) -> Wire:
        """Return the wire of a kind of edge; the fabric's slowest where no pair of it was seen."""
        known = dict(self.wires)
        if edge in known:
            return known[edge]
        fabric = [wire for kind, wire in self.wires if kind is not Edge.ISLAND] or [*known.values()]
        return min(fabric, key=lambda wire: wire.bandwidth)


def group_links(
    cluster: Cluster, chips: Iterable[Position], crossers: Crossers | None = None
) -> GroupLinks:
    """Return the group of the given chips; ranks are numbered in their order.

    `crossers` are the chips of a whole plan that cross the fabric's tiers at the same time.
    """
    islands: dict[tuple[str, int, int], list[tuple[int, Position]]] = {}
    for rank, chip in enumerate(chips):
        island = _island_number(cluster, chip)
        islands.setdefault((chip.pool, chip.node, island), []).append((rank, chip))
    # Equal islands side by side, so that a ring crosses between pools as rarely as it can.
    places = {name: _place(cluster, name) for name in {key[0] for key in islands}}
    order = sorted(islands, key=lambda key: (places[key[0]], key[1], key[2]))
    group = Group(
        tuple(
            Island(
                ranks=tuple(rank for rank, _ in islands[key]),
                rails=tuple(chip.slot for _, chip in islands[key]),
            )
            for key in order
        )
    )
    members = [[chip for _, chip in islands[key]] for key in order]
    wires = {edge: _slowest(links) for edge, links in _edge_links(cluster, members) if links}
    limits = group_limits(cluster, places) if len(members) > 1 else None
    if limits is None and _is_bridged(order):
        limits = bridged_limits(cluster)
        if limits is not None and crossers is None:
            crossers = limits.crossers([_nodes(cluster, order)])
    seats = [chip for island in members for chip in island]
    return GroupLinks(
        group=group,
        wires=tuple(wires.items()),
        pools=tuple(dict.fromkeys(pool for pool, _, _ in order)),
        nodes=len({key[:2] for key in order}),
        reach=None if limits is None else limits.reach(seats, crossers),
    )


def _is_bridged(islands: Sequence[tuple[str, int, int]]) -> bool:
    """Tell whether enough of a group's edges stay in a node, but not in an island, to matter.

    They take the node's bridge, others the NICs; a kind of edge does not tell one from the other.
    """
    nodes = {key[:2] for key in islands}
    return 1 < len(nodes) < len(islands) and len(nodes) <= _BRIDGED


def _nodes(cluster: Cluster, islands: Sequence[tuple[str, int, int]]) -> list[ChipSet]:
    """Return all chips of the nodes of some islands: they share their NICs."""
    nodes = {key[:2]: cluster.pool(key[0]).node.num_chips for key in islands}
    return [ChipSet.from_ids([
        Position(pool, node, slot) for (pool, node), count in nodes.items() for slot in range(count)
    ])]  # fmt: skip


def num_islands(cluster: Cluster, chips: Iterable[Position]) -> int:
    """Return over how many islands chips are spread."""
    return len({(chip.pool, chip.node, _island_number(cluster, chip)) for chip in chips})


def _place(cluster: Cluster, name: str) -> tuple[object, ...]:
    """Return what orders pools: what they are, so that a price depends on no file's order."""
    number, pool = next((i, pool) for i, pool in enumerate(cluster.pools) if pool.name == name)
    node = pool.node
    return (pool.chip.name, node.num_chips, node.nic_bandwidth, -pool.nodes, number)


def _island_number(cluster: Cluster, chip: Position) -> int:
    """Return the number of a chip's island in its node; a chip without one is its own."""
    islands = cluster.pool(chip.pool).node.islands
    for number, island in enumerate(islands):
        if chip.slot in island.slots:
            return number
    return len(islands) + chip.slot


def _edge_links(
    cluster: Cluster, members: Sequence[Sequence[Position]]
) -> list[tuple[Edge, list[Link]]]:
    inside = [
        link_of(cluster, island[0], island[-1]) for island in _distinct(members) if len(island) > 1
    ]
    rail: list[Link] = []
    cross: list[Link] = []
    for a, b in _telling_pairs(members):
        slots = {chip.slot: chip for chip in b}
        alike = next(((chip, slots[chip.slot]) for chip in a if chip.slot in slots), None)
        unlike = next(((c, d) for c in a[:2] for d in (b[-1], b[0]) if c.slot != d.slot), None)
        if alike is not None:
            rail.append(link_of(cluster, *alike))
        if unlike is not None:
            cross.append(link_of(cluster, *unlike))
    return [(Edge.ISLAND, inside), (Edge.RAIL, rail), (Edge.CROSS, cross)]


def _distinct(members: Sequence[Sequence[Position]]) -> list[Sequence[Position]]:
    """Islands of one pool with the same slots are alike."""
    return list({(i[0].pool, tuple(c.slot for c in i)): i for i in members}.values())


def _telling_pairs(
    members: Sequence[Sequence[Position]],
) -> list[tuple[Sequence[Position], Sequence[Position]]]:
    """Pairs of islands among which the slowest link of the group is.

    All pairs of a small group; of a large one neighbours, the ends, and one pair of each two pools.
    """
    if len(members) <= _FEW:
        return list(itertools.combinations(members, 2))
    by_pool: dict[str, list[Sequence[Position]]] = {}
    for island in members:
        by_pool.setdefault(island[0].pool, []).append(island)
    pairs = []
    for same in by_pool.values():
        alike = [island for island in same if island[0].slot == same[0][0].slot]
        pairs += [(same[0], other) for other in (same[1:2] + same[-1:] + alike[1:2] + alike[-1:])]
    pairs += [(a[0], b[0]) for a, b in itertools.combinations(by_pool.values(), 2)]
    return [(a, b) for a, b in pairs if a is not b]


@functools.lru_cache(maxsize=65536)
def _remembered(cluster: ClusterKey, first: Position, second: Position) -> Link:
    return cluster.cluster.link(first, second)


def link_of(cluster: Cluster, first: Position, second: Position) -> Link:
    """Return the link between two chips, remembered."""
    return _remembered(ClusterKey(cluster), first, second)


def _slowest(links: Sequence[Link]) -> Wire:
    return Wire(
        latency_s=max(link.latency_s for link in links),
        bandwidth=min(link.contended_bandwidth for link in links),
        host_forwarded=any(link.host_forwarded for link in links),
    )
