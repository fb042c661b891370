"""The cluster map: every chip of every node of every pool as a cell, coloured by its stage.

Python says which replica each chip belongs to and its place in it; the script lays the nodes out
for the width that there is, and works out the words when a chip is pointed at.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tutti.hardware.cluster import Cluster
from tutti.hardware.node import NodeType
from tutti.hardware.pool import Pool
from tutti.plan.chips import ChipSet
from tutti.plan.drawing import units_text
from tutti.plan.plan import Plan
from tutti.report.binary import Pack
from tutti.report.page import Section, escape
from tutti.report.palette import StageColor, stage_color
from tutti.units import many, rate_text

_IDLE, _SPARE, _FIRST_GROUP = 0, 1, 2  # what `owner` says of a chip

Indices = npt.NDArray[np.int64]


def cluster_map_section(
    plan: Plan, cluster: Cluster, arrays: Pack, *, name: str = "map"
) -> Section:
    """Return the map; its arrays go into `arrays`."""
    groups = [
        (p, s, r, replica)
        for p, s, stage in plan.stages()
        for r, replica in enumerate(stage.replicas)
    ]
    sets = [plan.spare, *(replica.chips for *_, replica in groups)]
    pools = []
    for index, pool in enumerate(cluster.pools):
        owner = np.full(pool.num_chips, _IDLE, dtype=np.int64)
        place = np.zeros(pool.num_chips, dtype=np.int64)
        for number, chips in enumerate(sets):
            where, order = _chips_in(pool, chips)
            owner[where] = number + _SPARE
            place[where] = order
        pools.append(
            {
                "name": pool.name,
                "chip": pool.chip.name,
                "nodes": pool.nodes,
                "blocks": _blocks(pool.node),
                "owner": arrays.add(f"{name}.{index}.owner", owner),
                "place": arrays.add(f"{name}.{index}.place", place),
            }
        )
    return Section(
        id=name,
        heading="Cluster map",
        intro="Every chip is a cell, every box a node; frames inside join chips with native links. "
        "The colour is the pipeline stage.",
        body='<ul class="legend" data-role="legend"></ul>'
        f'<div class="pools">{"".join(map(_figure, cluster.pools))}</div>',
        scripts=("cluster.js",),
        data={"part": "cluster", "pools": pools, "groups": _groups(plan)},
    )


def stage_colors(plan: Plan) -> dict[tuple[int, int], StageColor]:
    """Return (pipeline, stage) → colour."""
    longest = max(len(pipeline.stages) for pipeline in plan.pipelines)
    return {(p, s): stage_color(s, longest, p, len(plan.pipelines)) for p, s, _ in plan.stages()}


def _groups(plan: Plan) -> list[list[object]]:
    """Return per group of equal replicas what the script says of its chips."""
    colors = stage_colors(plan)
    last_unit = max(stop for _, _, stage in plan.stages() for _, stop in stage.units) - 1
    groups: list[list[object]] = []
    for p, s, stage in plan.stages():
        before, units = 0, units_text(stage.units, last_unit)
        color = colors[p, s]
        for replica in stage.replicas:
            groups.append(
                [p, s, before, stage.num_replicas, replica.tp, replica.cp, replica.sequences,
                 units, color.hue, color.lighter]
            )  # fmt: skip
            before += replica.count
    return groups


def _chips_in(pool: Pool, chips: ChipSet) -> tuple[Indices, Indices]:
    """Return where a set's chips lie in a pool (node by node), and their places in the set."""
    where, order, before = [], [], 0
    for span in chips.ranges:
        if span.pool == pool.name:
            nodes = np.arange(span.first_node, span.last_node + 1) * pool.node.num_chips
            slots = np.arange(span.first_slot, span.last_slot + 1)
            where.append((nodes[:, None] + slots[None, :]).reshape(-1))
            order.append(np.arange(before, before + span.size))
        before += span.size
    nothing = np.zeros(0, dtype=np.int64)
    return np.concatenate([nothing, *where]), np.concatenate([nothing, *order])


def _blocks(node: NodeType) -> list[list[object]]:
    """Return the node's islands, each with its slots; chips without native links stand last."""
    blocks: list[list[object]] = [
        [f"{island.kind} island", list(island.slots)] for island in node.islands
    ]
    inside = {slot for island in node.islands for slot in island.slots}
    loose = [slot for slot in range(node.num_chips) if slot not in inside]
    return blocks + ([["", loose]] if loose else [])


def _figure(pool: Pool) -> str:
    node = pool.node
    nodes = f"{many(pool.nodes, 'node')} of {node.num_chips}"
    kinds = dict.fromkeys(f"{island.kind} {rate_text(island.bandwidth)}" for island in node.islands)
    words = [f"{pool.num_chips:,} × {pool.chip.name}", nodes, *kinds]
    if len(node.islands) > 1:
        words.append(f"{len(node.islands)} islands per node")
    if node.nics:
        words.append(f"network {rate_text(node.nic_bandwidth / node.num_chips)} per chip")
    return (
        f'<figure class="pool"><figcaption><b>{escape(pool.name)}</b> '
        f"{escape(' · '.join(words))}</figcaption>"
        '<canvas role="img" tabindex="0"></canvas></figure>'
    )
