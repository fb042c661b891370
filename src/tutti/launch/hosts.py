"""The machines that a plan needs: hosts, and components of hosts that are started alike.

A host is where one torchrun agent runs: a node, or one part of a node that is made of several
hosts. A component holds the hosts of one pool on which the plan uses the same chips: one
replicated job of a JobSet, one part of a heterogeneous Slurm job. Pools, nodes and chips that the
plan leaves idle or keeps as spares have none.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tutti.hardware.cluster import Cluster
from tutti.hardware.pool import Pool
from tutti.hardware.slots import Slots
from tutti.launch.identity import used_chips
from tutti.plan.plan import Plan
from tutti.units import many


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine and the ranks on it, in the order of their slots."""

    pool: str
    node: int
    part: int  # which host of its node; 0 for most
    slots: Slots
    ranks: tuple[int, ...]
    is_node: bool  # the node has no other host

    @property
    def name(self) -> str:
        """What TUTTI_NODE says on it."""
        node = f"{self.pool}/{self.node}"
        return node if self.is_node else f"{node}/{self.slots}"

    @property
    def rank_text(self) -> str:
        """Its ranks, written shortly."""
        return str(Slots(tuple(sorted(self.ranks))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Hosts of one pool that are started alike; torchrun's node ranks follow each other."""

    name: str
    pool: Pool
    devices: Slots  # as the host counts its chips
    hosts: tuple[Host, ...]
    first: int  # node rank of the first host

    @property
    def num_chips(self) -> int:
        """Chips used per host, each by one process."""
        return len(self.devices)

    @property
    def chips_per_host(self) -> int:
        """Chips that a host has, used or not."""
        return self.pool.node.num_chips // self.pool.node.hosts

    @property
    def is_partial(self) -> bool:
        """Whether hosts have chips that the plan does not use."""
        return self.num_chips < self.chips_per_host

    def __str__(self) -> str:
        return (
            f"{self.name}: {many(len(self.hosts), 'host')} × {self.num_chips} {self.pool.chip.name}"
        )


def find_components(plan: Plan, cluster: Cluster) -> tuple[Component, ...]:
    """Return what a plan needs, the host of rank 0 first."""
    groups: dict[tuple[str, Slots], list[Host]] = defaultdict(list)
    for host in _hosts(plan, cluster):
        width = _chips_per_host(cluster.pool(host.pool))
        devices = Slots(tuple(slot - host.part * width for slot in host.slots))
        groups[host.pool, devices].append(host)
    ordered = sorted(groups.items(), key=lambda group: min(min(h.ranks) for h in group[1]))
    names = _names([pool for (pool, _), _ in ordered])
    components: list[Component] = []
    first = 0
    for name, ((pool, devices), hosts) in zip(names, ordered, strict=True):
        # Rank 0's host answers at the rendezvous; schedulers can name the first one only.
        in_order = sorted(hosts, key=lambda host: (0 not in host.ranks, host.node, host.part))
        components.append(
            Component(
                name=name,
                pool=cluster.pool(pool),
                devices=devices,
                hosts=tuple(in_order),
                first=first,
            )
        )
        first += len(hosts)
    return tuple(components)


def _chips_per_host(pool: Pool) -> int:
    return pool.node.num_chips // pool.node.hosts


def _hosts(plan: Plan, cluster: Cluster) -> Iterator[Host]:
    places: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)
    for chip, rank in used_chips(plan).items():
        part = chip.slot // _chips_per_host(cluster.pool(chip.pool))
        places[chip.pool, chip.node, part].append((chip.slot, rank))
    for (pool, node, part), chips in places.items():
        chips.sort()
        yield Host(
            pool=pool,
            node=node,
            part=part,
            slots=Slots(tuple(slot for slot, _ in chips)),
            ranks=tuple(rank for _, rank in chips),
            is_node=cluster.pool(pool).node.hosts == 1,
        )


def dns_label(text: str) -> str:
    """Return a name as host names may be: small letters, digits and dashes, a letter first."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return label if label[:1].isalpha() else f"x{label}"


def _names(pools: Sequence[str]) -> list[str]:
    """Return a name for each component; a pool may have several."""
    names: dict[str, None] = {}
    for pool in pools:
        label = dns_label(pool)
        candidates = itertools.chain(
            [label], (f"{label}-{number}" for number in itertools.count(2))
        )
        names[next(name for name in candidates if name not in names)] = None
    return list(names)
