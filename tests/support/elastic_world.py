"""A small job: the real machines, a network that loses and repeats.

Hosts have a chip each. In every direction of every link there is the newest message, which may come
at any time or, once there is a newer one, never; and the one before it, which may come late as
often as `late` allows. What came already may come again at any time: it must change nothing.
Processes take commands, meet, make a step, lose each other, and are killed; hosts seem silent, die,
and one more comes. Numbers that only rise are told apart by their order alone, so that there are
finitely many states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from tutti.elastic.agent_state import AgentState, Died, Enter, Free, Leave, Said, Start
from tutti.elastic.events import (
    Heard,
    Phase,
    Send,
    Settle,
    Settled,
    Silent,
    Unsettled,
)
from tutti.elastic.membership import Membership
from tutti.elastic.messages import Death, Order, Report, Seat, Source, Standing

JOB = "job"
LEAST_CHIPS = 2
ANY = -1


class Process(NamedTuple):
    """A rank's process as it really is, whatever its agent has heard."""

    number: int
    standing: Standing = Standing.STARTING
    generation: int = 0
    step: int = -1
    seats: tuple[Seat, ...] = ()
    donors: tuple[Seat, ...] = ()
    source: Source | None = None
    mail: tuple[Any, ...] = ()  # commands on their way
    said: bool = False  # whether the agent knows all this
    made: bool = False  # a step in this generation, or gave its state to it
    pausing: bool = False


class Link(NamedTuple):
    """One direction: what is on its way, and what went before it."""

    newest: Any = None
    before: Any = None

    def sent(self, message: Any) -> Link:
        """Return it with another message, which supersedes the one on its way."""
        return Link(message, self.newest if self.newest is not None else self.before)

    def delivered(self) -> Link:
        """Return it when the newest has come."""
        return Link(None, self.newest)


class World(msgspec.Struct, frozen=True):
    """One state of everything."""

    members: Membership
    agents: tuple[AgentState | None, ...]
    processes: tuple[Process | None, ...]
    up: tuple[Link, ...]
    down: tuple[Link, ...]
    asked: Link
    faults: int
    newcomers: int
    late: int  # messages that may yet come after a newer one was sent; ANY: as many as there are
    wishes: int = 0  # for another generation, or to drain a host


class BrokenError(AssertionError):
    """An invariant that does not hold."""


def chip(host: int) -> str:
    return f"p/{host}/0"


def begin(hosts: int, faults: int, newcomers: int, late: int = 1, wishes: int = 0) -> World:
    """Return the world in which nobody has said a word."""
    total = hosts + newcomers
    agents: list[AgentState | None] = [
        AgentState.of(JOB, f"h{i}", (chip(i),), incarnation=1) if i < hosts else None
        for i in range(total)
    ]
    return World(
        members=Membership(job=JOB),
        agents=tuple(agents),
        processes=tuple(Process(1) if a else None for a in agents),
        up=tuple(Link(a.status()) if a else Link() for a in agents),
        down=(Link(),) * total,
        asked=Link(),
        faults=faults,
        newcomers=newcomers,
        late=late,
        wishes=wishes,
    )


def settle(question: Settle) -> Settled | Unsettled:
    """Answer as a planner would that runs on any two chips or more."""
    if len(question.chips) < LEAST_CHIPS:
        return Unsettled(question.request, f"{LEAST_CHIPS} chips are needed")
    step = max((report.step for report in question.left), default=-1)
    holders = tuple(r.chip for r in question.left if r.step == step and step >= 0)
    kind = "memory" if holders else "begin"
    source = Source(kind=kind, step=max(step, 0), holders=holders)  # type: ignore[arg-type]
    return Settled(question.request, question.chips, "plan", source)


def live_only(world: World) -> World:
    """Return a world without the messages that never count again, and see that they do not.

    One that came already, or is older than what its receiver has, may come as often as it likes.
    """
    if not world.late:
        world = replace(
            world,
            up=tuple(Link(link.newest) for link in world.up),
            down=tuple(Link(link.newest) for link in world.down),
            asked=Link(world.asked.newest),
        )
    members, up, down = world.members, list[Link](), list[Link]()
    for host, agent in enumerate(world.agents):
        known = members.host(f"h{host}")
        number = 0 if known is None else known.status.number
        up.append(Link(*(m if m is not None and m.number > number else None
                         for m in world.up[host])))  # fmt: skip
        number = 0 if agent is None or agent.order is None else agent.order.number
        live = agent is not None
        down.append(Link(*(m if live and m is not None and m.number > number else None
                           for m in world.down[host])))  # fmt: skip
    open_request = members.request if members.phase is Phase.SETTLING else -1
    asked = Link(*(q if q is not None and q.request == open_request else None
                   for q in world.asked))  # fmt: skip
    _require_dead(world, (*up, *down, asked))
    return replace(world, up=tuple(up), down=tuple(down), asked=asked)


