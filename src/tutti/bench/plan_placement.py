"""`tutti bench plan --placement`: what placing ranks is worth, the strategy being the same.

The planned chips of each pool are handed out again in another order: nodes shuffled, tensor groups
dealt out node by node, single chips dealt out or shuffled. Only *where* changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.hardware.cluster import Cluster
    from tutti.hardware.pool import Pool
    from tutti.hardware.topology import Position
    from tutti.models.spec import ModelSpec
    from tutti.plan.plan import Plan, Stage

Row = dict[str, Any]
Place = tuple[int, int, int]  # pipeline, stage, group of replicas
CLUSTER, MODEL, LENGTH, BATCH = "oversubscribed", "megatron-22b", 2048, 1024
RATIOS = (1.0, 2.0, 4.0, 7.0)
LEAVES = "0*6, 1*8, 2*3, 3*8, 4*5, 5*2"  # unequal, as other jobs leave them
DEGREES = "tp=2,pp=4,sp=1,shard=1"
SEEDS = range(5)

# Given a pool's nodes as lists of chips and the widths of its groups: the groups' chips in order.
Order = Callable[[list[list["Position"]], list[int]], "Iterator[list[Position]]"]


def run_placement(
    cluster: str = CLUSTER,
    model: str = MODEL,
    sequence_length: int = LENGTH,
    global_batch: int = BATCH,
) -> list[Row]:
    """Plan, then price the same strategy in other places."""
    from tutti.search.ask_from_values import make_problem
    from tutti.search.planner import plan
    from tutti.simulate.estimate import estimate

    problem = make_problem(
        model, cluster, sequence_length=sequence_length, global_batch=global_batch
    )
    result = plan(problem, compare=False)
    planned = result.best
    sources = problem.pinned_sources()

    def seconds(order: Order) -> float:
        moved = placed(planned.plan, problem.cluster, order)
        return estimate(moved, problem.model, problem.cluster, sources).step_seconds

    rows = [_row("planned", [planned.step_seconds], planned.step_seconds)]
    rows[0] |= {"summary": planned.summary, "cluster": cluster, "model": model}
    for name, orders in (
        ("tensor groups dealt out over the nodes", [groups_round_robin]),
        ("chips dealt out over the nodes", [chips_round_robin]),
        ("nodes in random order", [shuffled_nodes(seed) for seed in SEEDS]),
        ("chips in random order", [shuffled_chips(seed) for seed in SEEDS]),
    ):
        rows.append(_row(name, [seconds(order) for order in orders], planned.step_seconds))
    return rows


def _row(name: str, times: Sequence[float], planned: float) -> Row:
    return {
        "placement": name,
        "orders": len(times),
        "step_time_s": fmean(times),
        "best_s": min(times),
        "worst_s": max(times),
        "slower_pct": 100 * (fmean(times) / planned - 1),
    }


def placed(plan: Plan, cluster: Cluster, order: Order) -> Plan:
    """Return the plan with each pool's chips handed out to its replicas in another order."""
    chips: dict[Place, list[Position]] = {}
    for pool in cluster.pools:
        wanted = list(_copies(plan, pool.name))
        nodes = _nodes(pool)
        for (place, _), taken in zip(
            wanted, order(nodes, [width for _, width in wanted]), strict=True
        ):
            chips.setdefault(place, []).extend(taken)
    return _with_chips(plan, cluster, chips)


def packed(plan: Plan, cluster: Cluster, model: ModelSpec) -> Plan:
    """Return the plan with its stages packed into the groups of nodes under the fabric's tiers."""
    from tutti.search.strategy.group_packing import Request, Weights, pack

    asked = [
        (place, pool.name, width)
        for pool in cluster.pools
        for place, width in _copies(plan, pool.name)
    ]
    requests = [Request(place[:2], place[:2], pool, width) for place, pool, width in asked]
    stages = {(p, s): stage for p, s, stage in plan.stages()}
    element = plan.job.precision.gradients.num_bytes
    units = {at: sum(b - a for a, b in stage.units) for at, stage in stages.items()}
    token = model.hidden * plan.job.precision.stream.num_bytes * plan.job.sequence_length
    weights = Weights(
        {at: 2.0 * element * model.num_trained * n / (model.num_layers + 2)
         for at, n in units.items()},
        {at: 2.0 * token * stage.replicas[0].sequences * plan.pipelines[at[0]].micro_batches
         for at, stage in stages.items()},
    )  # fmt: skip
    taken_chips, _ = pack(requests, cluster, weights)
    chips: dict[Place, list[Position]] = {}
    for (place, _, _), taken in zip(asked, taken_chips, strict=True):
        chips.setdefault(place, []).extend(taken)
    return _with_chips(plan, cluster, chips)


