"""Which hosts of a plan talk to each other: stages to the next, replicas of a stage in a ring."""

from __future__ import annotations

from tutti.diagnose.cluster.rounds import Pair
from tutti.plan.plan import Plan, RankMap

Node = tuple[str, int]


def plan_edges(plan: Plan) -> tuple[list[Node], list[Pair]]:
    """Return a plan's nodes in the order of ranks, and the pairs of them that exchange data."""
    places = [RankMap(plan).place(rank) for rank in range(plan.num_ranks)]
    nodes = list(dict.fromkeys((p.chip.pool, p.chip.node) for p in places))
    index = {node: i for i, node in enumerate(nodes)}
    stages: dict[tuple[int, int], list[int]] = {}
    for place in places:
        node = index[place.chip.pool, place.chip.node]
        stages.setdefault((place.pipeline, place.stage), []).append(node)
    edges: set[Pair] = set()
    for (pipeline, stage), own in stages.items():
        after = stages.get((pipeline, stage + 1), [])
        for i in range(max(len(own), len(after)) if after else 0):
            edges.add((own[i % len(own)], after[i % len(after)]))
    holders: dict[int, list[int]] = {}
    for (_, stage), own in stages.items():
        holders.setdefault(stage, []).extend(own)
    for own in holders.values():
        ring = list(dict.fromkeys(own))
        edges |= {(a, b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)}
    return nodes, sorted({(min(e), max(e)) for e in edges if e[0] != e[1]})