def _require_dead(world: World, kept: tuple[Link, ...]) -> None:
    """See that what is dropped changes nothing when it comes."""
    old = (*world.up, *world.down, world.asked)
    for at, (before, after) in enumerate(zip(old, kept, strict=True)):
        for message, left in zip(before, after, strict=True):
            if message is None or left is not None:
                continue
            if isinstance(message, Order):
                agent = world.agents[at % len(world.agents)]
                if agent is not None and agent.after(message)[0] is not agent:
                    raise BrokenError(f"order {message.number} counts twice")
                continue
            event = settle(message) if isinstance(message, Settle) else Heard(message)
            if world.members.after(event)[0] is not world.members:
                raise BrokenError(f"{event} counts twice")


def replaced(items: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*items[:at], value, *items[at + 1 :])


# --- what may happen ---------------------------------------------------------------------------


# --- what it leads to ----------------------------------------------------------------------------


def heard(world: World, event: Any) -> World:
    before = world.members
    members, instructions = before.after(event)
    world = replace(world, members=members)
    for instruction in instructions:
        match instruction:
            case Send(host, order):
                at = int(host[1:])
                world = replace(world, down=replaced(world.down, at, world.down[at].sent(order)))
            case Settle():
                check_settle(world, instruction)
                world = replace(world, asked=world.asked.sent(instruction))
    if members.generation > before.generation:
        for seat in members.seats:
            host = members.host(seat.host)
            if host is None or not host.usable:
                raise BrokenError(f"generation {members.generation} has a seat on {seat.host}")
    return world


def _agent(world: World, host: int, agent: AgentState, commands: tuple[Any, ...]) -> World:
    for command in commands:
        process = world.processes[host]
        if isinstance(command, Start):
            world = replace(
                world, processes=replaced(world.processes, host, Process(command.process))
            )
        elif isinstance(command, (Enter, Leave, Free)) and process is not None:
            mailed = process._replace(mail=(*process.mail, command))
            world = replace(world, processes=replaced(world.processes, host, mailed))
    up = world.up[host].sent(agent.status())
    return replace(
        world, agents=replaced(world.agents, host, agent), up=replaced(world.up, host, up)
    )


def ordered(world: World, host: int, order: Order) -> World:
    agent = world.agents[host]
    assert agent is not None
    after, commands = agent.after(order)
    return world if after is agent else _agent(world, host, after, commands)


def said(world: World, host: int, process: Process) -> World:
    agent = world.agents[host]
    assert agent is not None
    report = Report(
        chip=chip(host), process=process.number, standing=process.standing,
        generation=process.generation, step=process.step,
    )  # fmt: skip
    world = with_process(world, host, process._replace(said=True))
    after, commands = agent.after(Said(report))
    return world if after is agent else _agent(world, host, after, commands)


def killed(world: World, host: int, process: Process) -> World:
    agent = world.agents[host]
    assert agent is not None
    after, commands = agent.after(Died(chip(host), Death(process=process.number, how="was killed")))
    return _agent(world, host, after, commands)


def died(world: World, host: int) -> World:
    world = replace(
        world,
        agents=replaced(world.agents, host, None),
        processes=replaced(world.processes, host, None),
        down=replaced(world.down, host, Link()),
        up=replaced(world.up, host, Link()),
    )
    return heard(world, Silent(f"h{host}"))


def with_process(world: World, host: int, process: Process) -> World:
    return replace(world, processes=replaced(world.processes, host, process))


def news(process: Process, **changes: Any) -> Process:
    return process._replace(**changes, said=False)


