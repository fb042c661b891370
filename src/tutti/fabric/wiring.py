"""Wiring: the switches and directed links of a cluster's fabric, as arrays.

A fabric is a folded Clos network. Nodes hang on *leaf groups* (`hardware.leaves`); a group of any
tier has equally many switches, numbered in their *lanes*: the parts that never meet again further
up (planes, and rails where they are kept apart). Switch x of a group has `ways` switches above it,
numbers x·ways … x·ways + ways − 1 of the group's parent, `cables` links to each. A way down is
therefore the way up read backwards, and every link's number follows from arithmetic; no tables.

Links come in this order: ports up, ports down, then per layer of links its cables up and down;
what a switch has upwards as one bundle (for packets that are spread evenly), up and down; and
inside nodes a chip's links out and in, native and over the bridge. Rates are bytes per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import Fabric
from tutti.hardware.leaves import group_of
from tutti.hardware.pool import Pool
from tutti.hardware.topology import Position

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """The links between the switches of one tier and those of the next."""

    switches: int  # of the lower tier, over all groups
    ways: int  # switches above each
    cables: int  # to each of them
    up: int  # the first link's number; a switch's links follow each other, way by way
    down: int  # the same links, downwards
    bundle_up: int  # the first bundle's number; one per lower switch, above tier 0 per lane
    bundle_down: int
    rates: Floats  # of one cable, per lower switch

    @property
    def num_links(self) -> int:
        """Links in one direction."""
        return self.switches * self.ways * self.cables


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wiring:
    """All of a cluster's network, by number."""

    cluster: Cluster
    first_chip: dict[str, int]  # of each pool
    chip_node: Integers  # over all pools
    chip_pool: Integers
    chip_island: Integers  # over all pools, −1: none
    chip_ports: Integers  # chip × most ports, −1 where a chip has fewer
    port_leaf: Integers  # the leaf switch of each port
    port_rail: Integers
    port_lane: Integers
    node_port: Integers  # node × rail: a port there, −1: none
    node_pool: Integers
    node_number: Integers  # in its pool
    group_parent: tuple[Integers, ...]  # per tier but the top: the group above each group
    switches_per_group: tuple[int, ...]
    lanes: int
    layers: tuple[Layer, ...]
    rates: Floats  # of all links
    island_out: int
    bridge_out: int

    @property
    def fabric(self) -> Fabric:
        """What the cluster file says of it."""
        return self.cluster.fabric

    @property
    def num_chips(self) -> int:
        """Chips of all pools."""
        return len(self.chip_node)

    @property
    def num_ports(self) -> int:
        """Ports of all NICs: one per NIC and plane."""
        return len(self.port_leaf)

    @property
    def num_links(self) -> int:
        """Links of all kinds, bundles included."""
        return len(self.rates)

    @property
    def num_switches(self) -> tuple[int, ...]:
        """Switches of each tier."""
        groups = [len(parent) for parent in self.group_parent] + [1]
        return tuple(g * s for g, s in zip(groups, self.switches_per_group, strict=True))

    def chip(self, position: Position) -> int:
        """Return a chip's number."""
        pool = self.cluster.pool(position.pool)
        return self.first_chip[pool.name] + position.node * pool.node.num_chips + position.slot

    def position(self, chip: int) -> Position:
        """Return where a chip is."""
        pool = self.cluster.pools[int(self.chip_pool[chip])]
        number = chip - self.first_chip[pool.name]
        return Position(pool.name, *divmod(number, pool.node.num_chips))

    def leaf_group(self, port: int) -> int:
        """Return the leaf group that a port hangs on."""
        return int(self.port_leaf[port]) // self.switches_per_group[0]


