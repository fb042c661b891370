"""The states of a small job (`elastic_world`) as a few numbers each, quickly gone through.

What may happen is said there; here it is asked once for each part of a state that it concerns, and
remembered. `following` leads where `moves`, `promptly` and `live_only` lead: a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from tests.support import elastic_world as world
from tests.support.elastic_invariants import check
from tests.support.elastic_moves import process_moves
from tests.support.elastic_parts import (
    AGENT,
    ASKED,
    DOWN,
    EACH,
    LEFT,
    MEMBERS,
    NOTHING,
    PROCESS,
    UP,
    Parts,
    State,
)
from tests.support.elastic_world import Link, Process, World
from tutti.elastic.agent_state import AgentState
from tutti.elastic.events import Change, Drain, Heard, Phase, Silent, WaitedEnough
from tutti.elastic.membership import Membership
from tutti.elastic.messages import Standing


class Packed(Parts):
    """States of a job of some hosts, and what follows from each."""

    def __init__(self, hosts: int) -> None:
        super().__init__(hosts)
        self._empty = replace(
            world.begin(0, 0, 0, late=0),
            agents=(None,) * hosts, processes=(None,) * hosts,
            up=(NOTHING,) * hosts, down=(NOTHING,) * hosts,
        )  # fmt: skip
        self._known: dict[Any, Any] = {}  # what was asked already
        self._links: dict[int, tuple[int, int, int]] = {}

    # --- what may happen -------------------------------------------------------------------------

    def check(self, state: State) -> None:
        """See that what must hold does."""
        for host, first in enumerate(self.first):
            members, process = state[MEMBERS], state[first + PROCESS]
            if (key := ("check", members, host, process)) not in self._known:
                self._known[key] = self._checked(state, host)

    def _checked(self, state: State, host: int) -> bool:
        process = self.values[state[self.first[host] + PROCESS]]
        alone = world.replaced(self._empty.processes, host, process)
        check(replace(self._empty, members=self.values[state[MEMBERS]], processes=alone))
        return True

    def following(self, state: State) -> Iterator[State]:
        """Yield what any move leads to, as it is visited."""
        for after in self._moves(state):
            yield self.visited(after)

    def visited(self, state: Sequence[int]) -> State:
        """Return a state once all that is said within hosts is said, without dead messages."""
        return self.renumbered(self._live(self._promptly(list(state))))

    def _moves(self, state: State) -> Iterator[list[int]]:
        values, left = self.values, state[LEFT]
        late = values[left][2]
        less = self.id((*values[left][:2], late - 1, values[left][3])) if late > 0 else left
        for host, first in enumerate(self.first):
            newest, before, rest = self._link(state[first + UP])
            if newest:
                yield self._heard(_with(state, first + UP, rest), newest, Heard)
            if before and late:
                yield self._heard(_with(state, LEFT, less), before, Heard)
            if state[first + AGENT] != self.nobody:
                yield from self._of_host(state, host, less if late else -1)
        newest, before, rest = self._link(state[ASKED])
        if newest:
            yield self._heard(_with(state, ASKED, rest), newest, world.settle)
        if before and late:
            yield self._heard(_with(state, LEFT, less), before, world.settle)
        yield from self._faults(state)

    def _link(self, link: int) -> tuple[int, int, int]:
        """Return what is newest on a link, and before; and the link once the newest has come."""
        found = self._links.get(link)
        if found is None:
            value = self.values[link]
            newest, before = (0 if message is None else self.id(message) for message in value)
            found = self._links[link] = newest, before, self.id(value.delivered())
        return found

    def _of_host(self, state: State, host: int, less: int) -> Iterator[list[int]]:
        first = self.first[host]
        newest, before, rest = self._link(state[first + DOWN])
        if newest:
            yield self._on_host(_with(state, first + DOWN, rest), host, newest, self._order(newest))
        if before and less >= 0:
            yield self._on_host(_with(state, LEFT, less), host, before, self._order(before))
        if state[first + PROCESS] == self.nobody:
            return
        processes = tuple(state[at + PROCESS] for at in self.first)
        acts = self._known.get(("acts", host, processes))
        if acts is None:
            acts = self._known["acts", host, processes] = self._acts(host, processes)
        for generation, after in acts:
            if 0 <= generation < self.values[state[MEMBERS]].generation:
                actor = self.values[state[first + PROCESS]]
                world.stepped(self.world(state), actor)  # one that is over: it must not count
            changed = list(state)
            for at, process in zip(self.first, after, strict=True):
                changed[at + PROCESS] = process
            yield changed

    def _order(self, order: int) -> Callable[..., World]:
        return lambda state, host, _: world.ordered(state, host, self.values[order])

    def _acts(self, host: int, processes: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """Return what a process may do that others take part in: its generation, what follows."""
        found = list[tuple[int, tuple[int, ...]]]()
        state = replace(self._empty, processes=tuple(self.values[p] for p in processes))
        own = state.processes[host]
        for name, after in process_moves(state, host, own):
            assert name.startswith(("pause", "step", f"p{host} loses"))
            generation = own.generation if name.startswith("step") else -1
            found.append((generation, tuple(map(self.id, after.processes))))
        return found

    def _faults(self, state: State) -> Iterator[list[int]]:
        members: Membership = self.values[state[MEMBERS]]
        faults, newcomers, late, wishes = self.values[state[LEFT]]
        if members.phase is Phase.WAITING and members.why:
            yield self._told_of(state, WaitedEnough())
        if faults:
            less = _with(state, LEFT, self.id((faults - 1, newcomers, late, wishes)))
            for host, first in enumerate(self.first):
                if self.values[state[first + AGENT]] is None:
                    continue
                if self.values[state[first + PROCESS]] is not None:
                    yield self._on_host(less, host, "kill", world.killed)
                known = members.host(f"h{host}")
                if known is not None and not known.silent:
                    yield self._told_of(less, Silent(f"h{host}"))
                    dead = list(less)
                    gone = (None, None, NOTHING, NOTHING)
                    dead[first : first + EACH] = map(self.id, gone)
                    yield self._told_of(dead, Silent(f"h{host}"))
        if wishes:
            less = _with(state, LEFT, self.id((faults, newcomers, late, wishes - 1)))
            if members.phase is Phase.RUNNING:
                yield self._told_of(less, Change("a better plan"))
            for host, first in enumerate(self.first):
                if self.values[state[first + AGENT]] is not None:
                    back = f"p/{host}" in members.drained
                    yield self._told_of(less, Drain(f"p/{host}", back=back))
        if newcomers:
            come = _with(state, LEFT, self.id((faults, newcomers - 1, late, wishes)))
            host = len(self.hosts) - newcomers
            agent = AgentState.of(world.JOB, f"h{host}", (world.chip(host),), incarnation=1)
            at, parts = self.first[host], (agent, Process(1), Link(agent.status()))
            come[at : at + len(parts)] = map(self.id, parts)
            yield come

    # --- what it leads to ------------------------------------------------------------------------

    def _told_of(self, state: Sequence[int], event: Any) -> list[int]:
        return self._heard(state, self.id(event), lambda known: known)

    def _heard(self, state: Sequence[int], message: int, event: Callable[[Any], Any]) -> list[int]:
        key = "heard", state[MEMBERS], message
        found = self._known.get(key)
        if found is None:
            event_of = event(self.values[message])
            found = self._known[key] = self._hear(state[MEMBERS], event_of)
        members, sent, questions = found
        after = list(state)
        after[MEMBERS] = members
        for host, order in sent:
            at = self.first[host] + DOWN
            after[at] = self._sent(after[at], order)
        for question in questions:
            world.check_settle(self.world(after), self.values[question])
            after[ASKED] = self._sent(after[ASKED], question)
        return after

    def _hear(self, members: int, event: Any) -> tuple[int, list[tuple[int, int]], list[int]]:
        after = world.heard(replace(self._empty, members=self.values[members]), event)
        sent = [
            (host, self.id(order)) for host in self.hosts for order in reversed(after.down[host])
            if order is not None
        ]  # fmt: skip
        asked = reversed(after.asked)
        questions = [self.id(question) for question in asked if question is not None]
        return self.id(after.members), sent, questions

    def _sent(self, link: int, message: int) -> int:
        key = "sent", link, message
        found = self._known.get(key)
        if found is None:
            value = self.values[link].sent(self.values[message])
            found = self._known[key] = self.id(value)
        return found

    def _on_host(
        self, state: Sequence[int], host: int, what: Any, change: Callable[..., World]
    ) -> list[int]:
        first = self.first[host]
        key = what, host, state[first + AGENT], state[first + PROCESS]
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._change(state, host, change)
        agent, process, said = found
        after = list(state)
        after[first + AGENT], after[first + PROCESS] = agent, process
        if said:
            after[first + UP] = self._sent(after[first + UP], said)
        return after

    def _change(
        self, state: Sequence[int], host: int, change: Callable[..., World]
    ) -> tuple[int, int, int]:
        first, empty = self.first[host], self._empty
        agent, process = (self.values[state[first + part]] for part in (AGENT, PROCESS))
        own = replace(
            empty, agents=world.replaced(empty.agents, host, agent),
            processes=world.replaced(empty.processes, host, process),
        )  # fmt: skip
        after = change(own, host, process)
        assert after.up[host].before is None
        said = after.up[host].newest
        word = 0 if said is None else self.id(said)
        return self.id(after.agents[host]), self.id(after.processes[host]), word

    def _promptly(self, state: list[int]) -> list[int]:
        """Do as `promptly`, in the same order."""
        known = self._known
        while True:
            for host, first in enumerate(self.first):
                key: Any = ("local", host, state[first + AGENT], state[first + PROCESS])
                local = known.get(key)
                if local is None:
                    local = known[key] = self._local(state, host)
                if local == "in":
                    key = ("in", host, *(state[at + PROCESS] for at in self.first))
                    local = known.get(key)
                    if local is None:
                        local = known[key] = self._in(state, host)
                if local != "nothing":
                    state = self._on_host(state, host, "prompt", local)
                    break
            else:
                return state

    def _local(self, state: Sequence[int], host: int) -> Any:
        """Return what a host's process does next by itself; "in": perhaps it comes in."""
        agent, process = (self.values[state[self.first[host] + p]] for p in (AGENT, PROCESS))
        if agent is None or process is None:
            return "nothing"
        if process.standing is Standing.STARTING:
            ready = world.news(process, standing=Standing.IDLE)
            return lambda w, h, _: world.said(w, h, ready)
        if process.mail:
            return world.obeyed
        if not process.said:
            return world.said
        return "in" if process.standing is Standing.ENTERING else "nothing"

    def _in(self, state: Sequence[int], host: int) -> Any:
        whole = self.world(state)
        process = whole.processes[host]
        assert process is not None
        return world.came_in if world.all_in(whole, process) else "nothing"

    def _live(self, state: list[int]) -> list[int]:
        """Do as `live_only`."""
        nothing, late = self.nothing, self.values[state[LEFT]][2] != 0
        for host, first in enumerate(self.first):
            up, down = first + UP, first + DOWN
            if state[up] != nothing:
                state[up] = self._living_part("up", state, up, MEMBERS, late, host)
            if state[down] != nothing:
                state[down] = self._living_part("down", state, down, first + AGENT, late, host)
        if state[ASKED] != nothing:
            state[ASKED] = self._living_part("asked", state, ASKED, MEMBERS, late, -1)
        return state

    def _living_part(
        self, link: str, state: Sequence[int], part: int, receiver: int, late: bool, host: int
    ) -> int:
        key = link, late, state[receiver], state[part]
        found = self._known.get(key)
        if found is None:
            of = getattr(self._living(state, host), link)
            found = self._known[key] = self.id(of if host < 0 else of[host])
        return found

    def _living(self, state: Sequence[int], host: int) -> World:
        """Return what lives of a host's links, or of the question."""
        values, kept = self.values, self._empty
        members, late = values[state[MEMBERS]], values[state[LEFT]][2]
        if host < 0:
            return world.live_only(
                replace(kept, asked=values[state[ASKED]], members=members, late=late)
            )
        first = self.first[host]
        up, down = values[state[first + UP]], values[state[first + DOWN]]
        known, agent = members.host(f"h{host}"), values[state[first + AGENT]]
        if not late:  # what nothing is to be looked at for
            up, down = Link(up.newest), Link(down.newest)
        number = known.status.number if known is not None else 0
        has = agent.order.number if agent is not None and agent.order is not None else 0
        lives = (up.newest is None or up.newest.number > number) and (
            down.newest is None or (agent is not None and down.newest.number > has)
        )
        kept = replace(
            kept, up=world.replaced(kept.up, host, up), down=world.replaced(kept.down, host, down),
            agents=world.replaced(kept.agents, host, agent), members=members, late=late,
        )  # fmt: skip
        return kept if lives and not late else world.live_only(kept)


def _with(state: Sequence[int], at: int, part: int) -> list[int]:
    changed = list(state)
    changed[at] = part
    return changed
