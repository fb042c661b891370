"""`tutti simulate` of a plan that serves: requests come, engines make steps, users wait."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tutti.cli.shared.output import print_json, print_rich
from tutti.errors import InputError

if TYPE_CHECKING:
    from tutti.cost.plan.sources import Sources
    from tutti.plan.plan import Plan
    from tutti.simulate.serving.requests import Requests

REQUESTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a person wants simulated, and to see."""

    workload: Path | None
    requests: int | None
    rate: float | None
    seed: int
    every_engine: bool
    html: Path | None
    trace: Path | None
    json: bool


def simulate_deployment(plan: Plan, wanted: Wanted, sources: Sources) -> None:
    """Simulate a deployment and show it."""
    from tutti.cost.measured.pools import measured_pools
    from tutti.plan.check import embedded_cluster, require_valid
    from tutti.report.serving import write_serving_page
    from tutti.simulate.serving.run import Deployment, simulate_serving
    from tutti.simulate.serving.table import serving_table
    from tutti.simulate.serving.trace import MOST_STEPS, write_serving_trace

    require_valid(plan)
    pools = dict.fromkeys(pool for _, _, stage in plan.stages() for pool in stage.chips.pools)
    dtype = plan.job.precision.compute
    measured = measured_pools(sources.profiles, embedded_cluster(plan), dict.fromkeys(pools, dtype))
    deployment = Deployment.of(plan, measured)
    result = simulate_serving(
        deployment,
        _requests(plan, wanted),
        every_engine=wanted.every_engine,
        keep_steps=MOST_STEPS if wanted.trace is not None else 0,
    )
    if wanted.html is not None:
        write_serving_page(wanted.html, plan, result)
    if wanted.trace is not None:
        write_serving_trace(wanted.trace, result)
    if wanted.json:
        print_json(result.to_document())
        return
    print_rich(serving_table(result))
    for path in filter(None, (wanted.html, wanted.trace)):
        typer.echo(f"written to {path}")


def _requests(plan: Plan, wanted: Wanted) -> Requests:
    from tutti.simulate.serving.requests import draw
    from tutti.simulate.serving.traces import load_workload

    service = plan.job.serving
    assert service is not None
    if wanted.requests is not None and wanted.requests < 1:
        raise InputError(f"--requests: {wanted.requests} requests; give at least 1")
    if wanted.rate is not None and not 0 < wanted.rate < float("inf"):
        raise InputError(f"--rate: {wanted.rate:g} requests/s; give more than 0")
    if wanted.workload is not None:
        loaded = load_workload(wanted.workload)
        if loaded.trace is not None:
            requests = loaded.requests(wanted.requests, wanted.seed)
            return requests if wanted.rate is None else requests.scaled(wanted.rate)
        service = loaded.service
    traffic = service.traffic
    if wanted.rate is not None:
        traffic = replace(traffic, requests_per_s=wanted.rate)
    return draw(traffic, wanted.requests or REQUESTS, wanted.seed)
