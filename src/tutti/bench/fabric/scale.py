"""How long the network model takes for 16,384 chips: CPU seconds of one core, kernels compiled."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

from tutti.bench.fabric.published import CHIPS, all_to_alls, pod, scattered
from tutti.fabric.paths import Rules, route_transfers
from tutti.fabric.replay import Teams
from tutti.fabric.shares import fair_rates
from tutti.hardware.fabric import Routing

_RUNS = 3  # the first compiles; the least of the others counts


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFigure:
    """One task, its size, and its CPU seconds beside the bar."""

    words: str
    flows: int
    seconds: float
    bar_s: float
    peak_mib: float  # of the process, after it


def scale_figures() -> list[ScaleFigure]:
    """Time three tasks."""
    pod(CHIPS)
    return [_ring(), _exchange(), _step()]


def _figure(words: str, work: Callable[[], int], bar_s: float) -> ScaleFigure:
    spent, flows = [], 0
    for _ in range(_RUNS):
        began = time.process_time()
        flows = work()
        spent.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return ScaleFigure(words=words, flows=flows, seconds=min(spent[1:]), bar_s=bar_s, peak_mib=peak)


def _ring() -> ScaleFigure:
    rules = Rules(routing=Routing.ECMP, connections=16, split="dynamic")

    def work() -> int:
        a, b = scattered(CHIPS // 8)
        flows = route_transfers(pod(CHIPS), a, b, rules)
        return len(fair_rates(flows.links, flows.rates))

    return _figure("scattered rings over all nodes, 16 connections, ECMP", work, 0.6)


def _exchange() -> ScaleFigure:
    def work() -> int:
        teams: Teams = all_to_alls(CHIPS)
        teams.paces()
        return int(teams.flows.links.shape[0])

    return _figure("all-to-alls in groups of 64", work, 2.0)


def _step() -> ScaleFigure:
    from tutti.fabric.wiring import wire
    from tutti.hardware.cluster import Cluster
    from tutti.models.load import load_model
    from tutti.plan.job import Job
    from tutti.plan.uniform import Degrees, uniform_plan
    from tutti.simulate.estimate import estimate
    from tutti.simulate.fabric_step import plans_on_fabric
    from tutti.simulate.plan_traffic import plan_traffic

    model, cluster = load_model("gpt-1t"), Cluster.load("H16384")
    job = Job(sequence_length=2048, global_batch=16384)
    plan = uniform_plan(model, cluster, job, Degrees.parse("tp=8,pp=64,sp=1"))
    wiring, priced = wire(cluster), estimate(plan)

    def work() -> int:
        traffic = [plan_traffic(priced, wiring)]
        (on_fabric,) = plans_on_fabric(["gpt-1t"], [priced], traffic, wiring)
        return sum(one.flows for one in on_fabric.sent)

    return _figure("a step of a 1T GPT on H16384", work, 10.0)
