"""What to start where now, and why: the state machine asked once, with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tutti.fleet import events
from tutti.fleet.chips import Grounds
from tutti.fleet.machine import Network
from tutti.fleet.policy import Policy
from tutti.fleet.request import Allocation, JobRequest, Shape
from tutti.fleet.scheduler import Scheduler
from tutti.units import many, seconds_text

_UNKNOWN_S = 1e12  # of nodes that nobody knows when they come back
_BUSY = "(busy)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One job: where it starts, or why it waits."""

    job: str
    allocation: Allocation | None
    groups: int
    fewest: int
    promised_s: float | None
    why: str


def place_now(
    grounds: Grounds,
    policy: Policy,
    requests: Sequence[JobRequest],
    *,
    busy: Sequence[int] = (),
    busy_s: float | None = None,
    down: Sequence[int] = (),
    network: Network | None = None,
) -> list[Placed]:
    """Return what each of some waiting jobs is to do, in the order in which they came."""
    machine = Scheduler(grounds, policy, network)
    for node in down:
        machine.handle(events.Fail(0.0, node))
    whole = {node: (1 << grounds.sizes[grounds.node_pool[node]]) - 1 for node in busy}
    if busy:
        taken = Allocation(tuple(whole), tuple(whole.values()))
        machine.fleet.take(_BUSY, taken, _UNKNOWN_S if busy_s is None else busy_s)
    for request in requests:
        machine.handle(events.Submit(0.0, request))
    return [_placed(machine, request) for request in requests]


def _placed(machine: Scheduler, request: JobRequest) -> Placed:
    run = machine.running.get(request.job)
    promise = next((p for p in machine.promises if p.job == request.job), None)
    promised = None if promise is None or promise.start >= _UNKNOWN_S / 2 else promise.start
    if run is None:
        return Placed(
            job=request.job, allocation=None, groups=0,
            fewest=machine.grounds.fewest(request.shapes[0]), promised_s=promised,
            why=_why_it_waits(machine, request, promised),
        )  # fmt: skip
    shape = request.shapes[run.allocation.shape]
    groups = machine.grounds.spread(run.allocation.mask)
    fewest = machine.grounds.fewest(shape)
    return Placed(
        job=request.job, allocation=run.allocation, groups=groups, fewest=fewest,
        promised_s=0.0, why=_why_there(shape, groups, fewest),
    )  # fmt: skip


def _why_there(shape: Shape, groups: int, fewest: int) -> str:
    if shape.num_nodes == 1:
        return "one node"
    if groups == 1:
        return "all in one group"
    if groups == fewest:
        return f"no fewer groups hold {many(shape.num_nodes, 'node')}"
    return f"{groups} groups, where {fewest} would do: none has so much room now"


def _why_it_waits(machine: Scheduler, request: JobRequest, promised: float | None) -> str:
    shape, fleet = request.shapes[0], machine.fleet
    most = machine.policy.quotas.get(request.tenant)
    when = "" if promised is None else f"; promised in {seconds_text(promised)}"
    for name, count in shape.nodes:
        pool = machine.grounds.pool_names.index(name)
        free = fleet.free(pool, fleet.chips_of(pool, shape)).bit_count()
        if free < count:
            return f"{free} of {many(count, 'node')} of '{name}' are free{when}"
    if most is not None:
        return f"the quota of '{request.tenant}' is {most} chips, and it holds "\
            f"{machine.tenants.get(request.tenant, 0)}"  # fmt: skip
    if promised is not None:
        return f"waits for a better place{when}"
    first = machine.promises[0].job if machine.promises else ""
    held = f" for '{first}'" if first and first != request.job else ""
    return f"enough nodes are free, but kept{held}"
