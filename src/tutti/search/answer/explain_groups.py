"""Where a plan's stages lie on a fabric whose tiers limit what crosses them, in words."""

from __future__ import annotations

from collections.abc import Iterator

from tutti.cost.network.reach import limits_of
from tutti.hardware.cluster import Cluster
from tutti.plan.plan import Plan, Stage
from tutti.search.strategy.group_packing import Path, node_paths
from tutti.units import many


def groups_text(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Say how many stages stay below each tier, and which boundaries cross it."""
    if limits_of(cluster) is None:
        return
    paths = {pool.name: node_paths(cluster, pool) for pool in cluster.pools}
    held = [_groups(stage, paths) for _, _, stage in plan.stages()]
    tiers = cluster.fabric.tiers
    said = []
    for tier in range(len(tiers) - 1):
        depth = len(tiers) - 1 - tier
        inside = sum(len({path[:depth] for path in groups}) == 1 for groups in held)
        said.append(f"{inside} below {tiers[tier + 1].name}")
    apart = sum(
        not (_groups(one, paths) & _groups(two, paths))
        for pipeline in plan.pipelines
        for one, two in zip(pipeline.stages, pipeline.stages[1:], strict=False)
    )
    wires = f"{many(apart, 'boundary', 'boundaries')} between stages cross leaves"
    yield (
        f"The fabric's tiers limit what crosses them: of {many(len(held), 'stage')} "
        f"{' and '.join(said)} keep their gradients there; {wires}."
    )


def _groups(stage: Stage, paths: dict[str, list[Path]]) -> set[Path]:
    return {
        paths[part.pool][node]
        for part in stage.chips.ranges
        for node in range(part.first_node, part.last_node + 1)
    }
