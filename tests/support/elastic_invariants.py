"""What must hold in every state of a small job, and that it comes to an end."""

from __future__ import annotations

from msgspec.structs import replace

from tests.support.elastic_moves import process_moves
from tests.support.elastic_world import (
    BrokenError,
    World,
    all_in,
    all_running,
    came_in,
    chip,
    heard,
    news,
    obeyed,
    ordered,
    replaced,
    said,
    settle,
)
from tutti.elastic.events import (
    Heard,
    Phase,
    WaitedEnough,
)
from tutti.elastic.membership import OVER
from tutti.elastic.messages import Standing


def check(world: World) -> None:
    members = world.members
    for host, process in enumerate(world.processes):
        if process is None or not process.generation:
            continue
        accepted = members.accepts(process.generation, chip(host), process.number)
        if accepted and process.generation != members.generation:
            raise BrokenError(f"what generation {process.generation} writes is accepted")


def require_progress(world: World, most: int = 120) -> None:
    """Let everything be delivered, in turn, without another fault: it must run, or give up."""
    for turn in range(most):
        members = world.members
        if members.phase in OVER:
            return
        live = [
            process
            for host, process in enumerate(world.processes)
            if process is not None
            and process.generation == members.generation
            and any(seat.chip == chip(host) for seat in members.seats)  # not who only gave
        ]
        made = all(p.standing is Standing.RUNNING and p.made for p in live)
        if members.phase is Phase.RUNNING and live and made and all_running(world, live[0]):
            return
        world = _turn(world, turn)
    raise BrokenError(f"it stays {world.members.phase} ({world.members.why})")


def _turn(world: World, turn: int) -> World:
    """Deliver the newest of everything, and a heartbeat of every agent."""
    for host in range(len(world.agents)):
        agent, process = world.agents[host], world.processes[host]
        if agent is None or process is None:
            continue
        for _ in range(8):
            moved = [w for name, w in process_moves(world, host, world.processes[host])]  # type: ignore[arg-type]
            if not moved or moved[0] == world:
                break
            world = moved[0]
        agent = world.agents[host]
        assert agent is not None
        agent = agent.refreshed()
        world = replace(world, agents=replaced(world.agents, host, agent))
        world = heard(world, Heard(agent.status()))
        newest = world.down[host].newest
        if newest is not None:
            come = replace(world, down=replaced(world.down, host, world.down[host].delivered()))
            world = ordered(come, host, newest)
    if world.asked.newest is not None:
        come = replace(world, asked=world.asked.delivered())
        world = heard(come, settle(world.asked.newest))
    if world.members.phase is Phase.WAITING and turn > 20:
        world = heard(world, WaitedEnough())
    return world


def promptly(world: World) -> World:
    """Let processes and their agents, who share a host, finish what they have to say."""
    while True:
        for host, process in enumerate(world.processes):
            if process is None or world.agents[host] is None:
                continue
            if process.standing is Standing.STARTING:
                world = said(world, host, news(process, standing=Standing.IDLE))
            elif process.mail:
                world = obeyed(world, host, process)
            elif not process.said:
                world = said(world, host, process)
            elif process.standing is Standing.ENTERING and all_in(world, process):
                world = came_in(world, host, process)
            else:
                continue
            break
        else:
            return world
