"""A plan's step as its neighbours on a fabric see it: how long, how much goes where, how it feels.

All that a plan sends between nodes in a step, added up chip by chip; for how much of the step any
of it is under way; and how much longer the step gets for each second by which sending does: what
hides behind computing is not felt. A fleet needs that of a job, wherever it is put.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tutti.fabric.wiring import Floats, Integers, wire
from tutti.plan.check import embedded_cluster
from tutti.simulate.estimate import Estimate
from tutti.simulate.fabric_step import PlanOnFabric, Sent, plans_on_fabric, step_with
from tutti.simulate.plan_traffic import plan_traffic
from tutti.simulate.traffic import Traffic

_LONGER = 2.0  # times that all sending between nodes is stretched, to see what the step feels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTraffic:
    """What a job of this plan does, again and again."""

    name: str
    step_s: float  # where the plan puts it, alone
    sending_s: float  # of it, in which something is under way between nodes
    felt: float  # seconds of step per second of longer sending
    nodes: tuple[tuple[str, int], ...]  # pool and number of each, idle ones of its pools, too
    sources: Integers  # rows of `nodes`
    source_slots: Integers
    targets: Integers
    target_slots: Integers
    num_bytes: Floats  # of a step: what links could carry in the time that they take


def step_traffic(name: str, estimate: Estimate) -> StepTraffic:
    """Replay a plan's step on its own cluster, and add up what it sends."""
    wiring = wire(embedded_cluster(estimate.schedule.plan))
    traffic = plan_traffic(estimate, wiring)
    (alone,) = plans_on_fabric([name], [estimate], [traffic], wiring)
    per_pool = np.array([pool.node.num_chips for pool in wiring.cluster.pools])
    node_chips = per_pool[wiring.node_pool]
    first = np.concatenate([[0], np.cumsum(node_chips)])
    node_of = np.repeat(np.arange(len(node_chips)), node_chips)
    between = [one for one in alone.sent if _leaves(one.traffic, node_of)]
    sums: dict[tuple[int, int], float] = {}
    for one in between:
        _add_up(one.traffic, node_of, sums)
    chips = np.array(sorted(sums), dtype=np.int64).reshape(-1, 2)
    used = {
        wiring.chip(chip) for _, _, stage in estimate.schedule.plan.stages() for chip in stage.chips
    }
    # an idle node of a pool that computes was asked for with the others; an idle pool was not
    pools = np.unique(wiring.node_pool[node_of[sorted(used)]])
    nodes = np.flatnonzero(np.isin(wiring.node_pool, pools))
    row = np.searchsorted(nodes, node_of[chips])
    slots = chips - first[node_of[chips]]
    sending = _under_way(estimate, between)
    return StepTraffic(
        name=name, step_s=alone.together_s, sending_s=sending, felt=_felt(alone, between, sending),
        nodes=tuple(
            (wiring.cluster.pools[wiring.node_pool[n]].name, int(wiring.node_number[n]))
            for n in nodes.tolist()
        ),
        sources=row[:, 0], source_slots=slots[:, 0], targets=row[:, 1], target_slots=slots[:, 1],
        num_bytes=np.array([sums[a, b] for a, b in chips.tolist()]),
    )  # fmt: skip


def _leaves(traffic: Traffic, node_of: Integers) -> bool:
    return any(
        bool((node_of[flight.sources] != node_of[flight.targets]).any())
        for flight in traffic.flights
    )


def _add_up(traffic: Traffic, node_of: Integers, sums: dict[tuple[int, int], float]) -> None:
    """Add what leaves its node, as often as a step does it, and what of links it wastes."""
    times = traffic.runs / traffic.efficiency.fabric
    for flight in traffic.flights:
        apart = node_of[flight.sources] != node_of[flight.targets]
        for a, b, size in zip(
            flight.sources[apart].tolist(), flight.targets[apart].tolist(),
            flight.num_bytes[apart].tolist(), strict=True,
        ):  # fmt: skip
            sums[a, b] = sums.get((a, b), 0.0) + times * size


def _under_way(estimate: Estimate, between: list[Sent]) -> float:
    """Return for how long at least one kind is under way."""
    spans = [one.traffic.windows(estimate.result, one.priced_s) for one in between]
    if not spans:
        return 0.0
    start, end = (np.concatenate(column) for column in zip(*spans, strict=True))
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    gaps = np.maximum(start[1:] - end[:-1], 0.0).sum()
    return float(end[-1] - start[0] - gaps)


def _felt(alone: PlanOnFabric, between: list[Sent], sending_s: float) -> float:
    """Return what share of longer sending makes the step longer."""
    if sending_s <= 0:
        return 0.0
    seconds = [one.shared_s * (_LONGER if one in between else 1.0) for one in alone.sent]
    longer = step_with(alone.estimate, alone.sent, seconds).step_seconds
    added = (longer - alone.together_s) / ((_LONGER - 1.0) * sending_s)
    return float(min(max(added, 0.0), 1.0))