class _Ports:
    """The ports of all NICs while they are being numbered."""

    def __init__(self, cluster: Cluster, rails: int, leaf_groups: list[list[int]]) -> None:
        self.leaf: list[Integers] = []
        self.rail: list[Integers] = []
        self.plane: list[Integers] = []
        self.rate: list[Floats] = []
        self.of_chip: list[Integers] = []
        self.node_port: list[Integers] = []
        self._next = 0
        fabric = cluster.fabric
        for pool, groups in zip(cluster.pools, leaf_groups, strict=True):
            self._pool(pool, np.array(groups, dtype=np.int64), fabric, rails)

    def _pool(self, pool: Pool, groups: Integers, fabric: Fabric, rails: int) -> None:
        planes, nics = fabric.planes, pool.node.nics
        own_rail = np.array(_rails_of(pool), dtype=np.int64)
        rail = np.repeat(own_rail, planes)
        plane = np.tile(np.arange(planes), len(nics))
        rate = np.repeat([nic.rate / planes for nic in nics], planes)
        on = rail if fabric.rail_optimized else np.zeros_like(rail)
        per_group = (rails if fabric.rail_optimized else 1) * planes
        leaf = groups[:, None] * per_group + (on * planes + plane)[None, :]
        number = self._next + np.arange(leaf.size).reshape(leaf.shape)
        self._next += leaf.size
        self.leaf.append(leaf.ravel())
        self.rail.append(np.tile(rail, pool.nodes))
        self.plane.append(np.tile(plane, pool.nodes))
        self.rate.append(np.tile(rate, pool.nodes))
        node_port = np.full((pool.nodes, rails), -1, dtype=np.int64)
        for nic in range(len(nics) - 1, -1, -1):
            node_port[:, own_rail[nic]] = number[:, nic * planes]
        self.node_port.append(node_port)
        wanted = [
            [p for i, nic in enumerate(nics) if not len(nic.slots) or slot in nic.slots
             for p in range(i * planes, (i + 1) * planes)]
            for slot in range(pool.node.num_chips)
        ]  # fmt: skip
        most = max(map(len, wanted), default=0)
        table = np.full((pool.nodes, pool.node.num_chips, most), -1, dtype=np.int64)
        for slot, ports in enumerate(wanted):
            table[:, slot, : len(ports)] = number[:, ports]
        self.of_chip.append(table.reshape(pool.num_chips, most))


def _rails_of(pool: Pool) -> list[int]:
    return [nic.rail if nic.rail is not None else i for i, nic in enumerate(pool.node.nics)]


def _leaf_groups(cluster: Cluster) -> list[list[int]]:
    """Return the leaf group of each node of each pool; pools that name none get further ones."""
    fabric = cluster.fabric
    named = max((max(p.leaves.numbers) + 1 for p in cluster.pools if len(p.leaves)), default=0)
    leaf_of_pool: list[list[int]] = []
    for pool in cluster.pools:
        if len(fabric.tiers) == 1:
            leaf_of_pool.append([0] * pool.nodes)
        elif len(pool.leaves):
            leaf_of_pool.append(list(pool.leaves.numbers))
        else:
            leaf_of_pool.append([named + group_of(fabric, pool, n, 0) for n in range(pool.nodes)])
            named = leaf_of_pool[-1][-1] + 1
    return leaf_of_pool


def _parents(cluster: Cluster, leaf_groups: list[list[int]]) -> list[Integers]:
    """Return, per tier but the top, the group of the next tier that each group belongs to."""
    fabric = cluster.fabric
    if len(fabric.tiers) == 1:
        return []
    above: list[dict[int, int]] = [{} for _ in fabric.tiers[:-1]]
    known: list[dict[object, int]] = [{} for _ in fabric.tiers]
    for pool, groups in zip(cluster.pools, leaf_groups, strict=True):
        own = "" if len(pool.leaves) else pool.name
        for node, leaf in enumerate(groups):
            below = leaf
            for tier in range(1, len(fabric.tiers)):
                key = 0 if tier == len(fabric.tiers) - 1 else (
                    own, group_of(fabric, pool, node, tier)
                )  # fmt: skip
                group = known[tier].setdefault(key, len(known[tier]))
                above[tier - 1][below] = group
                below = group
    sizes = [max(g for groups in leaf_groups for g in groups) + 1, *map(len, known[1:-1])]
    return [
        np.array([table.get(group, 0) for group in range(size)], dtype=np.int64)
        for table, size in zip(above, sizes, strict=True)
    ]


