"""Controller: `Membership` on a socket and a clock, with a planner and a log.

It runs until the job is over. What the ranks say (figures, warnings) comes to it through the
agents and is passed on only if it is of the generation at hand.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from tutti.elastic.events import (
    Change,
    Decided,
    Event,
    Fatal,
    Heard,
    Instruction,
    Phase,
    Send,
    Settle,
    Settled,
    Silent,
    StartWaiting,
    Unsettled,
    WaitedEnough,
)
from tutti.elastic.journal import Entry, Journal, now
from tutti.elastic.membership import OVER, Membership
from tutti.elastic.messages import VERSION, Report, Status, packed, unpacked

SETTLE = Callable[[Settle, Membership], Settled | Unsettled]
Passed = Callable[[int, str, dict[str, Any]], None]  # rank, kind, values
_LAST_WORD_S = 1.0  # for agents to hear that all is over


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """What a controller needs to know."""

    job: str
    death_after_s: float = 3.0
    wait_s: float = 600.0
    bind: str = "tcp://127.0.0.1:*"


@dataclass(frozen=True, slots=True)
class RankSaid:
    """What a rank's process said, or that it died."""

    chip: str
    process: int
    values: dict[str, Any]


class Controller:
    """The one that leads a job."""

    def __init__(
        self,
        settings: ControllerSettings,
        journal: Journal,
        settle: SETTLE,
        rendezvous: Callable[[int, int], str],
        passed: Passed,
        *,
        generation: int = 0,
    ) -> None:
        """Bind; `rendezvous` opens where the ranks of (generation, size) meet."""
        self.settings, self._journal, self._settle = settings, journal, settle
        self._rendezvous, self._passed = rendezvous, passed
        self.members = Membership(job=settings.job, generation=generation)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.bind(settings.bind)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._identities: dict[str, bytes] = {}
        self._heard_at: dict[str, float] = {}
        self._addresses: dict[int, str] = {}
        self._events: queue.SimpleQueue[RankSaid | Event] = queue.SimpleQueue()
        self._give_up_at = float("inf")
        self.watch: Callable[[Membership], Event | None] = lambda _members: None
        self.refused: dict[str, str] = {}  # agents of another job or version, and why

    def hear(self, chip: str, process: int, values: dict[str, Any]) -> None:
        """Take what a rank's process said; called by any thread."""
        self._events.put(RankSaid(chip, process, values))

    def tell(self, event: Event) -> None:
        """Take an event from outside, such as a wish; called by any thread."""
        self._events.put(event)

    def run(self) -> Membership:
        """Lead the job to its end; return how it ended."""
        while self.members.phase not in OVER:
            self.turn()
        self._say_goodbye()
        return self.members

    def turn(self, most_s: float = 0.02) -> None:
        """Take what has come, and look at the clock."""
        self._socket.poll(int(most_s * 1000))
        while self._socket.poll(0):
            identity, data = self._socket.recv_multipart()
            self._drain()  # what a rank said before its agent's status counts before it, too
            self._message(identity, data)
        self._drain()
        at = time.monotonic()
        for name, heard_at in self._heard_at.items():
            if at - heard_at > self.settings.death_after_s:
                self._after(Silent(name))
        if at > self._give_up_at:
            self._give_up_at = float("inf")
            self._after(WaitedEnough())
        found = self.watch(self.members)
        if found is not None:
            self._after(found)

    def _drain(self) -> None:
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, RankSaid):
                self._rank_said(event)
            else:
                self._after(event)

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()
        self._context.term()

    # --- in ------------------------------------------------------------------------------------

    def _message(self, identity: bytes, data: bytes) -> None:
        try:
            message = unpacked(data)
        except msgspec.DecodeError:
            return
        if not isinstance(message, Status):
            return
        if message.job != self.settings.job or message.version != VERSION:
            what = "job" if message.job != self.settings.job else "version"
            self.refused.setdefault(message.host, f"agent of host {message.host}: another {what}")
            return
        twice = self._claimed(message)
        if twice:
            self.refused.setdefault(message.host, twice)
            return
        self._identities[message.host] = identity
        self._heard_at[message.host] = time.monotonic()
        self._after(Heard(message))

    def _claimed(self, status: Status) -> str:
        """Say which chip of an agent another one has already; empty if none."""
        chips = {report.chip for report in status.reports}
        for name, host in self.members.hosts:
            if name != status.host and not host.silent:
                both = chips & {report.chip for report in host.status.reports}
                if both:
                    return f"chip {min(both)} is claimed by hosts {name} and {status.host}"
        return ""

    def _rank_said(self, said: RankSaid) -> None:
        values = dict(said.values)
        kind = str(values.pop("kind"))
        if kind == "fatal":
            self._after(Fatal(str(values["text"])))
            return
        generation = int(values.pop("generation", self.members.generation))
        rank = next((s.rank for s in self.members.seats if s.chip == said.chip), 0)
        if kind in ("died", "warning", "error", "stranger") or self.members.accepts(
            generation, said.chip, said.process
        ):
            self._passed(rank, kind, values)

    # --- out -----------------------------------------------------------------------------------

    def _after(self, event: Event) -> None:
        before = self.members
        self.members, instructions = before.after(event)
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Send(host, order):
                if order.kind == "enter":
                    generation = order.generation
                    if generation not in self._addresses:
                        self._addresses[generation] = self._rendezvous(generation, len(order.seats))
                    order = msgspec.structs.replace(order, address=self._addresses[generation])
                if host in self._identities:
                    self._socket.send_multipart([self._identities[host], packed(order)])
            case Settle():
                self.tell(self._settle(instruction, self.members))
            case StartWaiting():
                self._give_up_at = min(self._give_up_at, time.monotonic() + self.settings.wait_s)
            case Decided(generation, phase, why):
                self._decided(generation, phase, why)

    def _decided(self, generation: int, phase: Phase, why: str) -> None:
        members = self.members
        source = members.source
        entering = phase is Phase.ENTERING
        if entering:
            self._give_up_at = float("inf")
            self._journal.fence(generation)
        self._journal.write(
            Entry(
                at=now(),
                generation=generation,
                phase=phase.value,
                why=why,
                step=source.step if entering and source is not None else None,
                source=source.kind if entering and source is not None else "",
                plan=members.plan if entering else "",
                ranks=tuple(seat.chip for seat in members.seats) if entering else (),
            )
        )
        self._passed(0, "generation", {"generation": generation, "phase": phase.value, "text": why})

    def _say_goodbye(self) -> None:
        """Tell every agent that all is over, for a while: whoever comes later finds nobody."""
        until = time.monotonic() + _LAST_WORD_S
        while time.monotonic() < until:
            waiting = [
                name
                for name, host in self.members.hosts
                if not host.silent and host.status.order < self.members.order
            ]
            if not waiting:
                return
            self.turn()


def all_reports(members: Membership) -> dict[str, Report]:
    """Return what is known of every chip of hosts that are there."""
    return {
        report.chip: report
        for _, host in members.hosts
        if not host.silent
        for report in host.status.reports
    }


__all__ = ["Change", "Controller", "ControllerSettings", "all_reports"]
