"""How two chips of a cluster reach each other.

Owns `Position`, `Link` and the rules that turn nodes and fabric into one link per pair. A link is
what the pair sees when the network is otherwise idle, plus what it must share when it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from tutti.errors import InputError
from tutti.hardware.fabric import CrossKind, CrossLink, Fabric
from tutti.hardware.leaves import meeting_tier
from tutti.hardware.pool import Pool

# Copy to host memory, wake the forwarder, copy back: assumed until a profile measures it.
HOST_FORWARD_LATENCY_S = 20e-6
HOST_FORWARD_NIC_FRACTION = 0.5


class Network(Protocol):
    """What of a cluster its links follow from."""

    @property
    def fabric(self) -> Fabric:
        """What joins nodes."""

    def pool(self, name: str) -> Pool:
        """Return one of its pools."""

    def cross_link(self, first: str, second: str) -> CrossLink:
        """Return what joins two pools."""


class Position(NamedTuple):
    """A chip's place, written "pool/node/slot"; nodes and slots count from 0."""

    pool: str
    node: int
    slot: int

    def __str__(self) -> str:
        return f"{self.pool}/{self.node}/{self.slot}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read "a800/3/5"."""
        pool, *numbers = text.split("/")
        if len(numbers) != 2 or not all(n.isascii() and n.isdecimal() for n in numbers):
            raise InputError(f"'{text}' is no chip; write it as pool/node/slot, such as 'a800/0/7'")
        if any(len(n) > 12 for n in numbers):
            raise InputError(f"'{text[:40]}…' is no chip; its numbers are too large")
        return cls(pool, int(numbers[0]), int(numbers[1]))


class LinkKind(StrEnum):
    """Where two chips meet, nearest first."""

    SELF = "self"
    ISLAND = "island"
    NODE = "node"
    RAIL = "rail"
    FABRIC = "fabric"
    CROSS_POOL = "cross_pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way from one chip to another. Bandwidths are bytes per second and direction."""

    kind: LinkKind
    medium: str
    """"NVLink", "PCIe", the tier at which they meet, …"""
    latency_s: float
    bandwidth: float
    """Of this pair, everything else idle."""
    chip_bandwidth: float
    """A chip's fair share over links of this kind when all its node's chips talk at once."""
    oversubscription: float = 1.0
    """By how much the fabric divides `chip_bandwidth` when everybody crosses it at once."""
    host_forwarded: bool = False

    @property
    def contended_bandwidth(self) -> float:
        """A chip's share when all chips use links of this kind at once."""
        return self.chip_bandwidth / self.oversubscription


def link_between(cluster: Network, first: Position, second: Position) -> Link:
    """Return the link between two chips; an InputError if one does not exist."""
    home, away = _pool_of(cluster, first), _pool_of(cluster, second)
    if home.name != away.name:
        return _cross_pool(cluster, home, away, first, second)
    if first.node != second.node:
        return _between_nodes(cluster, home, first, second)
    return _inside_node(home, first.slot, second.slot)


def _pool_of(cluster: Network, position: Position) -> Pool:
    pool = cluster.pool(position.pool)
    for what, number, limit in (
        ("node", position.node, pool.nodes),
        ("slot", position.slot, pool.node.num_chips),
    ):
        if not 0 <= number < limit:
            raise InputError(
                f"chip '{Position(*position)}': {what} {number} does not exist; "
                f"pool '{pool.name}' has {what}s 0-{limit - 1}"
            )
    return pool


def _inside_node(pool: Pool, first: int, second: int) -> Link:
    node = pool.node
    if first == second:
        rate = node.chip.memory_bandwidth
        return Link(
            kind=LinkKind.SELF, medium="memory", latency_s=0.0, bandwidth=rate, chip_bandwidth=rate
        )
    island = node.island_of(first)
    if island is not None and second in island.slots:
        return Link(
            kind=LinkKind.ISLAND,
            medium=island.kind,
            latency_s=island.latency_s,
            bandwidth=island.between_pair,
            chip_bandwidth=island.bandwidth,
        )
    bridge = node.effective_bridge
    return Link(
        kind=LinkKind.NODE,
        medium=bridge.kind,
        latency_s=bridge.latency_s,
        bandwidth=bridge.bandwidth,
        chip_bandwidth=bridge.bandwidth,
    )


def _between_nodes(cluster: Network, pool: Pool, first: Position, second: Position) -> Link:
    fabric, node = cluster.fabric, pool.node
    same_rail = bool(node.rails_of(first.slot) & node.rails_of(second.slot))
    lowest = 0
    if fabric.rail_optimized and not same_rail:
        lowest = min(1, len(fabric.tiers) - 1)
    meet = meeting_tier(fabric, pool, first.node, pool, second.node, lowest)
    tier = fabric.tiers[meet]
    on_rail = fabric.rail_optimized and same_rail and meet == 0
    return Link(
        kind=LinkKind.RAIL if on_rail else LinkKind.FABRIC,
        medium=tier.name,
        latency_s=tier.latency_s,
        bandwidth=min(node.nic_port_rate(first.slot), node.nic_port_rate(second.slot)),
        chip_bandwidth=min(node.nic_rate(first.slot), node.nic_rate(second.slot)),
        oversubscription=fabric.oversubscription_to(meet),
    )


def default_cross_link(home: Pool, away: Pool) -> CrossLink:
    """Return what is assumed of two pools without a link: one vendor direct, others forwarded."""
    if home.chip.vendor.casefold() == away.chip.vendor.casefold():
        return CrossLink(pools=(home.name, away.name))
    return CrossLink(pools=(home.name, away.name), kind=CrossKind.HOST_FORWARDED)


def _cross_pool(cluster: Network, home: Pool, away: Pool, start: Position, end: Position) -> Link:
    fabric, cross = cluster.fabric, cluster.cross_link(home.name, away.name)
    first, second = start.slot, end.slot
    meet = meeting_tier(fabric, home, start.node, away, end.node)
    tier = fabric.tiers[meet]
    forwarded = cross.kind is CrossKind.HOST_FORWARDED
    pair = _cross_bandwidth(
        cross, home, away, home.node.nic_port_rate(first), away.node.nic_port_rate(second)
    )
    share = _cross_bandwidth(
        cross, home, away, home.node.nic_rate(first), away.node.nic_rate(second)
    )
    latency = cross.latency_s
    if latency is None:
        latency = 0.0 if cross.same_host else tier.latency_s
        latency += HOST_FORWARD_LATENCY_S if forwarded else 0.0
    return Link(
        kind=LinkKind.CROSS_POOL,
        medium="shared memory" if cross.same_host else tier.name,
        latency_s=latency,
        bandwidth=pair,
        chip_bandwidth=share,
        oversubscription=1.0 if cross.same_host else fabric.oversubscription_to(meet),
        host_forwarded=forwarded,
    )


def _cross_bandwidth(
    cross: CrossLink, home: Pool, away: Pool, home_nic: float, away_nic: float
) -> float:
    if cross.bandwidth is not None:
        return cross.bandwidth
    rate = min(home_nic, away_nic)
    if cross.kind is CrossKind.HOST_FORWARDED:
        fraction = cross.nic_fraction or HOST_FORWARD_NIC_FRACTION
        copies = min(home.node.host.device_bandwidth, away.node.host.device_bandwidth)
        return min(rate * fraction, copies)
    return rate * (cross.nic_fraction or 1.0)