def wire(cluster: Cluster) -> Wiring:
    """Return the wiring of a cluster."""
    fabric = cluster.fabric
    rails = max((rail + 1 for pool in cluster.pools for rail in _rails_of(pool)), default=1)
    groups = _leaf_groups(cluster)
    parents = _parents(cluster, groups)
    ports = _Ports(cluster, rails, groups)
    single = len(fabric.tiers) == 1
    lanes = fabric.planes * (rails if fabric.rail_only else 1)
    per_leaf_group = fabric.planes * (rails if fabric.rail_optimized else 1)
    most = max((table.shape[1] for table in ports.of_chip), default=0)
    padded = [
        np.pad(table, ((0, 0), (0, most - table.shape[1])), constant_values=-1)
        for table in ports.of_chip
    ]
    leaf = np.concatenate(ports.leaf)
    rail, plane = np.concatenate(ports.rail), np.concatenate(ports.plane)
    lane = rail * fabric.planes + plane if fabric.rail_only else plane
    if single:  # one switch per lane joins all
        leaf, per_leaf_group = lane, lanes
    rates = np.concatenate(ports.rate) / fabric.tiers[0].oversubscription
    layers, all_rates, per_group = _layers(fabric, parents, per_leaf_group, lanes, leaf, rates)
    first, chip_pool, chip_node = _chips(cluster)
    inside = [_inside(pool) for pool in cluster.pools]
    native = np.concatenate([one[0] for one in inside])
    bridge = np.concatenate([one[1] for one in inside])
    base = len(all_rates)
    return Wiring(
        cluster=cluster, first_chip=first, chip_node=chip_node, chip_pool=chip_pool,
        chip_island=_islands(cluster), chip_ports=np.concatenate(padded),
        port_leaf=leaf, port_rail=rail, port_lane=lane,
        node_port=np.concatenate(ports.node_port),
        node_pool=np.repeat(np.arange(len(cluster.pools)), [p.nodes for p in cluster.pools]),
        node_number=np.concatenate([np.arange(p.nodes) for p in cluster.pools]),
        group_parent=tuple(parents), switches_per_group=tuple(per_group), lanes=lanes,
        layers=tuple(layers),
        rates=np.concatenate([all_rates, native, native, bridge, bridge]),
        island_out=base, bridge_out=base + 2 * len(native),
    )  # fmt: skip


