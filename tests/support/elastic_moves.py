"""What may happen next in a small job (`elastic_world`)."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from tests.support.elastic_world import (
    JOB,
    Link,
    Process,
    World,
    all_in,
    all_running,
    came_in,
    chip,
    died,
    heard,
    killed,
    news,
    obeyed,
    ordered,
    paused,
    replaced,
    said,
    settle,
    somebody_left,
    stepped,
    with_process,
)
from tutti.elastic.agent_state import AgentState
from tutti.elastic.events import (
    Change,
    Drain,
    Heard,
    Phase,
    Silent,
    WaitedEnough,
)
from tutti.elastic.messages import Standing


def moves(world: World) -> Iterator[tuple[str, World]]:
    """Yield everything that may happen next."""
    late = replace(world, late=world.late - 1) if world.late > 0 else world
    for host, agent in enumerate(world.agents):
        link = world.up[host]
        if link.newest is not None:
            come = replace(world, up=replaced(world.up, host, link.delivered()))
            yield f"hear h{host}", heard(come, Heard(link.newest))
        if link.before is not None and world.late:
            yield f"hear h{host} late", heard(late, Heard(link.before))
        link = world.down[host]
        if agent is not None and link.newest is not None:
            come = replace(world, down=replaced(world.down, host, link.delivered()))
            yield f"h{host} gets order {link.newest.number}", ordered(come, host, link.newest)
        if agent is not None and link.before is not None and world.late:
            yield f"h{host} gets order {link.before.number} late", ordered(late, host, link.before)
        process = world.processes[host]
        if agent is not None and process is not None:
            yield from process_moves(world, host, process)
    link = world.asked
    if link.newest is not None:
        come = replace(world, asked=link.delivered())
        yield f"settled {link.newest.request}", heard(come, settle(link.newest))
    if link.before is not None and world.late:
        yield f"settled {link.before.request} late", heard(late, settle(link.before))
    yield from faults(world)


def process_moves(world: World, host: int, process: Process) -> Iterator[tuple[str, World]]:
    if process.standing is Standing.STARTING:
        ready = news(process, standing=Standing.IDLE)
        yield f"p{host} ready", said(world, host, ready)
        return
    if process.mail:
        yield f"p{host} obeys", obeyed(world, host, process)
    if not process.said:
        yield f"p{host} says", said(world, host, process)
    if process.standing is Standing.ENTERING and all_in(world, process):
        yield f"p{host} is in", came_in(world, host, process)
    if process.pausing and process.standing is Standing.RUNNING and all_running(world, process):
        yield f"pause of {process.generation}", paused(world, process)
    if process.standing is Standing.RUNNING and not process.made and all_running(world, process):
        yield f"step of {process.generation}", stepped(world, process)
    if process.standing in (Standing.ENTERING, Standing.RUNNING) and somebody_left(world, process):
        yield (
            f"p{host} loses a peer",
            with_process(world, host, news(process, standing=Standing.IDLE)),
        )


def faults(world: World) -> Iterator[tuple[str, World]]:
    if world.members.phase is Phase.WAITING and world.members.why:
        yield "waited", heard(world, WaitedEnough())
    if world.faults:
        less = replace(world, faults=world.faults - 1)
        for host, agent in enumerate(world.agents):
            if agent is None:
                continue
            process = world.processes[host]
            if process is not None:
                yield f"kill p{host}", killed(less, host, process)
            known = world.members.host(f"h{host}")
            if known is not None and not known.silent:
                yield f"h{host} seems silent", heard(less, Silent(f"h{host}"))
                yield f"h{host} dies", died(less, host)
    if world.wishes:
        less = replace(world, wishes=world.wishes - 1)
        if world.members.phase is Phase.RUNNING:
            yield "change", heard(less, Change("a better plan"))
        for host, agent in enumerate(world.agents):
            place = f"p/{host}"
            if agent is not None and place not in world.members.drained:
                yield f"drain h{host}", heard(less, Drain(place))
            elif agent is not None:
                yield f"h{host} is back", heard(less, Drain(place, back=True))
    if world.newcomers:
        at = len(world.agents) - world.newcomers
        agent = AgentState.of(JOB, f"h{at}", (chip(at),), incarnation=1)
        yield (
            f"h{at} comes",
            replace(
                world,
                agents=replaced(world.agents, at, agent),
                processes=replaced(world.processes, at, Process(1)),
                up=replaced(world.up, at, Link(agent.status())),
                newcomers=world.newcomers - 1,
            ),
        )
