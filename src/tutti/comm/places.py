"""Places and topology: where every rank sits, and how ranks hang together.

A `Place` is what a rank tells the others of itself at start. From all of them follow the islands,
the rails, the order on the wire, and the way from any rank to any other; every rank derives the
same. Who shares a host, an island and a backend is decided here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tutti.collective import Group, Island
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position

Wire = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank's place."""

    host: str = ""
    """Processes of one host share memory."""
    island: str = ""
    """Ranks of one host and island share native links; empty: the whole host is one."""
    native: str = ""
    """The torch backend of the island ("nccl", "hccl", …); empty: our own shared memory."""
    chip: str = ""
    """What kind of chip it is, by name: whose measured links and programs count."""
    device: str = ""
    """The chip; two ranks on one chip cannot use a native backend."""
    rail: int = 0
    """The NIC by which the rank leaves its host."""
    bandwidth: float = 0.0
    """Bytes per second of this rank's share of its NIC; 0: not known."""
    wire: Wire = ()
    """Where on the fabric: ranks close in this order are close on the wire."""
    addresses: tuple[str, ...] = ("127.0.0.1",)
    """Where others reach it, one per NIC; connections take turns."""
    port: int = 0
    local_name: str = ""
    """Of its local socket; empty: it has none."""
    transports: tuple[str, ...] = ()
    """Plug-in transports that it can use, preferred first."""
    numa: int | None = None

    def to_document(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_document(cls, value: dict[str, Any]) -> Place:
        """Read what `to_document` wrote."""
        fields = dict(value)
        for name in ("wire", "addresses", "transports"):
            fields[name] = tuple(fields.get(name, ()))
        return cls(**fields)


def place_of(cluster: Cluster, chip: Position, *, native: str = "") -> Place:
    """Return what a cluster file knows of a chip's place; host and addresses are found at start."""
    pool = cluster.pool(chip.pool)
    node, slot = pool.node, chip.slot
    islands = [number for number, slots in enumerate(node.islands_or_singles) if slot in slots]
    return Place(
        # nodes stay apart, also where one host stands for several of them
        island=f"{chip.pool}/{chip.node}/{islands[0]}",
        native=native,
        chip=pool.chip.name,
        device=str(chip),
        rail=min(node.rails_of(slot), default=slot),
        bandwidth=node.nic_rate(slot),
        wire=([p.name for p in cluster.pools].index(chip.pool), chip.node, islands[0]),
        numa=node.numa_node(slot),
    )


@dataclass(frozen=True, slots=True)
class Topology:
    """The places of all ranks."""

    places: tuple[Place, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.places)

    def island_key(self, rank: int) -> tuple[str, str, str]:
        """Return what ranks of one island have in common."""
        place = self.places[rank]
        return (place.host, place.island, place.native)

    def transport(self, home: int, away: int) -> str:
        """Return how a message gets from one rank to another: "shared", "tcp" or a plug-in."""
        here, there = self.places[home], self.places[away]
        for name in here.transports:
            if name in there.transports:
                return name
        if here.host == there.host and here.local_name and there.local_name:
            return "shared"
        return "tcp"

    def group(self, ranks: Iterable[int]) -> Group:
        """Return the group of some ranks, in the order of the wire.

        Islands that are near on the fabric stand side by side, and ranks of an island by rail: a
        ring crosses between hosts as rarely as it can, in whatever order ranks were handed out.
        """
        members: dict[tuple[str, str, str], list[int]] = {}
        for rank in sorted(set(ranks)):
            if not 0 <= rank < self.size:
                raise InputError(f"group: rank {rank} is not among the {self.size} of this job")
            members.setdefault(self.island_key(rank), []).append(rank)
        if not members:
            raise InputError("group: no ranks given")
        firsts: dict[str, int] = {}  # rank of each host
        for rank, place in enumerate(self.places):
            firsts.setdefault(place.host, rank)

        def nearest(members: list[int]) -> tuple[Wire, str, int]:
            return min(self._wire(rank, firsts) for rank in members)

        islands = sorted(members.values(), key=nearest)
        return Group(tuple(self._island(members) for members in islands))

    def _wire(self, rank: int, firsts: Mapping[str, int]) -> tuple[Wire, str, int]:
        place = self.places[rank]
        return (place.wire, "" if place.wire else f"{firsts[place.host]:09d}", rank)

    def _island(self, ranks: list[int]) -> Island:
        order = tuple(sorted(ranks, key=lambda rank: (self.places[rank].rail, rank)))
        rates = tuple(self.places[rank].bandwidth for rank in order)
        return Island(
            ranks=order,
            rails=tuple(self.places[rank].rail for rank in order),
            bandwidths=rates if all(rates) else (),
        )

    def native_backend(self, ranks: Iterable[int]) -> str:
        """Return the torch backend that ranks of one island can use; empty: none."""
        places = [self.places[rank] for rank in ranks]
        backends = {place.native for place in places}
        devices = [place.device for place in places if place.device]
        if len(backends) != 1 or len(set(devices)) != len(devices):
            return ""
        return backends.pop()

    def fingerprint(self) -> str:
        """Return a hash that is equal on all ranks that see the same places."""
        text = json.dumps([place.to_document() for place in self.places], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
