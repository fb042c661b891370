"""Reach: the ports, limits and ways up that the ranks of a group share on their fabric.

Where a fabric's tiers let less through than hangs below them, or hashes crowd connections, a price
per pair of chips is not enough: what counts is how much a program puts on each tier. Here is what
of the wiring a group needs for that; clusters whose tiers never limit anybody have none.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tutti.cost.network.cluster_key import ClusterKey
from tutti.fabric.balance import balance
from tutti.fabric.wiring import Floats, Integers, Wiring, wire
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossKind, Fabric, Routing
from tutti.hardware.topology import Position
from tutti.plan.chips import ChipSet


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Uplinks:
    """Ports of nodes, or the ways up from one tier, as the seats of a group share them."""

    regions: Integers  # of each seat
    rates: Floats  # of each region: bytes per second, up or down
    crowds: Floats  # of each region: all chips that cross there ÷ those of this group
    links: int  # that a hash chooses among: a switch's cables


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What the seats of a group share; equal where all of it is."""

    content: bytes  # of all arrays below: what tells two apart
    nodes: Integers = field(compare=False)
    islands: Integers = field(compare=False)
    pools: Integers = field(compare=False)
    native: Floats = field(compare=False)  # bytes per second of each seat's native links
    bridge: Floats = field(compare=False)
    caps: Floats = field(compare=False)  # pool × pool: what a chip may send there at most
    uplinks: tuple[Uplinks, ...] = field(compare=False)
    forwarded: npt.NDArray[np.bool_] = field(compare=False)  # pool × pool: by hosts' memory
    routing: Routing
    connections: int

    def forwarding_at(self, rate: float) -> Reach:
        """Return the reach with what hosts forward limited to a rate per chip."""
        caps = np.where(self.forwarded, np.minimum(self.caps, rate), self.caps)
        return replace(self, caps=caps, content=self.content + caps.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Crossers:
    """How many chips of a plan send over each set of ports, and over each bundle of a tier."""

    counts: tuple[Integers, ...]


class Limits:
    """A cluster's wiring, as far as its tiers limit anybody."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        chips = wiring.chip_ports
        ports = np.where(chips >= 0, chips, chips[:, :1])  # a chip's first port stands in
        self.tiers = [index for index in range(len(wiring.layers)) if _limits(wiring, index)]
        first, keep = _ports(ports), self.tiers
        groups, bundles = _groups(wiring, ports[:, 0]), _bundles(wiring, ports)
        # ports come first, then the tiers that limit
        self._bundles = [first, *(bundles[tier] for tier in keep)]  # chip × port
        self._groups = [wiring.chip_node, *(groups[tier] for tier in keep)]
        self._bundle_rates = [_port_rates(wiring, ports, first), *_tier_rates(wiring, keep)]
        self._caps, self._forwarded = _caps(wiring)
        base, many = wiring.island_out, wiring.num_chips
        self._native = wiring.rates[base : base + many]
        base = wiring.bridge_out
        self._bridge = wiring.rates[base : base + many]

    def caps_between(self, pools: Collection[str] | None) -> bool:
        """Tell whether links between some pools, or any, let less through than the NICs."""
        known = enumerate(self.wiring.cluster.pools)
        rows = [i for i, pool in known if pools is None or pool.name in pools]
        return bool(np.isfinite(self._caps[np.ix_(rows, rows)]).any())

    def _region(self, layer: int, chips: Integers) -> Integers:
        """Return what tells chips apart above which traffic between them goes."""
        leaves = layer > 0 and self.tiers[layer - 1] == 0
        by_switch = layer == 0 or (leaves and not self.wiring.fabric.rail_only)
        regions: Integers
        regions = self._bundles[layer][chips, 0] if by_switch else self._groups[layer][chips]
        return regions

    def reach(self, chips: Sequence[Position], crossers: Crossers | None) -> Reach:
        """Return what some chips share, in their order."""
        wiring = self.wiring
        numbers = np.array([wiring.chip(chip) for chip in chips], dtype=np.int64)
        uplinks = tuple(
            self._uplinks(layer, numbers, None if crossers is None else crossers.counts[layer])
            for layer in range(len(self._bundles))
        )
        fabric, pools = wiring.fabric, wiring.chip_pool[numbers]
        met = np.ix_(*2 * [list(dict.fromkeys(pools.tolist()))])  # whatever the file's order
        arrays = (
            wiring.chip_node[numbers], wiring.chip_island[numbers], _renumbered(pools),
            self._native[numbers], self._bridge[numbers], self._caps[met],
        )  # fmt: skip
        shared = [part for up in uplinks for part in (up.regions, up.rates, up.crowds)]
        told = (_renumbered(arrays[0]), *arrays[2:], *shared)
        content = b"".join(part.tobytes() for part in told)
        nodes, islands, pools, native, bridge, caps = arrays
        return Reach(
            content=content, nodes=nodes, islands=islands, pools=pools, native=native,
            bridge=bridge, caps=caps, uplinks=uplinks, forwarded=self._forwarded[met],
            routing=fabric.routing, connections=fabric.connections,
        )  # fmt: skip

    def _uplinks(self, layer: int, chips: Integers, crossing: Integers | None) -> Uplinks:
        regions = _renumbered(self._region(layer, chips))
        count = int(regions.max()) + 1
        bundles, all_rates = self._bundles[layer][chips], self._bundle_rates[layer]
        rates, crowds = np.zeros(count), np.ones(count)
        own = np.bincount(bundles[:, 0], minlength=len(all_rates))
        for region in range(count):
            used = np.unique(bundles[regions == region])
            rates[region] = all_rates[used].sum()
            if crossing is not None:
                crowds[region] = max(1.0, crossing[used].sum() / max(own[used].sum(), 1))
        return Uplinks(regions=regions, rates=rates, crowds=crowds, links=self._links(layer))

    def crossers(self, parties: Iterable[Iterable[ChipSet]]) -> Crossers:
        """Return how many chips cross each bundle, where each party's chips meet each other."""
        masks = [np.zeros(self.wiring.num_chips, dtype=bool) for _ in self._bundles]
        for party in parties:
            chips = self.numbers(party)
            for mask, groups in zip(masks, self._groups, strict=True):
                own = groups[chips]
                if (own != own[0]).any():
                    mask[chips] = True
        return self._counted(masks)

    def _counted(self, masks: Sequence[npt.NDArray[np.bool_]]) -> Crossers:
        return Crossers(counts=tuple(
            np.bincount(bundles[mask][:, 0], minlength=len(rates))
            for mask, bundles, rates in zip(masks, self._bundles, self._bundle_rates, strict=True)
        ))  # fmt: skip

    def crossers_of_pairs(self, pairs: Iterable[tuple[Integers, Integers]]) -> Crossers:
        """Return how many chips cross each bundle, where chips (by number) send to chips."""
        masks = [np.zeros(self.wiring.num_chips, dtype=bool) for _ in self._bundles]
        for a, b in pairs:
            away = self._groups[0][a] != self._groups[0][b]
            for layer, mask in enumerate(masks):
                apart = away & (self._region(layer, a) != self._region(layer, b))
                mask[a[apart]] = mask[b[apart]] = True
        return self._counted(masks)

    def pair_rate(self, first: Position, second: Position, crossers: Crossers) -> float:
        """Return what a pair on two nodes gets of ports and ways up when all crossers send."""
        a, b = (np.array([self.wiring.chip(chip)]) for chip in (first, second))
        fabric, rate = self.wiring.fabric, np.inf
        for layer, counts in enumerate(crossers.counts):
            if self._region(layer, a)[0] == self._region(layer, b)[0]:
                continue
            links = self._links(layer)
            switches = int(np.count_nonzero(counts))
            for end in (a, b):
                bundle = np.unique(self._bundles[layer][end])
                users = max(1, int(counts[bundle].sum()))
                share = balance(fabric.routing, fabric.connections, users, links, switches)
                rate = min(rate, self._bundle_rates[layer][bundle].sum() * share / users)
        return float(rate)

    def _links(self, layer: int) -> int:
        """Return how many links a hash chooses among."""
        if layer == 0:
            return 1
        known = self.wiring.layers[self.tiers[layer - 1]]
        return known.ways * known.cables

    def numbers(self, sets: Iterable[ChipSet]) -> Integers:
        """Return the numbers of chips, set after set."""
        wiring, numbers = self.wiring, []
        for part in (part for chips in sets for part in chips.ranges):
            first = wiring.first_chip[part.pool]
            width = wiring.cluster.pool(part.pool).node.num_chips
            nodes = np.arange(part.first_node, part.last_node + 1)
            slots = np.arange(part.first_slot, part.last_slot + 1)
            numbers.append((first + nodes[:, None] * width + slots[None, :]).ravel())
        return np.concatenate(numbers)


def _renumbered(values: Integers) -> Integers:
    """Return the values counted in the order in which they come first."""
    _, first, index = np.unique(values, return_index=True, return_inverse=True)
    numbers: Integers = np.argsort(np.argsort(first))[index.reshape(-1)]
    return numbers


def _ports(ports: Integers) -> Integers:
    """Return the number of each chip's set of ports, as a column."""
    _, index = np.unique(np.sort(ports, axis=1), axis=0, return_inverse=True)
    return index.reshape(-1, 1)


def _port_rates(wiring: Wiring, ports: Integers, sets: Integers) -> Floats:
    """Return what each set of ports carries."""
    rates = np.zeros(int(sets.max()) + 1)
    _, first = np.unique(sets[:, 0], return_index=True)
    for number, chip in enumerate(first.tolist()):
        rates[number] = wiring.rates[np.unique(ports[chip])].sum()
    return rates


def _tier_rates(wiring: Wiring, tiers: Sequence[int]) -> list[Floats]:
    layers = [wiring.layers[tier] for tier in tiers]
    return [wiring.rates[layer.bundle_up : layer.bundle_down] for layer in layers]


def _groups(wiring: Wiring, ports: Integers) -> list[Integers]:
    """Return, per tier below the top, the number of the group that each chip hangs under."""
    group = wiring.port_leaf[ports] // wiring.switches_per_group[0]
    groups = []
    for parent in wiring.group_parent:
        groups.append(group)
        group = parent[group]
    return groups


def _bundles(wiring: Wiring, ports: Integers) -> list[Integers]:
    """Return, per layer of links, the bundle that each chip's ports go up by."""
    bundles = []
    group = wiring.port_leaf[ports] // wiring.switches_per_group[0]
    for index, parent in enumerate(wiring.group_parent):
        leaves = wiring.port_leaf[ports]
        bundles.append(leaves if index == 0 else group * wiring.lanes + wiring.port_lane[ports])
        group = parent[group]
    return bundles


def _limits(wiring: Wiring, index: int) -> bool:
    """Tell whether a layer of links can be what traffic waits for."""
    if wiring.fabric.routing is not Routing.SPRAY:
        return True
    layer = wiring.layers[index]
    bundles = layer.bundle_down - layer.bundle_up
    rates = wiring.rates[layer.bundle_up : layer.bundle_up + bundles]
    offered = np.zeros(bundles)
    if index == 0:
        np.add.at(offered, wiring.port_leaf, wiring.rates[: wiring.num_ports])
    else:
        below = wiring.layers[index - 1]
        lower = below.bundle_down - below.bundle_up
        per_group = lower // len(wiring.group_parent[index - 1])
        group = np.arange(lower) // per_group
        lane = np.arange(lower) % wiring.lanes
        target = wiring.group_parent[index - 1][group] * wiring.lanes + lane
        np.add.at(offered, target, wiring.rates[below.bundle_up : below.bundle_up + lower])
    return bool((rates < offered * (1.0 - 1e-9)).any())


def _caps(wiring: Wiring) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return what chips may send to each other pool at most, and whether hosts forward it."""
    cluster = wiring.cluster
    caps = np.full((len(cluster.pools), len(cluster.pools)), np.inf)
    by_host = np.zeros(caps.shape, dtype=np.bool_)
    for i, home in enumerate(cluster.pools):
        for j, away in enumerate(cluster.pools):
            if i != j:
                cross = cluster.cross_link(home.name, away.name)
                forwarded = by_host[i, j] = cross.kind is CrossKind.HOST_FORWARDED
                if forwarded or cross.bandwidth is not None or cross.nic_fraction is not None:
                    ends = (Position(home.name, 0, 0), Position(away.name, 0, 0))
                    caps[i, j] = cluster.link(*ends).chip_bandwidth
    return caps, by_host


def may_limit(fabric: Fabric) -> bool:
    """Tell whether the tiers of a fabric may let less through than hangs below them."""
    if len(fabric.tiers) < 2:
        return False
    narrow = any(tier.oversubscription > 1.0 for tier in fabric.tiers[1:])
    counted = any(tier.ports is not None or tier.port_rate is not None for tier in fabric.tiers)
    return narrow or counted or fabric.routing is not Routing.SPRAY


def limits_of(cluster: Cluster) -> Limits | None:
    """Return what a cluster's tiers limit, worked out once; None: nothing."""
    return _known_limits(ClusterKey(cluster)) if may_limit(cluster.fabric) else None


def group_limits(cluster: Cluster, pools: Collection[str] | None = None) -> Limits | None:
    """Return what limits groups: tiers, or what links between some pools let through."""
    tiers = limits_of(cluster)
    if tiers is not None or len(cluster.pools if pools is None else pools) < 2:
        return tiers
    limits = _wired_limits(ClusterKey(cluster))
    return limits if limits is not None and limits.caps_between(pools) else None


def bridged_limits(cluster: Cluster) -> Limits | None:
    """Return the wiring where it limits nobody, but nodes have islands with bridges between."""
    return _wired_limits(ClusterKey(cluster))


@functools.lru_cache(maxsize=64)
def _known_limits(key: ClusterKey) -> Limits | None:
    limits = _wired_limits(key)
    return limits if limits is not None and limits.tiers else None


@functools.lru_cache(maxsize=64)
def _wired_limits(key: ClusterKey) -> Limits | None:
    cluster = key.cluster
    if any(link.same_host for link in cluster.fabric.links):
        return None  # pools of one machine: nothing crosses a network
    return Limits(wire(cluster))