def obeyed(world: World, host: int, process: Process) -> World:
    command, *rest = process.mail
    process = process._replace(mail=tuple(rest))
    if isinstance(command, Free):
        if process.standing is Standing.IDLE:
            process = news(process, step=-1)
        return with_process(world, host, process)
    if isinstance(command, Leave):
        active = process.standing in (Standing.ENTERING, Standing.RUNNING)
        if command.gentle and process.standing is Standing.RUNNING:
            if process.generation == command.generation:
                process = process._replace(pausing=True)
            return with_process(world, host, process)
        if active and process.generation == command.generation:
            process = news(process, standing=Standing.IDLE)
        return with_process(world, host, process)
    order: Order = command.order
    if process.standing is not Standing.IDLE or order.generation <= process.generation:
        return with_process(world, host, process)
    source = order.source
    assert source is not None
    step = process.step if chip(host) in source.holders else -1
    process = news(
        process, standing=Standing.ENTERING, generation=order.generation, seats=order.seats,
        donors=order.donors, source=source, step=step, made=False, pausing=False,
    )  # fmt: skip
    return with_process(world, host, process)


def _gives(host: int, process: Process) -> bool:
    return any(donor.chip == chip(host) for donor in process.donors)


def came_in(world: World, host: int, process: Process) -> World:
    """All have met: a seat has its state, a donor has given it."""
    if not _gives(host, process):
        return with_process(world, host, news(process, standing=Standing.RUNNING))
    assert process.source is not None
    if process.step != process.source.step:
        raise BrokenError(f"{chip(host)} gives step {process.step}, not {process.source.step}")
    return with_process(world, host, news(process, standing=Standing.IDLE, made=True))


def paused(world: World, process: Process) -> World:
    """All seats of a generation leave it after a step."""
    for seat in process.seats:
        at = int(seat.host[1:])
        own = world.processes[at]
        assert own is not None
        world = with_process(world, at, news(own, standing=Standing.IDLE, pausing=False))
    return world


def _peers(
    world: World, process: Process, seats: tuple[Seat, ...] | None = None
) -> list[Process | None]:
    found = list[Process | None]()
    for seat in process.seats if seats is None else seats:
        other = world.processes[int(seat.host[1:])]
        found.append(other if other is not None and other.number == seat.process else None)
    return found


def all_in(world: World, process: Process) -> bool:
    return all(
        p is not None
        and p.generation == process.generation
        and p.standing in (Standing.ENTERING, Standing.RUNNING)
        for p in _peers(world, process)
    ) and all(
        p is not None
        and p.generation == process.generation
        and (p.standing is Standing.ENTERING or p.made)
        for p in _peers(world, process, process.donors)
    )


def all_running(world: World, process: Process) -> bool:
    return all(
        p is not None and p.generation == process.generation and p.standing is Standing.RUNNING
        for p in _peers(world, process)
    )


def somebody_left(world: World, process: Process) -> bool:
    return any(
        p is None
        or p.generation > process.generation
        or (p.generation == process.generation and p.standing is Standing.IDLE)
        for p in _peers(world, process)
    ) or (process.standing is Standing.ENTERING and any(
        p is None
        or p.generation > process.generation
        or (p.generation == process.generation and p.standing is Standing.IDLE and not p.made)
        for p in _peers(world, process, process.donors)
    ))  # fmt: skip


def stepped(world: World, process: Process) -> World:
    """All seats of a generation make a step; what they began with must be of one step."""
    members, source = world.members, process.source
    assert source is not None
    if process.generation < members.generation and members.source is not None:
        for seat in process.seats:
            counts = seat.chip in members.source.holders
            if counts and any(s.chip == seat.chip and s.process == seat.process
                              for s in members.seats):  # fmt: skip
                raise BrokenError(
                    f"{seat.chip} goes on in {process.generation}; {members.generation} counts on "
                    "its state"
                )
    processes = world.processes
    for seat in process.seats:
        at = int(seat.host[1:])
        own = processes[at]
        assert own is not None
        began = own.step if chip(at) in source.holders else source.step
        if began != source.step:
            raise BrokenError(f"{seat.chip} begins at step {began}, others at {source.step}")
        processes = replaced(processes, at, news(own, step=source.step + 1, made=True))
    return replace(world, processes=processes)


# --- what must always hold -----------------------------------------------------------------------


def check_settle(world: World, question: Settle) -> None:
    """Nobody may go on with what a question says of it."""
    for report in question.left:
        process = world.processes[int(report.chip.split("/")[1])]
        if process is None or process.number != report.process:
            continue
        if process.step != report.step:
            raise BrokenError(f"{report.chip} said step {report.step} and has {process.step}")
        if process.standing is Standing.RUNNING:
            raise BrokenError(f"{report.chip} still runs while the next generation is settled")
