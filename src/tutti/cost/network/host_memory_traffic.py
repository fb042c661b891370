"""The host memory of a node, shared by what forwards through it and what is kept in it.

Traffic over a host-forwarded link passes the host's memory on its way; offloaded state and
activations lie in it. Where a node does both in a step, each of its chips has two lanes that use
the memory, one for copies and one for forwarding, and every lane gets an equal share of the
bandwidth. A node that does only one of them divides it by its chips alone. So do activations on
a node that hands no boundary over such a link: gradients pass there once, at the end of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tutti.cost.memory.rank_state import HolderIndex
from tutti.cost.network.group_links import GroupLinks, Wire, link_of
from tutti.cost.network.stage_boundaries import telling_transfers
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossKind
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Offload, Plan, Stage, chunks
from tutti.schedule.boundary import Boundary

Node = tuple[str, int]  # pool, number

_NOTHING = Offload()


class HostMemory:
    """Which nodes of a plan forward, which offload, and what bandwidth a lane then has."""

    def __init__(self, plan: Plan, cluster: Cluster, index: HolderIndex) -> None:
        self._plan = plan
        self._cluster = cluster
        self._index = index
        self._forwarded = frozenset(_forwarded_pairs(plan, cluster))
        self._both: frozenset[Node] = frozenset()
        self._always: frozenset[Node] = frozenset()  # those that forward with every micro-batch
        offloading = frozenset(
            node
            for _, _, stage in plan.stages()
            for replica in stage.replicas
            if replica.offload != _NOTHING
            for node in _nodes(replica.chips)
        )
        if offloading and self._forwarded:
            self._always = offloading & _nodes_of(self._boundaries())
            self._both = self._always | (offloading & _nodes_of(self._holders()))

    @property
    def sharing(self) -> object:
        """Which nodes' lanes share their host's memory; plans alike in it have the same lanes."""
        return (self._always, self._both)

    def lane_bandwidth(self, chips: ChipSet, *, activations: bool = False) -> float:
        """Return what one lane of the slowest of these chips has of its host's memory."""
        both = self._always if activations else self._both
        rates = []
        for pool in chips.pools:
            node = self._cluster.pool(pool).node
            fair = node.host.memory_bandwidth * node.hosts / node.num_chips
            shared = both and any(n[0] == pool and n in both for n in _nodes(chips))
            rates.append(fair / (2 if shared else 1))
        return min(rates)

    def capped(self, links: GroupLinks, stages: Iterable[Stage]) -> GroupLinks:
        """Return a group's links with what they forward limited by the hosts' memory."""
        if not any(wire.host_forwarded for _, wire in links.wires):
            return links
        rate = min(self.lane_bandwidth(stage.chips) for stage in stages)

        def limited(wire: Wire) -> Wire:
            slower = wire.host_forwarded and wire.bandwidth > rate
            return replace(wire, bandwidth=rate) if slower else wire

        wires = tuple((edge, limited(wire)) for edge, wire in links.wires)
        reach = None if links.reach is None else links.reach.forwarding_at(rate)
        return replace(links, wires=wires, reach=reach)

    def _boundaries(self) -> Iterator[tuple[Stage, ...]]:
        """Yield stages that hand something over a forwarded link."""
        for pipeline in self._plan.pipelines:
            for lower, upper in itertools.pairwise(chunks(pipeline)):
                ends = (pipeline.stages[lower.stage], pipeline.stages[upper.stage])
                wire = Boundary(*ends, self._plan.job.sequence_length)
                if self._meets(ends) and forwards(wire, self._cluster):
                    yield ends

    def _holders(self) -> Iterator[tuple[Stage, ...]]:
        """Yield stages that reduce over one."""
        last = max(stop for _, _, stage in self._plan.stages() for _, stop in stage.units)
        for holders in {id(h): h for h in map(self._index.of, range(last))}.values():
            stages = tuple(stage for _, _, stage in holders)
            if self._meets(stages):
                yield stages

    def _meets(self, stages: Iterable[Stage]) -> bool:
        pools = {pool for stage in stages for pool in stage.chips.pools}
        return any(pair <= pools for pair in self._forwarded)


def _forwarded_pairs(plan: Plan, cluster: Cluster) -> Iterator[frozenset[str]]:
    used = dict.fromkeys(pool for _, _, stage in plan.stages() for pool in stage.chips.pools)
    for home, away in itertools.combinations(used, 2):
        if cluster.cross_link(home, away).kind is CrossKind.HOST_FORWARDED:
            yield frozenset((home, away))


def forwards(wire: Boundary, cluster: Cluster) -> bool:
    """Tell whether anything of a boundary tensor passes through a host's memory."""
    senders, receivers = wire.sender.chips, wire.receiver.chips
    return any(
        link_of(cluster, senders.at(sender), receivers.at(receiver)).host_forwarded
        for transfers in telling_transfers(wire)
        for sender, receiver, _, _ in transfers
    )


def _nodes_of(groups: Iterable[tuple[Stage, ...]]) -> frozenset[Node]:
    return frozenset(node for stages in groups for stage in stages for node in _nodes(stage.chips))


def _nodes(chips: ChipSet) -> Iterator[Node]:
    for r in chips.ranges:
        for node in range(r.first_node, r.last_node + 1):
            yield r.pool, node