def _layers(
    fabric: Fabric,
    parents: list[Integers],
    per_leaf_group: int,
    lanes: int,
    leaf: Integers,
    port_rates: Floats,
) -> tuple[list[Layer], Floats, list[int]]:
    """Return the layers of links, the rates of all links so far, and switches per group."""
    per_group = [per_leaf_group]
    layers: list[Layer] = []
    rates = [port_rates, port_rates]
    number = 2 * len(port_rates)
    groups = len(parents[0]) if parents else 1
    offered: Floats = np.zeros(groups * per_leaf_group)
    np.add.at(offered, leaf, port_rates)
    down_links = np.bincount(leaf, minlength=groups * per_leaf_group)
    for index, parent in enumerate(parents):
        ways, cables, rate = _uplinks(fabric, index, offered, int(down_links.max()))
        switches, bundles = len(offered), len(offered) if index == 0 else len(parent) * lanes
        links = switches * ways * cables
        layer = Layer(
            switches=switches, ways=ways, cables=cables, up=number, down=number + links,
            bundle_up=number + 2 * links, bundle_down=number + 2 * links + bundles, rates=rate,
        )  # fmt: skip
        each = np.repeat(rate, ways * cables)
        per_bundle = (rate * ways * cables).reshape(bundles, -1).sum(axis=1)
        rates += [each, each, per_bundle, per_bundle]
        layers.append(layer)
        number += 2 * links + 2 * bundles
        top = index == len(parents) - 1
        above = 1 if top else len(parents[index + 1])
        per_group.append((lanes if index == 0 else per_group[-1]) * ways)
        lower = np.arange(switches)
        lane = _lane_in_group(lower % per_group[index], per_group[index], lanes, index)
        target = parent[lower // per_group[index]] * per_group[-1] + lane * ways
        offered = np.zeros(above * per_group[-1])
        down_links = np.zeros(above * per_group[-1], dtype=np.int64)
        for way in range(ways):
            np.add.at(offered, target + way, rate * cables)
            np.add.at(down_links, target + way, cables)
        _check_ports(fabric, index + 1, int(down_links.max()))
    return layers, np.concatenate(rates), per_group


def _lane_in_group(switch: Integers, per_group: int, lanes: int, tier: int) -> Integers:
    """Return the column in which a switch's way up begins: leaves of all rails share theirs."""
    return switch % lanes if tier == 0 and per_group != lanes else switch


def _uplinks(fabric: Fabric, index: int, offered: Floats, down: int) -> tuple[int, int, Floats]:
    """Return ways, cables and the rate of a cable, from a tier's switches to the next."""
    tier, above = fabric.tiers[index], fabric.tiers[index + 1]
    cables, wanted = above.parallel_links, offered / above.oversubscription
    ports = max(1, math.ceil(down / above.oversubscription - 1e-9))
    rate = tier.port_rate if above.port_rate is None else above.port_rate
    if tier.port_rate is not None and above.port_rate is not None:
        rate = min(tier.port_rate, above.port_rate)
    if rate is not None:
        ports = max(1, math.ceil(float(wanted.max()) / rate - 1e-9))
    if tier.port_rate is not None and index == 0:  # NICs slower than ports share them
        down = math.ceil(float(offered.max()) / tier.port_rate - 1e-9)
    if tier.ports is not None:
        if down >= tier.ports:
            raise InputError(
                f"tier '{tier.name}': {down} of a switch's {tier.ports} ports go down; none is "
                f"left for the {above.name}; give it more ports or fewer nodes"
            )
        ports = min(ports, tier.ports - down)
    ways = max(1, ports // cables if tier.ports is not None else math.ceil(ports / cables))
    if rate is not None:
        return ways, cables, np.where(offered > 0, rate, 0.0)
    return ways, cables, wanted / (ways * cables)


def _check_ports(fabric: Fabric, index: int, down: int) -> None:
    tier = fabric.tiers[index]
    if tier.ports is not None and down > tier.ports:
        raise InputError(
            f"tier '{tier.name}': {down} links come up to a switch of {tier.ports} ports; "
            "give it more ports, or fewer parallel links"
        )


def _chips(cluster: Cluster) -> tuple[dict[str, int], Integers, Integers]:
    first: dict[str, int] = {}
    pools, nodes = [], []
    chip = node = 0
    for index, pool in enumerate(cluster.pools):
        first[pool.name] = chip
        pools.append(np.full(pool.num_chips, index, dtype=np.int64))
        nodes.append(node + np.repeat(np.arange(pool.nodes), pool.node.num_chips))
        chip, node = chip + pool.num_chips, node + pool.nodes
    return first, np.concatenate(pools), np.concatenate(nodes)


def _islands(cluster: Cluster) -> Integers:
    columns, first = [], 0
    for pool in cluster.pools:
        own = np.full(pool.node.num_chips, -1, dtype=np.int64)
        for number, island in enumerate(pool.node.islands):
            own[list(island.slots)] = number
        count = len(pool.node.islands)
        each = first + np.arange(pool.nodes)[:, None] * count + own[None, :]
        columns.append(np.where(own[None, :] < 0, -1, each).ravel())
        first += pool.nodes * count
    return np.concatenate(columns)


def _inside(pool: Pool) -> tuple[Floats, Floats]:
    """Return what each chip of a pool has inside its node: native links, and the bridge."""
    node = pool.node
    native = np.zeros(node.num_chips)
    for island in node.islands:
        native[list(island.slots)] = island.bandwidth
    bridge = np.full(node.num_chips, node.effective_bridge.bandwidth)
    return np.tile(native, pool.nodes), np.tile(bridge, pool.nodes)