def _with_chips(plan: Plan, cluster: Cluster, chips: Mapping[Place, list[Position]]) -> Plan:
    from tutti.plan.chips import ChipSet

    used = {chip for taken in chips.values() for chip in taken}
    idle = [
        chip for pool in cluster.pools for node in _nodes(pool) for chip in node
        if chip not in used
    ]  # fmt: skip
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(_moved(p, s, stage, chips) for s, stage in enumerate(pipeline.stages)),
        )
        for p, pipeline in enumerate(plan.pipelines)
    )
    return replace(plan, pipelines=pipelines, idle=ChipSet.from_ids(idle), spare=ChipSet())


def _copies(plan: Plan, pool: str) -> Iterator[tuple[Place, int]]:
    """Yield one entry per copy of a replica on a pool: its place in the plan, its chips."""
    for p, s, stage in plan.stages():
        for r, replica in enumerate(stage.replicas):
            if replica.chips.pools[0] == pool:
                yield from [((p, s, r), replica.width)] * replica.count


def _nodes(pool: Pool) -> list[list[Position]]:
    from tutti.hardware.topology import Position

    slots = range(pool.node.num_chips)
    return [[Position(pool.name, node, slot) for slot in slots] for node in range(pool.nodes)]


def _moved(p: int, s: int, stage: Stage, chips: Mapping[Place, list[Position]]) -> Stage:
    from tutti.plan.chips import ChipSet

    replicas = tuple(
        replace(replica, chips=ChipSet.from_ids(chips[p, s, r]))
        for r, replica in enumerate(stage.replicas)
    )
    return replace(stage, replicas=replicas)


# --- groups, at several oversubscriptions -------------------------------------------------------


def tiered(ratio: float) -> Cluster:
    """Return 32 nodes of eight H800 on what other jobs left of their leaves, below a spine."""
    from tutti.document import Place as Where
    from tutti.hardware.cluster import Cluster

    leaf = {"name": "leaf", "nodes": 8}
    spine = {"name": "spine", "oversubscription": ratio, "latency_s": "4 us"}
    document = {
        "name": f"tiered-{ratio:g}",
        "pools": [{"name": "h800", "node": "HGX-H800", "nodes": 32, "leaves": LEAVES}],
        "fabric": {"rail_optimized": True, "tiers": [leaf, spine]},
    }
    return Cluster.from_document(document, Where("tiered"))


def run_ratios(model: str = MODEL, ratios: Sequence[float] = RATIOS) -> list[Row]:
    """Place one strategy by groups, first-fit and at random; price it, and send its flows."""
    from tutti.models.load import load_model
    from tutti.plan.job import Job
    from tutti.plan.uniform import Degrees, uniform_plan

    spec, rows = load_model(model), []
    for ratio in ratios:
        cluster = tiered(ratio)
        job = Job(sequence_length=LENGTH, global_batch=BATCH)
        first = uniform_plan(spec, cluster, job, Degrees.parse(DEGREES))
        ways = {
            "groups": [packed(first, cluster, spec)],
            "first-fit": [first],
            "random order": [placed(first, cluster, shuffled_nodes(seed)) for seed in SEEDS],
        }
        times = {name: [_step(plan, spec, cluster) for plan in plans]
                 for name, plans in ways.items()}  # fmt: skip
        best = fmean(priced for priced, _ in times["groups"])
        for name, priced_runs in times.items():
            row = _row(name, [priced for priced, _ in priced_runs], best)
            flows = fmean(replayed for _, replayed in priced_runs)
            rows.append(row | {"oversubscription": ratio, "flows_s": flows, "model": model,
                               "degrees": DEGREES})  # fmt: skip
    return rows


