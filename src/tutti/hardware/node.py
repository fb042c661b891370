"""A node: chips, the native links between them, its NICs and its host.

Every bandwidth here is bytes per second, per direction, and per chip unless it says otherwise.
A *node* is the set of chips that share native links or one host; usually one server. A rack whose
chips share one link domain (NVL72) is one node made of several `hosts`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from tutti.document import (
    AtLeast,
    AtMost,
    BytesPerSecond,
    Count,
    Natural,
    Place,
    Quantity,
    Seconds,
    build_fields,
    plain_fields,
)
from tutti.hardware.chip import Chip, check_name
from tutti.hardware.slots import MOST_SLOTS, Slots

ChipCount = Annotated[int, AtLeast(1), AtMost(MOST_SLOTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """Chips joined by a native link: NVLink, XPU Link, HCCS, Infinity Fabric, shared memory."""

    kind: str
    slots: Slots
    bandwidth: BytesPerSecond
    """Per chip and direction, to all its peers together."""
    pair_bandwidth: BytesPerSecond | None = None
    """Per direction between one pair; less than `bandwidth` in a mesh, equal behind a switch."""
    latency_s: Seconds = 2e-6

    def __post_init__(self) -> None:
        if self.pair_bandwidth is not None and self.pair_bandwidth > self.bandwidth:
            raise ValueError(
                f"'pair_bandwidth' {self.pair_bandwidth:.4g} exceeds 'bandwidth' "
                f"{self.bandwidth:.4g} bytes/s; the pair is part of the whole"
            )

    @property
    def between_pair(self) -> float:
        """Bandwidth that one pair of chips has for itself."""
        return self.bandwidth if self.pair_bandwidth is None else self.pair_bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """The way between chips of one node that share no island: PCIe, the host's memory."""

    kind: str = "PCIe"
    bandwidth: BytesPerSecond
    latency_s: Seconds = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network port. Chips of `slots` use it; none named means all of them."""

    rate: BytesPerSecond
    slots: Slots = field(default_factory=lambda: Slots(()))
    rail: Natural | None = None
    numa: Natural | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NicPerChip:
    """The short form of `nics`: equal NICs, spread over the chips, one rail each."""

    rate: BytesPerSecond
    per_chip: Annotated[float, AtLeast(1 / MOST_SLOTS), AtMost(16)] = 1.0

    def spread(self, num_chips: int) -> tuple[Nic, ...]:
        """Return the NICs of a node with `num_chips` chips."""
        if self.per_chip >= 1:
            ports = round(self.per_chip)
            return tuple(
                Nic(rate=self.rate, slots=Slots((slot,)), rail=slot * ports + port)
                for slot in range(num_chips)
                for port in range(ports)
            )
        share = round(1 / self.per_chip)
        return tuple(
            Nic(
                rate=self.rate,
                slots=Slots(tuple(range(rail * share, min((rail + 1) * share, num_chips)))),
                rail=rail,
            )
            for rail in range(math.ceil(num_chips / share))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The CPU side of one host of the node."""

    cores: Count = 64
    memory_bytes: Annotated[float, Quantity("bytes"), AtLeast(0)] = 1e12
    memory_bandwidth: BytesPerSecond = 300e9
    """Of the whole host; forwarding and offload share it."""
    device_bandwidth: BytesPerSecond = 25e9
    """Host to device (and back), per chip and direction."""
    device_latency_s: Seconds = 10e-6
    numa_nodes: Count = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """One kind of node. A pool holds many equal ones."""

    name: str
    chip: Chip
    num_chips: ChipCount
    islands: tuple[Island, ...] = ()
    bridge: Bridge | None = None
    nics: tuple[Nic, ...] = ()
    host: Host = field(default_factory=Host)
    hosts: Count = 1
    source: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "node")
        homes: dict[int, str] = {}
        for island in self.islands:
            if not len(island.slots):
                raise ValueError(f"the {island.kind} island names no slots")
            for slot in island.slots:
                self._check_slot(slot, f"the {island.kind} island")
                if slot in homes:
                    raise ValueError(f"slot {slot} is in two islands; a chip has one island")
                homes[slot] = island.kind
        for index, nic in enumerate(self.nics):
            for slot in nic.slots:
                self._check_slot(slot, f"NIC {index}")
            if nic.numa is not None and nic.numa >= self.host.numa_nodes:
                raise ValueError(
                    f"NIC {index} is on NUMA node {nic.numa}, but the host has "
                    f"{self.host.numa_nodes}, counted from 0"
                )
        if self.num_chips % self.hosts:
            raise ValueError(f"{self.num_chips} chips do not divide over {self.hosts} hosts")

    def _check_slot(self, slot: int, whose: str) -> None:
        if slot >= self.num_chips:
            raise ValueError(
                f"{whose} names slot {slot}, but the node has {self.num_chips} chips "
                f"(slots 0-{self.num_chips - 1})"
            )

    @classmethod
    def from_document(cls, value: object, place: Place) -> NodeType:
        """Build a node type; `nics` may be the short form {rate, per_chip}."""
        if isinstance(value, NodeType):
            return value
        if isinstance(value, dict) and isinstance(value.get("nics"), dict):
            short = build_fields(NicPerChip, value["nics"], place.key("nics"))
            node = build_fields(cls, {**value, "nics": []}, place)
            return replace(node, nics=short.spread(node.num_chips))
        return build_fields(cls, value, place)

    @property
    def islands_or_singles(self) -> tuple[Slots, ...]:
        """All chips, grouped by island; a chip without native links is a group of its own."""
        groups = [island.slots for island in self.islands]
        inside = {slot for group in groups for slot in group}
        groups += [Slots((s,)) for s in range(self.num_chips) if s not in inside]
        return tuple(sorted(groups, key=lambda group: group.numbers[0]))

    @property
    def largest_island(self) -> int:
        """Chips in the largest island; 1 where there are no native links."""
        return max(len(group) for group in self.islands_or_singles)

    def island_of(self, slot: int) -> Island | None:
        """Return the island that holds a slot."""
        return next((island for island in self.islands if slot in island.slots), None)

    @property
    def effective_bridge(self) -> Bridge:
        """The bridge, or by default the way through the host's PCIe."""
        return self.bridge or Bridge(
            bandwidth=self.host.device_bandwidth, latency_s=self.host.device_latency_s
        )

    def numa_node(self, slot: int) -> int:
        """Return the NUMA node a chip hangs on: chips spread evenly, in order."""
        chips_per_host = self.num_chips // self.hosts
        return (slot % chips_per_host) * self.host.numa_nodes // chips_per_host

    def nics_of(self, slot: int) -> tuple[Nic, ...]:
        """Return the NICs that a chip sends through."""
        return tuple(nic for nic in self.nics if not len(nic.slots) or slot in nic.slots)

    @property
    def all_reach_a_nic(self) -> bool:
        """Whether every chip can leave the node."""
        return all(self.nics_of(slot) for slot in range(self.num_chips))

    def nic_numa(self, nic: Nic) -> int:
        """Return the NUMA node of a NIC: as stated, or that of its first chip."""
        if nic.numa is not None:
            return nic.numa
        return self.numa_node(nic.slots.numbers[0]) if len(nic.slots) else 0

    def nic_rate(self, slot: int) -> float:
        """Return a chip's fair share of its NICs; 0 without any."""
        return sum(nic.rate / (len(nic.slots) or self.num_chips) for nic in self.nics_of(slot))

    def nic_port_rate(self, slot: int) -> float:
        """Return what a chip can send while its neighbours are silent."""
        return sum(nic.rate for nic in self.nics_of(slot))

    def rails_of(self, slot: int) -> frozenset[int]:
        """Return the rails a chip can reach without leaving its NICs."""
        return frozenset(nic.rail for nic in self.nics_of(slot) if nic.rail is not None)

    @property
    def nic_bandwidth(self) -> float:
        """All NICs of the node together."""
        return sum(nic.rate for nic in self.nics)


def node_document(node: NodeType) -> dict[str, Any]:
    """Return the written form: the chip by its name, equal NICs in their short form."""
    written = {**plain_fields(node), "chip": node.chip.name}
    if node.nics:
        each = len(node.nics) / node.num_chips
        short = NicPerChip(rate=node.nics[0].rate, per_chip=each)
        if each <= 16 and short.spread(node.num_chips) == node.nics:
            written["nics"] = plain_fields(short)
    return written


def trimmed(node: NodeType, num_chips: int, name: str) -> NodeType:
    """Return `node` with only its first `num_chips` chips and what belongs to them."""
    islands = tuple(replace(i, slots=i.slots.below(num_chips)) for i in node.islands)
    nics = tuple(replace(n, slots=n.slots.below(num_chips)) for n in node.nics if len(n.slots))
    return replace(
        node,
        name=name,
        num_chips=num_chips,
        hosts=1 if num_chips % node.hosts else node.hosts,
        islands=tuple(i for i in islands if len(i.slots)),
        nics=tuple(n for n in nics if len(n.slots))
        + tuple(n for n in node.nics if not len(n.slots)),
    )
