"""Preemption: jobs of lower priority are stopped at their checkpoints where that lets one start."""

from __future__ import annotations

from tutti.fleet.events import Instruction
from tutti.fleet.machine import Machine
from tutti.fleet.queue import Waiting
from tutti.fleet.request import Run


def make_room(machine: Machine, first: Waiting, out: list[Instruction]) -> None:
    """Stop jobs of lower priority, the youngest first, where that lets the first one start."""
    if any(run.stopping for run in machine.running.values()):
        return
    shape = first.request.shapes[0]
    wanted = {machine.grounds.pool_names.index(name): count for name, count in shape.nodes}
    free = {p: machine.fleet.free(p, machine.fleet.chips_of(p, shape)) for p in wanted}
    victims: list[Run] = []
    for run in sorted(
        (r for r in machine.running.values()
         if r.request.priority < first.request.priority and r.request.checkpoint_s > 0),
        key=lambda r: (r.request.priority, -r.started, r.request.job),
    ):  # fmt: skip
        if all(free[p].bit_count() >= count for p, count in wanted.items()):
            break
        own = {p: run.allocation.mask & machine.grounds.pool_masks[p] for p in wanted}
        if any(free[p] | own[p] != free[p] for p in wanted):
            victims.append(run)
            free = {p: free[p] | own[p] for p in wanted}
    if all(free[p].bit_count() >= count for p, count in wanted.items()):
        for run in victims:
            machine.stop(run, out)
