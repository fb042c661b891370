"""Other questions with the same answer, and questions to which the answer can only be better.

Forms: pools in another order, under other names, one pool written as two. More: a node, memory,
faster links, a wider space. What is feasible with less is feasible with more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tutti.bench.judge.questions import DrawnQuestion
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossLink
from tutti.hardware.node import NodeType
from tutti.hardware.pool import Pool
from tutti.search.ask_from_values import Limits

MORE_MEMORY = 1.5
MORE_BANDWIDTH = 2.0
# One of these spaces is asked beside the whole one, by the question's number.
NARROW = (
    ("tp ≤ 2", Limits(tp_max=2)),
    ("pools apart", Limits(mixed_pipelines=False)),
    ("no offload", Limits(offload=False)),
    ("no interleaving", Limits(schedules=("1f1b", "zero_bubble"))),
    ("shard ≤ 1", Limits(shard=(0, 1))),
    ("cp = 1", Limits(cp_max=1)),
)


def forms(question: DrawnQuestion) -> Iterator[tuple[str, Cluster]]:
    """Yield the same cluster, written otherwise."""
    cluster = question.cluster
    yield "order", replace(cluster, pools=tuple(reversed(cluster.pools)))
    count = len(cluster.pools)
    names = {pool.name: f"unit{count - i}" for i, pool in enumerate(cluster.pools)}
    yield "names", _renamed(cluster, names)
    split = split_pool(cluster)
    if split is not None:
        yield "splitting", split


def _renamed(cluster: Cluster, names: dict[str, str]) -> Cluster:
    pools = tuple(replace(pool, name=names[pool.name]) for pool in cluster.pools)
    links = tuple(
        replace(link, pools=(names[link.pools[0]], names[link.pools[1]]))
        for link in cluster.fabric.links
    )
    return replace(cluster, pools=pools, fabric=replace(cluster.fabric, links=links))


def split_pool(cluster: Cluster) -> Cluster | None:
    """Return the cluster with its largest pool written as two halves; None where none can be.

    Where nodes of a pool share leaves, two pools are another network than one.
    """
    if len(cluster.fabric.tiers) > 1:
        return None
    largest = max(cluster.pools, key=lambda pool: (pool.nodes, pool.name))
    if largest.nodes < 2:
        return None
    half = largest.nodes // 2
    parts = (
        largest.of_nodes(range(half)),
        replace(largest.of_nodes(range(half, largest.nodes)), name=f"{largest.name}-rest"),
    )
    pools: list[Pool] = []
    for pool in cluster.pools:
        pools += parts if pool is largest else (pool,)
    links: list[CrossLink] = list(cluster.fabric.links)
    for link in cluster.fabric.links:
        if largest.name in link.pools:
            other = next(name for name in link.pools if name != largest.name)
            links.append(replace(link, pools=(parts[1].name, other)))
    fabric = replace(cluster.fabric, links=tuple(links))
    return replace(cluster, pools=tuple(pools), fabric=fabric)


def more(question: DrawnQuestion) -> Iterator[tuple[str, Cluster]]:
    """Yield clusters that can do all that the question's can."""
    cluster = question.cluster
    grown = cluster.pools[question.number % len(cluster.pools)]
    pools = tuple(
        pool.of_nodes([None] * (pool.nodes + 1)) if pool is grown else pool
        for pool in cluster.pools
    )
    if grown.node.all_reach_a_nic:
        yield "a node", replace(cluster, pools=pools)
    pools = tuple(replace(pool, node=_with_memory(pool.node)) for pool in cluster.pools)
    yield "memory", replace(cluster, pools=pools)
    yield "links", _faster(cluster)


def _with_memory(node: NodeType) -> NodeType:
    chip = replace(node.chip, memory_bytes=MORE_MEMORY * node.chip.memory_bytes)
    return replace(node, chip=chip)


def _faster(cluster: Cluster) -> Cluster:
    """Return the cluster with faster NICs and links between pools."""
    pools = tuple(
        replace(
            pool,
            node=replace(
                pool.node,
                nics=tuple(replace(n, rate=MORE_BANDWIDTH * n.rate) for n in pool.node.nics),
            ),
        )
        for pool in cluster.pools
    )
    links = tuple(
        link if link.bandwidth is None
        else replace(link, bandwidth=MORE_BANDWIDTH * link.bandwidth)
        for link in cluster.fabric.links
    )  # fmt: skip
    return replace(cluster, pools=pools, fabric=replace(cluster.fabric, links=links))


def narrow(question: DrawnQuestion) -> tuple[str, Limits]:
    """Return a space that is narrower than the question's."""
    return NARROW[question.number % len(NARROW)]
