"""A cluster of which single chips are gone or slow, as a cluster of equal pools.

A pool holds equal nodes. So nodes that lost chips, slow chips, and those behind a slow wire
become pools of their own, and every chip has two places: the real one, in the cluster file, and the
one in the parts. A plan is searched for the parts and brought back to the real places, and a
running one is brought to the parts, so that both are priced by what the chips can do now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tutti.hardware.chip import Chip
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossLink
from tutti.hardware.node import Island, Nic, NodeType
from tutti.hardware.pool import Pool
from tutti.hardware.slots import Slots
from tutti.hardware.topology import Position, default_cross_link
from tutti.hardware.wires import chips_of_wire, scaled_link
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster
from tutti.plan.plan import Plan, Replica, Stage

Wires = Mapping[tuple[str, ...], float]  # a wire, or the two that a link joins: times as long


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What is slower about a chip than its pool says, and how many times."""

    chip: float = 1.0
    wire: float = 1.0
    links: tuple[tuple[tuple[str, ...], int], ...] = ()  # slow ones, and at which end of each


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Some slots of some nodes of a pool, all alike."""

    pool: Pool
    slots: tuple[int, ...]
    state: _State
    nodes: tuple[int, ...]
    name: str = ""

    @property
    def is_whole(self) -> bool:
        quick = self.state.chip == self.state.wire == 1.0
        return len(self.slots) == self.pool.node.num_chips and quick


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterParts:
    """The parts of a cluster, and where each chip is in them."""

    real: Cluster
    cluster: Cluster
    places: Mapping[Position, Position]  # of a real chip in the parts

    def to_real(self, plan: Plan) -> Plan:
        """Return a plan for the parts as one for the real cluster."""
        back = {there: here for here, there in self.places.items()}
        moved = _moved(plan, back)
        assert moved is not None
        used = {chip for _, _, stage in moved.stages() for chip in stage.chips}
        idle = ChipSet.from_ids(chip for chip in _chips(self.real) if chip not in used)
        return replace(
            moved, cluster=refer_to_cluster(self.real), idle=idle, spare=ChipSet(),
            profiles=(), collectives=(), routes=(),
        )  # fmt: skip

    def from_real(self, plan: Plan) -> Plan | None:
        """Return a plan for the real cluster as one for the parts; None where it cannot be one.

        Copies of a stage that are of unlike parts become replicas of their own; a copy across parts
        has no price, and a chip that is gone has no place.
        """
        moved = _moved(plan, self.places)
        if moved is None:
            return None
        names = {pool.name for pool in self.cluster.pools}
        alike = [len(s.replicas) for _, _, s in plan.stages()] == [
            len(s.replicas) for _, _, s in moved.stages()
        ]
        return replace(
            moved, cluster=refer_to_cluster(self.cluster), idle=ChipSet(), spare=ChipSet(),
            profiles=tuple(p for p in plan.profiles if p.pool in names), collectives=(), routes=(),
            synchronisation=tuple(
                rule if alike else replace(rule, shares=()) for rule in plan.synchronisation
            ),
        )  # fmt: skip


def cluster_parts(
    cluster: Cluster,
    lost: Iterable[Position] = (),
    slow: Mapping[Position, float] | None = None,
    wires: Wires | None = None,
) -> ClusterParts | None:
    """Return the parts of a cluster without some chips; `slow` ones take so many times as long.

    So does what goes over slow `wires`, or over the links between two. None where nothing is left.
    """
    gone, states = frozenset(lost), _states(cluster, slow or {}, wires or {})
    parts = [part for pool in cluster.pools for part in _parts(pool, gone, states)]
    if not parts:
        return None
    places = {
        Position(part.pool.name, node, slot): Position(part.name, n, s)
        for part in parts
        for n, node in enumerate(part.nodes)
        for s, slot in enumerate(part.slots)
    }
    made = replace(
        cluster,
        summary=f"what is left of {cluster.name}",
        pools=tuple(_pool(part) for part in parts),
        fabric=replace(cluster.fabric, links=tuple(_links(cluster, parts, wires or {}))),
    )
    return ClusterParts(real=cluster, cluster=made, places=places)


def _chips(cluster: Cluster) -> Iterator[Position]:
    for pool in cluster.pools:
        for node in range(pool.nodes):
            for slot in range(pool.node.num_chips):
                yield Position(pool.name, node, slot)


# --- the parts -----------------------------------------------------------------------------------


def _states(
    cluster: Cluster, slow: Mapping[Position, float], wires: Wires
) -> dict[Position, _State]:
    states = {chip: _State(chip=factor) for chip, factor in slow.items()}
    for ends, factor in wires.items():
        for end, name in enumerate(ends):
            for chip in chips_of_wire(cluster, name):
                own = states.get(chip, _State())
                if len(ends) == 1:
                    states[chip] = replace(own, wire=own.wire * factor)
                else:
                    states[chip] = replace(own, links=(*own.links, (ends, end)))
    return states


def _parts(pool: Pool, gone: frozenset[Position], states: Mapping[Position, _State]) -> list[_Part]:
    """Return a pool's parts; the largest keeps its name."""
    nodes: dict[tuple[tuple[int, ...], _State], list[int]] = {}
    for node in range(pool.nodes):
        alike: dict[_State, list[int]] = {}
        for slot in range(pool.node.num_chips):
            chip = Position(pool.name, node, slot)
            if chip not in gone:
                alike.setdefault(states.get(chip, _State()), []).append(slot)
        for state, slots in alike.items():
            nodes.setdefault((tuple(slots), state), []).append(node)
    parts = [
        _Part(pool=pool, slots=slots, state=state, nodes=tuple(numbers))
        for (slots, state), numbers in nodes.items()
    ]
    parts.sort(key=lambda part: (not part.is_whole, -len(part.nodes) * len(part.slots)))
    return [
        replace(part, name=pool.name if index == 0 else f"{pool.name}+{index}")
        for index, part in enumerate(parts)
    ]