def _step(plan: Plan, model: ModelSpec, cluster: Cluster) -> tuple[float, float]:
    """Return a step as it is priced, and with what its traffic takes flow by flow."""
    from tutti.cost.plan.sources import Sources
    from tutti.fabric.wiring import wire
    from tutti.simulate.estimate import estimate
    from tutti.simulate.fabric_step import plans_on_fabric
    from tutti.simulate.plan_traffic import plan_traffic

    estimated, wiring = estimate(plan, model, cluster, Sources()), wire(cluster)
    (sent,) = plans_on_fabric(["plan"], [estimated], [plan_traffic(estimated, wiring)], wiring)
    return estimated.step_seconds, sent.together_s


def ratio_table(rows: Sequence[Row]) -> Table:
    """Return the placements by oversubscription."""
    from rich import box
    from rich.table import Table

    from tutti.search.answer.explanation import step_text

    title = f"{rows[0]['model']}, {rows[0]['degrees']}, 32 nodes on leaves {LEAVES}"
    table = Table(box=box.SIMPLE, title=title)
    table.add_column("spine")
    table.add_column("placement")
    for name in ("step, priced", "flow by flow", "slower"):
        table.add_column(name, justify="right")
    for row in rows:
        slower = f"{row['slower_pct']:+.1f} %" if row["placement"] != "groups" else "–"
        table.add_row(f"{row['oversubscription']:g}:1", row["placement"],
                      step_text(row["step_time_s"]), step_text(row["flows_s"]), slower)  # fmt: skip
    return table


# --- orders ------------------------------------------------------------------------------------


def _in_order(chips: Sequence[Position], widths: list[int]) -> Iterator[list[Position]]:
    start = 0
    for width in widths:
        yield list(chips[start : start + width])
        start += width


def chips_round_robin(nodes: list[list[Position]], widths: list[int]) -> Iterator[list[Position]]:
    """Deal single chips out: the first of every node, then the second."""
    dealt = [chip for row in zip(*nodes, strict=True) for chip in row]
    return _in_order(dealt, widths)


def groups_round_robin(nodes: list[list[Position]], widths: list[int]) -> Iterator[list[Position]]:
    """Deal whole groups out, each to the next node that has room for it."""
    free = [list(node) for node in nodes]
    at = 0
    for width in widths:
        roomy = [n for n in range(at, at + len(free)) if len(free[n % len(free)]) >= width]
        if not roomy:  # wider than what is left of any node: chips from several
            rest = [chip for node in free for chip in node]
            taken = rest[:width]
            free = [[chip for chip in node if chip not in taken] for node in free]
            yield taken
            continue
        node = roomy[0] % len(free)
        taken, free[node] = free[node][:width], free[node][width:]
        at = node + 1
        yield taken


def shuffled_nodes(seed: int) -> Order:
    """Return the nodes in a random order, their chips in line."""

    def order(nodes: list[list[Position]], widths: list[int]) -> Iterator[list[Position]]:
        mixed = random.Random(seed).sample(nodes, len(nodes))
        return _in_order([chip for node in mixed for chip in node], widths)

    return order


def shuffled_chips(seed: int) -> Order:
    """Return all chips in a random order."""

    def order(nodes: list[list[Position]], widths: list[int]) -> Iterator[list[Position]]:
        chips = [chip for node in nodes for chip in node]
        return _in_order(random.Random(seed).sample(chips, len(chips)), widths)

    return order


def placement_table(rows: Sequence[Row]) -> Table:
    """Return the placements, the planned one first."""
    from rich import box
    from rich.table import Table

    from tutti.search.answer.explanation import step_text

    first = rows[0]
    title = f"{first['model']} on {first['cluster']}: {first['summary']}"
    table = Table(box=box.SIMPLE, title=title)
    table.add_column("placement of the same strategy")
    for name in ("orders", "step, mean", "best", "worst", "slower"):
        table.add_column(name, justify="right")
    for row in rows:
        times = (step_text(row[key]) for key in ("step_time_s", "best_s", "worst_s"))
        slower = f"{row['slower_pct']:+.1f} %" if row is not first else "–"
        table.add_row(row["placement"], str(row["orders"]), *times, slower)
    return table
