"""One form of every question: equal pools joined, all in an order that their contents give.

Two pools are one to the search where nothing tells their nodes apart: equal nodes, stack, price and
watts, equal links to every other pool, and between them what joins nodes of one pool. A plan for
the joined pools is given back in the names that the user wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossKind, CrossLink
from tutti.hardware.node import node_document
from tutti.hardware.pool import Pool
from tutti.hardware.topology import Position
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster
from tutti.plan.plan import Plan, Replica, Stage
from tutti.search.question.space import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalQuestion:
    """A question in its one form, and how its answer is given back."""

    asked: Problem
    problem: Problem
    members: Mapping[str, tuple[Pool, ...]]  # pool of the one form → pools as they were written

    @property
    def is_joined(self) -> bool:
        """Whether pools were joined: then a plan names other chips."""
        return any(len(pools) > 1 for pools in self.members.values())

    def restored(self, plan: Plan) -> Plan | None:
        """Return a plan in the user's names; None where a replica's chips lie in two pools."""
        pipelines = []
        for pipeline in plan.pipelines:
            stages = [self._stage(stage) for stage in pipeline.stages]
            kept = tuple(stage for stage in stages if stage is not None)
            if len(kept) < len(stages):
                return None
            pipelines.append(replace(pipeline, stages=kept))
        used = {chip for p in pipelines for stage in p.stages for chip in stage.chips}
        idle = (chip for chip in _chips(self.asked.cluster.pools) if chip not in used)
        return replace(
            plan,
            cluster=refer_to_cluster(self.asked.cluster),
            pipelines=tuple(pipelines),
            idle=ChipSet.from_ids(idle),
        )

    def _stage(self, stage: Stage) -> Stage | None:
        replicas: list[Replica] = []
        for replica in stage.replicas:
            chips = [self._chip(chip) for chip in replica.chips]
            width, first = replica.width, 0
            copies = [chips[i : i + width] for i in range(0, len(chips), width)]
            if any(len({chip.pool for chip in copy}) > 1 for copy in copies):
                return None
            for i in range(1, len(copies) + 1):
                if i == len(copies) or copies[i][0].pool != copies[first][0].pool:
                    own = ChipSet.from_ids(chip for copy in copies[first:i] for chip in copy)
                    replicas.append(replace(replica, chips=own, count=i - first))
                    first = i
        return replace(stage, replicas=tuple(replicas))

    def _chip(self, chip: Position) -> Position:
        node = chip.node
        for pool in self.members[chip.pool]:
            if node < pool.nodes:
                return Position(pool.name, node, chip.slot)
            node -= pool.nodes
        raise ValueError(f"{chip} is beyond the pools that '{chip.pool}' was joined from")


def _chips(pools: Iterable[Pool]) -> Iterable[Position]:
    for pool in pools:
        for node in range(pool.nodes):
            yield from (Position(pool.name, node, slot) for slot in range(pool.node.num_chips))


def canonical_question(problem: Problem) -> CanonicalQuestion:
    """Return a question in its one form."""
    cluster, space = problem.used_cluster(), problem.space
    # Where the space says which pools may meet, and where others must run the plan, names count.
    joins = space.mixed_stages and space.mixed_pipelines and space.exportable is None
    groups: list[list[Pool]] = []
    for pool in sorted(cluster.pools, key=lambda pool: _content(cluster, pool)):
        home = next((g for g in groups if all(_are_one(cluster, pool, one) for one in g)), None)
        if home is None or not joins:
            groups.append([pool])
        else:
            home.append(pool)
    for group in groups:
        group.sort(key=lambda pool: (-pool.nodes, pool.name))
    joined = [replace(g[0], nodes=sum(pool.nodes for pool in g)) for g in groups]
    joined.sort(key=lambda pool: _content(cluster, pool))
    members = {group[0].name: tuple(group) for group in groups}
    links = tuple(
        link for link in cluster.fabric.links if all(name in members for name in link.pools)
    )
    one = replace(cluster, pools=tuple(joined), fabric=replace(cluster.fabric, links=links))
    form = replace(problem, cluster=one, space=replace(space, pools=None))
    return CanonicalQuestion(asked=problem, problem=form, members=members)


def _content(cluster: Cluster, pool: Pool) -> tuple[object, ...]:
    """Return what orders pools: the chip's name, then whatever tells them apart."""
    document = json.dumps(node_document(pool.node), sort_keys=True, default=str)
    links = sorted(
        json.dumps([_link_text(link), cluster.pool(other).chip.name, cluster.pool(other).nodes])
        for link in cluster.fabric.links
        if pool.name in link.pools
        for other in link.pools
        if other != pool.name
    )
    return (pool.chip.name, document, -pool.nodes, pool.stack, str(pool.price_per_chip_hour),
            str(pool.watts), str(pool.leaves), links)  # fmt: skip


def _link_text(link: CrossLink) -> str:
    return str(replace(link, pools=("", "-")))


def _are_one(cluster: Cluster, one: Pool, other: Pool) -> bool:
    """Tell whether nothing distinguishes the nodes of two pools."""
    alike = replace(other, name=one.name, nodes=one.nodes, leaves=one.leaves)
    if (
        len(one.leaves)
        or len(other.leaves)
        or alike != one
        or not _joins_like_nodes(cluster, cluster.cross_link(one.name, other.name))
    ):
        return False
    rest: Sequence[str] = [p.name for p in cluster.pools if p.name not in (one.name, other.name)]
    return all(
        _link_text(cluster.cross_link(one.name, name))
        == _link_text(cluster.cross_link(other.name, name))
        for name in rest
    )


def _joins_like_nodes(cluster: Cluster, link: CrossLink) -> bool:
    """Tell whether a link between pools is what nodes of one pool have between them."""
    tiers = cluster.fabric.tiers
    return (
        len(tiers) == 1
        and tiers[0].nodes is None
        and link.kind is CrossKind.DIRECT
        and link.bandwidth is None
        and link.nic_fraction in (None, 1.0)
        and link.latency_s in (None, tiers[0].latency_s)
    )
