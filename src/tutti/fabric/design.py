"""Designs of fabrics: how many leaves, spines and cores join so many chips, and what that takes.

A switch's ports go half down and half up, or as the oversubscription of the leaves allows. With
rails, NIC i of each node hangs on leaf i of its group, so that a group holds as many nodes as a
leaf has ports down; without, a leaf takes all NICs of a few nodes. Spines join the leaves of a pod,
cores join pods. Where a way has room, cables run in parallel and fewer switches do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tutti.errors import InputError
from tutti.fabric.parts import Parts, Switch
from tutti.fabric.parts import parts as shipped_parts
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import Fabric, Routing, Tier
from tutti.hardware.node import NodeType
from tutti.hardware.pool import Pool

Rails = Literal["optimized", "only", "none"]
RAILS: tuple[Rails, ...] = ("optimized", "only", "none")
_NAMES = ("leaf", "spine", "core")
_MOST_TIERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a fabric is to join, and how."""

    node: NodeType
    chips: int
    switch: Switch
    tiers: int | None = None  # None: as few as it takes
    rails: Rails = "optimized"
    planes: int = 1
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        for name in ("chips", "planes"):
            if (count := getattr(self, name)) < 1:
                raise InputError(f"a design of {count} {name}: give 1 or more")
        if not 1 <= self.oversubscription <= 1000:
            raise InputError(
                f"oversubscription {self.oversubscription:g}: give 1 (non-blocking) to 1,000"
            )
        if self.chips % self.node.num_chips:
            less = self.chips // self.node.num_chips * self.node.num_chips
            raise InputError(
                f"{self.chips:,} chips are no whole nodes of {self.node.num_chips}; "
                f"ask for {less + self.node.num_chips:,}" + (f" or {less:,}" if less else "")
            )
        if not self.node.nics:
            raise InputError(f"node type '{self.node.name}' has no NICs; no fabric can join it")
        if len({nic.rate for nic in self.node.nics}) > 1:
            raise InputError(
                f"node type '{self.node.name}' has unlike NICs; design with equal ones"
            )
        if self.port > self.switch.port_rate * (1 + 1e-9):
            raise InputError(
                f"the NICs' ports run at {self.port * 8e-9:g} Gb/s, the switch's at "
                f"{self.switch.port_rate * 8e-9:g} Gb/s; take another switch, or more planes"
            )

    @property
    def nodes(self) -> int:
        """Whole nodes."""
        return self.chips // self.node.num_chips

    @property
    def port(self) -> float:
        """Bytes per second of one port of a NIC."""
        return self.node.nics[0].rate / self.planes

    @property
    def split(self) -> int:
        """NIC ports that one port of a switch serves, broken out."""
        return max(1, int(self.switch.port_rate / self.port + 1e-9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One tier of a design."""

    name: str
    switches: int
    down: int  # ports of a switch that lead down, cables broken out counted once
    up: int
    nodes: int  # that one group of it joins
    parallel: int = 1  # cables to each switch below


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What is gone when one part fails."""

    part: str
    takes: str
    share: float  # of the bandwidth of those it touches
    chips: int  # whom it touches


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """A fabric, counted."""

    wanted: Wanted
    levels: tuple[Level, ...]
    groups: int  # sets of leaves that the same nodes hang on
    pods: int
    host_cables: int
    fabric_cables: int
    price: float
    watts: float
    losses: tuple[Loss, ...]
    latencies_s: tuple[float, ...]  # of a message that turns around at each tier

    @property
    def switches(self) -> int:
        """Of all tiers."""
        return sum(level.switches for level in self.levels)

    @property
    def hops(self) -> int:
        """Switches on the longest way."""
        return 2 * len(self.levels) - 1

    @property
    def oversubscription(self) -> float:
        """What a full leaf is offered ÷ what it sends up: never more than was allowed."""
        leaf, wanted = self.levels[0], self.wanted
        ports = leaf.nodes * (len(wanted.node.nics) if wanted.rails == "none" else 1)
        offered = ports * wanted.port
        return max(1.0, offered / (leaf.up * wanted.switch.port_rate)) if leaf.up else 1.0

    @property
    def label(self) -> str:
        """Its kind in a few words."""
        wanted = self.wanted
        rails = {"optimized": "rails", "only": "rails apart", "none": "no rails"}[wanted.rails]
        planes = f", {wanted.planes} planes" if wanted.planes > 1 else ""
        tiers = "1 tier" if len(self.levels) == 1 else f"{len(self.levels)} tiers"
        return f"{tiers}, {rails}{planes}, {self.oversubscription:.3g}:1"

    def cluster(self, name: str, *, routing: Routing, connections: int) -> Cluster:
        """Return a cluster on this fabric."""
        wanted, tiers = self.wanted, []
        for index, level in enumerate(self.levels):
            top = index == len(self.levels) - 1
            tiers.append(Tier(
                name=level.name, nodes=None if top else level.nodes,
                oversubscription=self.oversubscription if index == 1 else 1.0,
                latency_s=self.latencies_s[index], ports=wanted.switch.ports,
                port_rate=wanted.switch.port_rate, parallel_links=level.parallel,
            ))  # fmt: skip
        fabric = Fabric(
            tiers=tuple(tiers), rail_optimized=wanted.rails != "none",
            rail_only=wanted.rails == "only", planes=wanted.planes,
            routing=routing, connections=connections,
        )  # fmt: skip
        pool = Pool(name=wanted.node.name.lower(), node=wanted.node, nodes=wanted.nodes)
        summary = f"{wanted.chips:,} {wanted.node.chip.name}, {self.label}"
        return Cluster(name=name, summary=summary, pools=(pool,), fabric=fabric)


def design(wanted: Wanted, parts: Parts | None = None) -> Design:
    """Return the fabric that was asked for; an InputError names the limit and what is near."""
    parts = parts or shipped_parts()
    choices = range(1, _MOST_TIERS + 1) if wanted.tiers is None else (wanted.tiers,)
    if wanted.tiers is not None and not 1 <= wanted.tiers <= _MOST_TIERS:
        raise InputError(f"{wanted.tiers} tiers: fabrics of 1 to {_MOST_TIERS} tiers are designed")
    for tiers in choices:
        counted = _count(wanted, tiers)
        if counted is not None:
            return _finished(wanted, counted, parts)
    raise _refusal(wanted, max(choices))


def alternatives(wanted: Wanted, parts: Parts | None = None) -> list[Design]:
    """Return other fabrics for the same chips, cheapest first: one per kind."""
    parts = parts or shipped_parts()
    by_label: dict[str, Design] = {}
    for rails in RAILS:
        for planes in (1, 2):
            for over in sorted({1.0, wanted.oversubscription, 2.0, 4.0}):
                try:
                    asked = replace(
                        wanted, rails=rails, planes=planes, oversubscription=over, tiers=None
                    )
                except InputError:
                    continue
                for tiers in range(1, _MOST_TIERS + 1):
                    counted = _count(asked, tiers)
                    if counted is not None:
                        one = _finished(asked, counted, parts)
                        by_label.setdefault(one.label, one)
                        break
    return sorted(by_label.values(), key=lambda one: (one.price, one.label))


_Counted = tuple[tuple[Level, ...], int, int]  # levels, groups, pods


def most_nodes(wanted: Wanted, tiers: int) -> int:
    """Return how many nodes so many tiers can join at most."""
    ports, per_leaf = wanted.switch.ports, _nodes_per_group(wanted)
    own = _own_leaves(wanted)
    if tiers == 1:
        whole = ports * wanted.split
        nics = len(wanted.node.nics)
        if wanted.rails == "only":
            return whole
        return whole // nics if wanted.rails == "none" else 0
    if per_leaf == 0:
        return 0
    if tiers == 2:
        return per_leaf * (ports // own)
    return per_leaf * (ports // 2 // own) * ports


def _leaf_ports(wanted: Wanted) -> tuple[int, int]:
    """Return a full leaf's ports down and up."""
    up = max(1, int(wanted.switch.ports / (1.0 + wanted.oversubscription) + 1e-9))
    return min(wanted.switch.ports - up, int(up * wanted.oversubscription + 1e-9)), up


def _nodes_per_group(wanted: Wanted) -> int:
    down = _leaf_ports(wanted)[0] * wanted.split
    return down if wanted.rails != "none" else down // len(wanted.node.nics)


def _own_leaves(wanted: Wanted) -> int:
    """Return the leaves of a group that meet at the same spines."""
    return len(wanted.node.nics) if wanted.rails == "optimized" else 1


def _count(wanted: Wanted, tiers: int) -> _Counted | None:
    """Return the switches of each tier; None: so many tiers do not reach."""
    nodes, ports = wanted.nodes, wanted.switch.ports
    if nodes > most_nodes(wanted, tiers):
        return None
    nics, planes = len(wanted.node.nics), wanted.planes
    lanes = planes * (nics if wanted.rails == "only" else 1)
    if tiers == 1:
        per_switch = nodes if wanted.rails == "only" else nodes * nics
        down = math.ceil(per_switch / wanted.split)
        return (Level(name="leaf", switches=lanes, down=down, up=0, nodes=nodes),), 1, 1
    per_group = min(_nodes_per_group(wanted), nodes)
    on_leaf = per_group if wanted.rails != "none" else per_group * nics
    down = math.ceil(on_leaf / wanted.split)
    up = max(1, math.ceil(on_leaf * wanted.port / wanted.switch.port_rate
                          / wanted.oversubscription - 1e-9))  # fmt: skip
    groups = math.ceil(nodes / per_group)
    own = _own_leaves(wanted)
    in_group = planes * (nics if wanted.rails != "none" else 1)
    leaf = Level(name="leaf", switches=groups * in_group, down=down, up=up, nodes=per_group)
    if tiers == 2:
        cables = _parallel(up, ports // (groups * own))
        spine = Level(
            name="spine", switches=lanes * up // cables, down=groups * own * cables, up=0,
            nodes=nodes, parallel=cables,
        )  # fmt: skip
        return (leaf, spine), groups, 1
    pods = math.ceil(groups / (ports // 2 // own))
    per_pod = math.ceil(groups / pods)
    cables = _parallel(up, ports // 2 // (per_pod * own))
    ways, spine_down = up // cables, per_pod * own * cables
    rising = _parallel(spine_down, ports // pods)
    spine = Level(
        name="spine", switches=pods * lanes * ways, down=spine_down, up=spine_down,
        nodes=per_pod * per_group, parallel=cables,
    )  # fmt: skip
    core = Level(
        name="core", switches=lanes * ways * spine_down // rising, down=pods * rising, up=0,
        nodes=nodes, parallel=rising,
    )  # fmt: skip
    return (leaf, spine, core), groups, pods


def _parallel(links: int, room: int) -> int:
    """Return the most cables to one switch that divide all links evenly and have room there."""
    return max(n for n in range(1, max(1, min(links, room)) + 1) if links % n == 0)


def _finished(wanted: Wanted, counted: _Counted, parts: Parts) -> Design:
    levels, groups, pods = counted
    host = wanted.nodes * len(wanted.node.nics) * wanted.planes
    between = sum(level.switches * level.up for level in levels)
    rate = {"host": wanted.port * 8e-9, "fabric": wanted.switch.port_rate * 8e-9}
    copper = wanted.rails == "none" and len(levels) > 1  # the leaf stands in the nodes' rack
    optics = 2 * between * rate["fabric"] + (0 if copper else 2 * host * rate["host"])
    switches = sum(level.switches for level in levels)
    cables = host * (parts.copper if copper else parts.fibre).price + between * parts.fibre.price
    hop = wanted.switch.latency_s
    return Design(
        wanted=wanted, levels=levels, groups=groups, pods=pods,
        host_cables=host, fabric_cables=between,
        price=switches * wanted.switch.price + optics * parts.optics.price_per_gbps + cables,
        watts=switches * wanted.switch.watts + optics * parts.optics.watts_per_gbps,
        losses=tuple(_losses(wanted, levels)),
        latencies_s=tuple(
            round(parts.host_latency_s.value + (2 * i + 1) * hop, 9) for i in range(len(levels))
        ),
    )  # fmt: skip


def _losses(wanted: Wanted, levels: tuple[Level, ...]) -> Iterator[Loss]:
    """Yield what each kind of part takes away when it fails."""
    leaf, planes = levels[0], wanted.planes
    per_nic = wanted.node.num_chips / len(wanted.node.nics)
    own = max(1, round(per_nic))
    yield Loss(part="host cable", takes="a chip's network", share=1 / planes, chips=own)
    on_leaf = leaf.nodes if wanted.rails != "none" else leaf.nodes * len(wanted.node.nics)
    yield Loss(
        part=leaf.name, takes="the network of the chips that hang on it", share=1 / planes,
        chips=min(wanted.chips, round(on_leaf * per_nic)),
    )  # fmt: skip
    if len(levels) == 1:
        return
    spine = levels[1]
    yield Loss(
        part="leaf - spine cable", takes="what the leaf sends up",
        share=1 / leaf.up, chips=min(wanted.chips, round(on_leaf * per_nic)),
    )  # fmt: skip
    lanes = planes * (len(wanted.node.nics) if wanted.rails == "only" else 1)
    ways = leaf.up // spine.parallel
    touched = min(wanted.chips, spine.nodes * wanted.node.num_chips)
    yield Loss(
        part=spine.name, takes="what leaves of its pod send up",
        share=1 / (ways * planes), chips=touched * planes // lanes,
    )  # fmt: skip
    if len(levels) == 3:
        core = levels[2]
        yield Loss(
            part=core.name, takes="what goes between pods",
            share=lanes / (core.switches * planes), chips=wanted.chips * planes // lanes,
        )  # fmt: skip


def _refusal(wanted: Wanted, tiers: int) -> InputError:
    """Say which limit is the tightest, and the nearest that works."""
    per_node = wanted.node.num_chips
    reach = most_nodes(wanted, tiers) * per_node
    near: list[str] = []
    for more in range(tiers + 1, _MOST_TIERS + 1):
        if most_nodes(wanted, more) >= wanted.nodes:
            near.append(f"{more} tiers")
            break
    for rails in ("only", "none"):
        other = replace(wanted, rails=rails, tiers=None)
        if rails != wanted.rails and most_nodes(other, tiers) >= wanted.nodes:
            near.append(f"rails '{rails}'")
    for over in (2.0, 4.0, 8.0):
        other = replace(wanted, oversubscription=over, tiers=None)
        if over > wanted.oversubscription and most_nodes(other, tiers) >= wanted.nodes:
            near.append(f"oversubscription {over:g}")
            break
    if reach:
        near.append(f"{reach:,} chips")
    what = f"{tiers} {'tier' if tiers == 1 else 'tiers'} of {wanted.switch.text} switches"
    limit = f"{what} join {reach:,} chips at most" if reach else f"{what} join no rails"
    remedy = f"; what works: {' or '.join(near)}" if near else "; take a switch with more ports"
    return InputError(f"{wanted.chips:,} chips: {limit}{remedy}")