def _pool(part: _Part) -> Pool:
    pool = replace(part.pool.of_nodes(part.nodes), name=part.name)
    if part.is_whole:
        return pool
    node = part.pool.node
    chip = node.chip if part.state.chip == 1.0 else _slowed(node.chip, part)
    islands = tuple(
        replace(island, slots=kept)
        for island in node.islands
        if (kept := _kept(part, island)) is not None and len(kept) > 1
    )
    nics = [
        replace(
            nic,
            slots=kept if kept is not None else Slots(()),
            rate=nic.rate / part.state.wire,
        )
        for nic in node.nics
        for kept in [_kept(part, nic) if len(nic.slots) else None]
        if kept is not None or not len(nic.slots)
    ]
    smaller = replace(
        node, name=f"{node.name}.{part.name}", chip=chip, num_chips=len(part.slots),
        islands=islands, nics=tuple(nics), hosts=1,
    )  # fmt: skip
    return replace(pool, node=smaller)


def _slowed(chip: Chip, part: _Part) -> Chip:
    """Return a chip that takes longer for everything; found by its old name in calibrations."""
    factor = part.state.chip
    return replace(
        chip,
        name=f"{chip.name}.{part.name}",
        aliases=(chip.name, *chip.aliases),
        sustained=chip.sustained / factor,
        memory_bandwidth=chip.memory_bandwidth / factor,
        launch_overhead_s=chip.launch_overhead_s * factor,
        slowdown=chip.slowdown * factor if chip.slowdown is not None else None,
    )


def _kept(part: _Part, owner: Island | Nic) -> Slots | None:
    numbers = tuple(new for new, old in enumerate(part.slots) if old in owner.slots)
    return Slots(numbers) if numbers else None


def _links(cluster: Cluster, parts: list[_Part], wires: Wires) -> Iterator[CrossLink]:
    """Yield the links between parts: as between their pools, or as inside of their pool."""
    for index, one in enumerate(parts):
        for other in parts[index + 1 :]:
            pair, alike = (one.name, other.name), one.pool is other.pool
            if alike and set(one.nodes) & set(other.nodes):
                yield _inside(one, pair)
                continue
            written = [k for k in cluster.fabric.links if k.joins(one.pool.name, other.pool.name)]
            factor = _between(one, other, wires)
            if not written and factor == 1.0:
                continue
            link = CrossLink(pools=pair) if alike else default_cross_link(one.pool, other.pool)
            link = written[0] if written else link
            if link.bandwidth is not None and not link.same_host:  # says nothing of NICs
                factor *= max(one.state.wire, other.state.wire)
            if link.same_host:
                factor = 1.0
            yield replace(scaled_link(link, one.pool, other.pool, 1 / factor), pools=pair)


def _between(one: _Part, other: _Part, wires: Wires) -> float:
    """Return by how much the links between two parts are slower than their wires."""
    factor = 1.0
    for ends, end in one.state.links:
        if (ends, 1 - end) in other.state.links:
            factor *= wires[ends]
    return factor


def _inside(part: _Part, pair: tuple[str, str]) -> CrossLink:
    """Return the link between chips of one node that are of unlike parts."""
    node: NodeType = part.pool.node
    island = node.island_of(part.slots[0])
    if island is not None:
        return CrossLink(
            pools=pair,
            bandwidth=island.between_pair,
            latency_s=island.latency_s,
            same_host=True,
        )
    bridge = node.effective_bridge
    return CrossLink(
        pools=pair, bandwidth=bridge.bandwidth, latency_s=bridge.latency_s, same_host=True
    )


# --- plans ---------------------------------------------------------------------------------------


def _moved(plan: Plan, places: Mapping[Position, Position]) -> Plan | None:
    """Return a plan with its chips elsewhere; None where one has no place."""
    pipelines = []
    for pipeline in plan.pipelines:
        stages = [_moved_stage(stage, places) for stage in pipeline.stages]
        whole = tuple(stage for stage in stages if stage is not None)
        if len(whole) < len(stages):
            return None
        pipelines.append(replace(pipeline, stages=whole))
    return replace(plan, pipelines=tuple(pipelines))


def _moved_stage(stage: Stage, places: Mapping[Position, Position]) -> Stage | None:
    replicas = list[Replica]()
    for replica in stage.replicas:
        chips = [places.get(chip) for chip in replica.chips]
        there = [chip for chip in chips if chip is not None]
        if len(there) < len(chips):
            return None
        copies = [there[at : at + replica.width] for at in range(0, len(there), replica.width)]
        if any(len({chip.pool for chip in copy}) > 1 for copy in copies):
            return None
        runs = list[list[list[Position]]]()
        for copy in copies:
            if runs and runs[-1][0][0].pool == copy[0].pool:
                runs[-1].append(copy)
            else:
                runs.append([copy])
        replicas += [
            replace(
                replica,
                count=len(run),
                chips=ChipSet.from_ids(chip for copy in run for chip in copy),
            )
            for run in runs
        ]
    if stage.experts and len(replicas) != len(stage.replicas):
        return None
    return replace(stage, replicas=tuple(replicas))
