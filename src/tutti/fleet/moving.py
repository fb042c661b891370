"""Moving running jobs together, where what their steps gain pays for saving and loading them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutti.fleet import events
from tutti.fleet.placement import tightest
from tutti.fleet.promises import kept_free
from tutti.fleet.request import Allocation, Run

if TYPE_CHECKING:
    from tutti.fleet.events import Instruction
    from tutti.fleet.scheduler import Scheduler

_MOST = 2  # moves that one event may bring about


def consider_moves(machine: Scheduler, now: float, out: list[Instruction]) -> None:
    """Move jobs that lie in more groups than they need, those with most to gain first."""
    scattered = [
        (gain, job) for job, run in machine.running.items() if (gain := _gain(machine, run, now))
    ]
    moved = 0
    for _, job in sorted(scattered, key=lambda one: (-one[0], one[1])):
        if moved == _MOST:
            return
        moved += _move(machine, machine.running[job], now, out)


def _gain(machine: Scheduler, run: Run, now: float) -> float:
    """Return the seconds that a job would gain in the best of places; 0: leave it alone."""
    shape = run.request.shapes[run.allocation.shape]
    settled = run.target is None and not run.stopping and now >= run.since
    if not settled or shape.num_nodes == 1 or len(shape.nodes) > 1 or shape.chips_per_node:
        return 0.0
    if machine.grounds.spread(run.allocation.mask) <= machine.grounds.fewest(shape):
        return 0.0
    left = run.expected_end - now
    return max(0.0, left - run.request.restart_s)


def _move(machine: Scheduler, run: Run, now: float, out: list[Instruction]) -> int:
    grounds, request = machine.grounds, run.request
    shape = request.shapes[run.allocation.shape]
    pool = grounds.pool_names.index(shape.nodes[0][0])
    own = run.allocation.mask
    free = machine.fleet.free(pool, grounds.sizes[pool])
    free &= ~kept_free(machine.promises, request.job, run.expected_end)
    target = tightest(free | own, shape.num_nodes, grounds.tiers)
    promised = kept_free(machine.promises, request.job, float("inf"))
    if grounds.spread(target) >= grounds.spread(own) or promised & target & own:
        return 0
    here, there = (machine.network.stretch(request, mask) for mask in (own, target))
    left = run.expected_end - now
    if left * (1.0 - there / here) <= request.restart_s:
        return 0
    run.done = run.work(now)
    # what moves along holds both places: the old nodes, and those that are new to it
    extra = machine.fleet.allocate(target & ~own, shape, run.allocation.shape)
    whole = (1 << grounds.sizes[pool]) - 1
    nodes = tuple(node for node in range(grounds.num_nodes) if target >> node & 1)
    run.target = Allocation(nodes, (whole,) * len(nodes), run.allocation.shape)
    run.expected_end += request.restart_s
    machine.fleet.expect(run.allocation, run.expected_end)
    machine.fleet.take(request.job, extra, run.expected_end)
    out.append(events.Move(request.job, run.target, request.restart_s))
    return 1
