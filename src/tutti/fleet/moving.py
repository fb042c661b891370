"""Moving running jobs together, where what their steps gain pays for saving and loading them."""

from __future__ import annotations

from tutti.fleet import events
from tutti.fleet.chips import bits, lowest
from tutti.fleet.events import Instruction
from tutti.fleet.machine import Machine
from tutti.fleet.placement import tightest
from tutti.fleet.request import Allocation, JobRequest, Run
from tutti.fleet.reservations import kept_free

_MOST = 2  # moves that one event may bring about


def consider_moves(machine: Machine, now: float, out: list[Instruction]) -> None:
    """Move jobs that lie in more groups than they need, those with most to gain first."""
    scattered = [
        (gain, job) for job, run in machine.running.items() if (gain := _gain(machine, run, now))
    ]
    moved = 0
    for _, job in sorted(scattered, key=lambda one: (-one[0], one[1])):
        if moved == _MOST:
            return
        moved += _move(machine, machine.running[job], now, out)


def _settled(run: Run, now: float) -> bool:
    """Tell whether a job runs as it should, and can be saved."""
    saves = run.request.checkpoint_s > 0
    return saves and run.target is None and not run.stopping and now >= run.since


def _gain(machine: Machine, run: Run, now: float) -> float:
    """Return the seconds that a job would gain in the best of places; 0: leave it alone."""
    shape = run.request.shapes[run.allocation.shape]
    if (
        not _settled(run, now)
        or shape.num_nodes == 1
        or len(shape.nodes) > 1
        or shape.chips_per_node
    ):
        return 0.0
    if machine.grounds.spread(run.allocation.mask) <= machine.grounds.fewest(shape):
        return 0.0
    left = run.expected_end - now
    return max(0.0, left - run.request.restart_s)


def _move(machine: Machine, run: Run, now: float, out: list[Instruction]) -> int:
    grounds, request = machine.grounds, run.request
    shape = request.shapes[run.allocation.shape]
    pool = grounds.pool_names.index(shape.nodes[0][0])
    own = run.allocation.mask
    free = machine.fleet.free(pool, grounds.sizes[pool])
    free &= ~kept_free(machine.promises, request.job, run.expected_end)
    target = tightest(free | own, shape.num_nodes, grounds.tiers, grounds.border)
    promised = kept_free(machine.promises, request.job, float("inf"))
    if grounds.spread(target) >= grounds.spread(own) or promised & target & own:
        return 0
    here, there = (machine.network.stretch(request, mask) for mask in (own, target))
    left = run.expected_end - now
    if left * (1.0 - there / here) <= request.restart_s:
        return 0
    start_move(machine, run, target, now, out)
    return 1


def start_move(machine: Machine, run: Run, target: int, now: float, out: list[Instruction]) -> None:
    """Have a job saved and started there; meanwhile it holds both places."""
    grounds, request = machine.grounds, run.request
    shape, own = request.shapes[run.allocation.shape], run.allocation.mask
    run.done = run.work(now)
    extra = machine.fleet.allocate(target & ~own, shape, run.allocation.shape)
    nodes = tuple(bits(target))
    whole = tuple((1 << grounds.sizes[grounds.node_pool[node]]) - 1 for node in nodes)
    run.target = Allocation(nodes, whole, run.allocation.shape)
    run.expected_end += request.restart_s
    machine.fleet.expect(run.allocation, run.expected_end)
    machine.fleet.take(request.job, extra, run.expected_end)
    out.append(events.Move(request.job, run.target, request.restart_s))


def make_way(
    machine: Machine, request: JobRequest, number: int, gain_s: float, now: float,
    out: list[Instruction],
) -> tuple[float, int] | None:  # fmt: skip
    """Move small jobs out of a group for one that needs all of it, where that pays back.

    What it gains × its nodes must be more than what all who move, and it, lose by restarts. Returns
    when its nodes are free, and which.
    """
    grounds, shape = machine.grounds, request.shapes[number]
    count, pool = shape.num_nodes, grounds.pool_names.index(shape.nodes[0][0])
    free = machine.fleet.free(pool, grounds.sizes[pool])
    free &= ~kept_free(machine.promises, request.job, float("inf"))
    best: tuple[float, list[tuple[Run, int]], int] | None = None
    for group in grounds.groups:
        own = group & grounds.pool_masks[pool] & ~machine.fleet.down
        if own.bit_count() < count:
            continue
        cleared = _cleared(machine, own, free, count, now)
        if cleared is None:
            continue
        moves, left = cleared
        longest = max((run.request.restart_s for run, _ in moves), default=0.0)
        lost = sum(run.request.restart_s * len(run.allocation.nodes) for run, _ in moves)
        if moves and lost + longest * count < gain_s * count and (best is None or lost < best[0]):
            best = (lost, moves, left)
    if best is None:
        return None
    for run, target in best[1]:
        start_move(machine, run, target, now, out)
    until = now + max(run.request.restart_s for run, _ in best[1])
    return until, lowest(best[2], count)


def _cleared(
    machine: Machine, group: int, free: int, count: int, now: float
) -> tuple[list[tuple[Run, int]], int] | None:
    """Return who would leave a group, each with a place elsewhere, and the nodes free by then."""
    grounds = machine.grounds
    room, elsewhere = free & group, free & ~group
    moves: list[tuple[Run, int]] = []
    inside = [run for run in machine.running.values() if run.allocation.mask & group]
    for run in sorted(inside, key=lambda one: (len(one.allocation.nodes), one.request.job)):
        if room.bit_count() >= count:
            break
        shape = run.request.shapes[run.allocation.shape]
        if not _settled(run, now) or shape.chips_per_node or len(shape.nodes) > 1:
            continue
        size = shape.num_nodes
        if elsewhere.bit_count() < size:
            continue
        target = tightest(elsewhere, size, grounds.tiers, grounds.border)
        if grounds.spread(target) > grounds.fewest(shape):
            continue
        moves.append((run, target))
        elsewhere &= ~target
        room |= run.allocation.mask & group
    return (moves, room) if room.bit_count() >= count else None
