"""Who holds which chips: nodes as bits of whole numbers, so that thousands are searched at once.

Nodes are counted over all pools, in the cluster's order. `level[c]` has the bit of every node with
at least c free chips; a group of the fabric is a mask of its nodes. What every chip is expected to
be free again stands in an array, from which promises are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tutti.errors import InputError
from tutti.fabric.wiring import Wiring, wire
from tutti.fleet.request import Allocation, Shape
from tutti.hardware.cluster import Cluster

Floats = npt.NDArray[np.float64]


def bits(mask: int) -> list[int]:
    """Return the numbers of the bits that are set, rising."""
    numbers = []
    while mask:
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers


def lowest(mask: int, count: int) -> int:
    """Return the lowest `count` bits of a mask."""
    over = mask.bit_count() - count
    if over <= 0:
        return mask
    rest = mask
    if over < count:  # fewer to take away than to keep
        for _ in range(over):
            rest ^= 1 << (rest.bit_length() - 1)
        return rest
    for _ in range(count):
        rest &= rest - 1
    return mask ^ rest


def as_mask(chosen: npt.NDArray[np.bool_]) -> int:
    """Return a truth value per node as bits."""
    return int.from_bytes(np.packbits(chosen, bitorder="little").tobytes(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounds:
    """What does not change: pools, nodes, and the groups of every tier of the fabric."""

    cluster: Cluster
    pool_names: tuple[str, ...]
    first: tuple[int, ...]  # node of each pool
    sizes: tuple[int, ...]  # chips per node of each pool
    pool_masks: tuple[int, ...]
    node_pool: tuple[int, ...]
    tiers: tuple[tuple[int, ...], ...]  # per tier, lowest first, the mask of each group
    node_group: tuple[tuple[int, ...], ...]  # per tier: the group of each node
    wiring: Wiring
    border: int  # the tier whose groups matter: the lowest one with a narrower way up
    largest: int  # nodes of the largest of its groups
    known_fewest: dict[tuple[tuple[str, int], ...], int] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: Cluster) -> Grounds:
        """Return the grounds of a cluster."""
        wiring = wire(cluster)
        counts = [pool.nodes for pool in cluster.pools]
        first = tuple(int(n) for n in np.concatenate([[0], np.cumsum(counts)[:-1]]))
        node_group = _groups(wiring, sum(counts))
        tiers = []
        for groups in node_group:
            masks = [0] * (max(groups) + 1)
            for node, group in enumerate(groups):
                masks[group] |= 1 << node
            tiers.append(tuple(masks))
        above = [tier.oversubscription > 1 for tier in cluster.fabric.tiers[1:]]
        border = above.index(True) if True in above else 0
        return cls(
            cluster=cluster, pool_names=tuple(pool.name for pool in cluster.pools), first=first,
            sizes=tuple(pool.node.num_chips for pool in cluster.pools),
            pool_masks=tuple(((1 << n) - 1) << at for n, at in zip(counts, first, strict=True)),
            node_pool=tuple(int(p) for p in wiring.node_pool), tiers=tuple(tiers),
            node_group=tuple(map(tuple, node_group)), wiring=wiring,
            border=border,
            largest=max(map(int.bit_count, tiers[border])) if tiers else sum(counts),
        )  # fmt: skip

    @property
    def num_nodes(self) -> int:
        """Nodes of all pools."""
        return len(self.node_pool)

    @property
    def num_chips(self) -> int:
        """Chips of all pools."""
        return self.cluster.num_chips

    def node_name(self, node: int) -> str:
        """Return "pool/number"."""
        pool = self.node_pool[node]
        return f"{self.pool_names[pool]}/{node - self.first[pool]}"

    def node_numbers(self, nodes: tuple[int, ...]) -> dict[str, list[int]]:
        """Return the numbers of nodes inside their pools."""
        by_pool: dict[str, list[int]] = {}
        for node in nodes:
            pool = self.node_pool[node]
            by_pool.setdefault(self.pool_names[pool], []).append(node - self.first[pool])
        return by_pool

    @property
    def groups(self) -> tuple[int, ...]:
        """The masks of the groups that matter."""
        return self.tiers[self.border]

    def spread(self, mask: int) -> int:
        """Return in how many groups some nodes lie."""
        if not self.tiers:
            return 1
        groups = self.node_group[self.border]
        return len({groups[node] for node in bits(mask)})

    def fewest(self, shape: Shape) -> int:
        """Return the fewest groups that a shape can lie in, all nodes free."""
        if not self.tiers:
            return 1
        if shape.nodes in self.known_fewest:
            return self.known_fewest[shape.nodes]
        total = 0
        for name, count in shape.nodes:
            own = self.pool_masks[self.pool_names.index(name)]
            left = count
            for size in sorted(((mask & own).bit_count() for mask in self.groups), reverse=True):
                total += 1
                left -= size
                if left <= 0:
                    break
        self.known_fewest[shape.nodes] = total
        return total

    def largest_group(self, pool: int) -> int:
        """Return the most nodes of a pool in one group."""
        own = self.pool_masks[pool]
        if not self.tiers:
            return own.bit_count()
        return max((mask & own).bit_count() for mask in self.groups)


def _groups(wiring: Wiring, nodes: int) -> list[list[int]]:
    """Return the group of every node in each tier but the top."""
    if not wiring.group_parent:
        return []
    port = wiring.node_port.max(axis=1)
    own = wiring.port_leaf[np.maximum(port, 0)] // wiring.switches_per_group[0]
    tiers = [[int(g) for g in own]]
    for parent in wiring.group_parent[:-1]:
        tiers.append([int(parent[g]) for g in tiers[-1]])
    return [groups for groups in tiers if len(groups) == nodes]


class Fleet:
    """The chips of a cluster: free, held by jobs, or gone."""

    def __init__(self, grounds: Grounds) -> None:
        self.grounds = grounds
        most = max(grounds.sizes)
        everyone = [0] * (most + 1)
        for pool, size in enumerate(grounds.sizes):
            for chips in range(size + 1):
                everyone[chips] |= grounds.pool_masks[pool]
        self.level = everyone
        self.free_slots = [
            (1 << grounds.sizes[pool]) - 1 for pool in grounds.node_pool
        ]  # of every node
        self.down = 0  # nodes that are gone
        self.held: dict[str, list[Allocation]] = {}
        self.jobs_on: list[set[str]] = [set() for _ in range(grounds.num_nodes)]
        self.free_at: Floats = np.zeros((grounds.num_nodes, most))
        for node, pool in enumerate(grounds.node_pool):
            self.free_at[node, grounds.sizes[pool] :] = np.inf
        self.node_free_at: Floats = np.zeros(grounds.num_nodes)
        self.used_chips = 0

    def chips_of(self, pool: int, shape: Shape) -> int:
        """Return the chips that a shape takes of each node of a pool."""
        return shape.chips_per_node or self.grounds.sizes[pool]

    def free(self, pool: int, chips: int) -> int:
        """Return the nodes of a pool that have so many free chips."""
        return self.level[chips] & self.grounds.pool_masks[pool]

    def fullest(self, free: int, chips: int, count: int) -> int:
        """Return those of some nodes with the fewest free chips, but so many, that are enough."""
        taken = 0
        for level in range(chips, len(self.level)):
            more = self.level[level + 1] if level + 1 < len(self.level) else 0
            taken |= free & self.level[level] & ~more
            if taken.bit_count() >= count:
                return taken
        return taken

    def allocate(self, mask: int, shape: Shape, number: int) -> Allocation:
        """Return chips on these nodes: the lowest slots that are free."""
        nodes = bits(mask)
        slots = []
        for node in nodes:
            free, chips = self.free_slots[node], self.chips_of(self.grounds.node_pool[node], shape)
            slots.append(lowest(free, chips))
        return Allocation(tuple(nodes), tuple(slots), number)

    def take(self, job: str, allocation: Allocation, until: float) -> None:
        """Give chips to a job; two jobs on one chip are refused."""
        for node, slots in zip(allocation.nodes, allocation.slots, strict=True):
            if self.free_slots[node] & slots != slots or self.down >> node & 1:
                raise InputError(
                    f"job '{job}': chips of node {self.grounds.node_name(node)} are not free "
                    f"({', '.join(sorted(self.jobs_on[node])) or 'it is down'})"
                )
        for node, slots in zip(allocation.nodes, allocation.slots, strict=True):
            self._set(node, self.free_slots[node] ^ slots)
            self.jobs_on[node].add(job)
            self.used_chips += slots.bit_count()
        self.held.setdefault(job, []).append(allocation)
        self.expect(allocation, until)

    def expect(self, allocation: Allocation, until: float) -> None:
        """Note until when chips are held, as far as is known."""
        for node, slots in zip(allocation.nodes, allocation.slots, strict=True):
            row = self.free_at[node]
            size = self.grounds.sizes[self.grounds.node_pool[node]]
            if slots == (1 << size) - 1:
                row[:size] = until
                self.node_free_at[node] = until
            else:
                for slot in bits(slots):
                    row[slot] = until
                self.node_free_at[node] = row[:size].max()

    def give(self, job: str, allocation: Allocation) -> None:
        """Take chips back from a job."""
        self.held[job].remove(allocation)
        if not self.held[job]:
            del self.held[job]
        for node, slots in zip(allocation.nodes, allocation.slots, strict=True):
            self._set(node, self.free_slots[node] | slots)
            if job not in self.held or not any(node in one.nodes for one in self.held[job]):
                self.jobs_on[node].discard(job)
            self.used_chips -= slots.bit_count()
        self.expect(allocation, 0.0)
        if self.down:
            for node in bits(allocation.mask & self.down):
                self.node_free_at[node] = np.inf

    def fail(self, node: int) -> set[str]:
        """Take a node out; return the jobs that were on it."""
        self.down |= 1 << node
        self._levels(node, self.free_slots[node].bit_count(), -1)
        self.node_free_at[node] = np.inf
        return set(self.jobs_on[node])

    def repair(self, node: int) -> None:
        """Put a node back."""
        self.down &= ~(1 << node)
        self._levels(node, -1, self.free_slots[node].bit_count())
        size = self.grounds.sizes[self.grounds.node_pool[node]]
        self.node_free_at[node] = self.free_at[node, :size].max()

    def _set(self, node: int, free: int) -> None:
        before = self.free_slots[node].bit_count()
        self.free_slots[node] = free
        if not self.down or not self.down >> node & 1:
            self._levels(node, before, free.bit_count())

    def _levels(self, node: int, before: int, after: int) -> None:
        """Note that a node has another number of free chips; −1: it is down."""
        bit, level = 1 << node, self.level
        for chips in range(min(before, after) + 1, max(before, after) + 1):
            level[chips] ^= bit

    def free_times(self, pool: int, chips: int) -> Floats:
        """Return when each node of a pool is expected to have so many free chips."""
        grounds = self.grounds
        first, size = grounds.first[pool], grounds.sizes[pool]
        count = grounds.pool_masks[pool].bit_count()
        whole = self.node_free_at[first : first + count]
        if chips >= size:
            return whole
        rows = self.free_at[first : first + count, :size]
        room: Floats = np.partition(rows, chips - 1, axis=1)[:, chips - 1]
        room[np.isinf(whole)] = np.inf
        return room
