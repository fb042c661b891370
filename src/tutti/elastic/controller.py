"""Controller: `Membership` on a socket and a clock, with a planner and a log.

It runs until the job is over. Agents ask to join and are welcomed or refused. What the ranks say
(figures, warnings) comes to it through the agents and is passed on only if it is of the generation
at hand.
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
from tutti.elastic.messages import (
    VERSION,
    ChipPulse,
    HeardWords,
    Hello,
    Message,
    Order,
    Pulses,
    Refusal,
    Request,
    SealError,
    Seat,
    Status,
    Welcome,
    Words,
    packed,
    unpacked,
)

SETTLE = Callable[[Settle, Membership], Settled | Unsettled]
Passed = Callable[[int, str, str, dict[str, Any]], None]  # rank, chip, kind, values
Admit = Callable[[Hello], Welcome | str]  # or why not
_LAST_WORD_S = 1.0  # for agents to hear that all is over
_SAY_S = 1.0  # between two words that hosts are waited for
_LOOK_S = 0.05  # between two looks for silent hosts
_MOST_AT_ONCE = 4096  # messages, before the clock is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """What a controller needs to know."""

    job: str
    key: bytes = b""  # of messages
    death_after_s: float = 2.5
    wait_s: float = 600.0
    bind: str = "tcp://127.0.0.1:*"


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
        self.admit: Admit = lambda _hello: "this job takes no agents from elsewhere"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        try:
            self._socket.bind(settings.bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._identities: dict[str, bytes] = {}
        self._heard_at: dict[str, float] = {}
        self._addresses: dict[int, str] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._taken_up = 0  # the generation that an earlier controller lost
        self._newest: dict[str, tuple[int, int]] = {}  # status of each host that was heard
        self._packed: tuple[Order, bytes] | None = None  # the last that was sent
        self._words: dict[str, tuple[int, int]] = {}  # incarnation and number heard of each host
        self._requests: list[Request] = []  # that do not show yet
        self.pulses: dict[str, tuple[int, ChipPulse]] = {}  # by chip, and when they came
        self._waiting_at = -_SAY_S
        self._give_up_at, self._look_at = float("inf"), 0.0
        self.watch: Callable[[Membership], Event | None] = lambda _members: None
        self.hold: Callable[[], bool] = lambda: False  # until this host leads; whether it waited
        self.refused: dict[str, str] = {}  # agents of another job or version, and why

    def restore(self, members: Membership) -> None:
        """Go on where an earlier controller of the job ended; hosts have as long to come back."""
        self.members, self._taken_up = members, members.generation
        self._heard_at = dict.fromkeys((name for name, _ in members.hosts), time.monotonic())

    def tell(self, event: Event) -> None:
        """Take an event from outside, such as a wish; called by any thread."""
        self._events.put(event)

    def run(self) -> Membership:
        """Lead the job to its end; return how it ended."""
        while self.members.phase not in OVER:
            if self.hold():  # nobody could be heard of meanwhile
                self._heard_at = dict.fromkeys(self._heard_at, time.monotonic())
            self.turn()
        self.say_goodbye()
        return self.members

    def turn(self, most_s: float = 0.02) -> None:
        """Take what has come, and look at the clock."""
        self._socket.poll(int(most_s * 1000))
        for _ in range(_MOST_AT_ONCE):
            try:
                identity, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._message(identity, data)
        self._drain()
        at = time.monotonic()
        if at >= self._look_at:
            self._look_at = at + _LOOK_S
            self._find_silent(at)
        if at > self._give_up_at:
            self._give_up_at = float("inf")
            self._after(WaitedEnough())
        event = self.watch(self.members)
        if event is not None:
            self._after(event)

    def _find_silent(self, at: float) -> None:
        for name, heard_at in self._heard_at.items():
            if at - heard_at > self.settings.death_after_s:
                host = self.members.host(name)
                if host is not None and not host.silent:
                    self._after(Silent(name))

    def _drain(self) -> None:
        while not self._events.empty():
            self._after(self._events.get())

    def kill(self, seat: Seat, why: str) -> None:
        """Let a seat's agent end its process."""
        self._requests.append(
            Request(
                job=self.settings.job, kind="kill", chip=seat.chip, process=seat.process, why=why
            )
        )
        self._ask(seat.host, self._requests[-1])

    def finish(self, signal: int) -> None:
        """Let all ranks finish their step, save and end."""
        self._requests.append(Request(job=self.settings.job, kind="finish", signal=signal))
        for host in list(self._identities):
            self._ask(host, self._requests[-1])

    def _ask(self, host: str, request: Request) -> None:
        known = self._identities.get(host)
        if known is not None:
            self._send(known, request)

    def _ask_again(self, status: Status) -> None:
        """Repeat what a host was asked for and does not show yet."""
        chips = {report.chip: report.process for report in status.reports}
        for request in list(self._requests):
            if request.kind == "finish" or chips.get(request.chip) == request.process:
                self._ask(status.host, request)
            elif request.chip in chips:
                self._requests.remove(request)

    def _send(self, identity: bytes, message: Message) -> None:
        self._say(identity, packed(message, self.settings.key))

    def _say(self, identity: bytes, data: bytes) -> None:
        self._socket.send(identity, zmq.SNDMORE)  # quicker than both as a list
        self._socket.send(data)

    def close(self) -> None:
        """Let go of the socket; nobody is asked for anything any more."""
        self._identities.clear()
        self._socket.close()
        self._context.term()

    # --- in ------------------------------------------------------------------------------------

    def _message(self, identity: bytes, data: bytes) -> None:
        try:
            message = unpacked(data, self.settings.key)
        except SealError:
            self._send(identity, Refusal(why="another secret"))
            return
        except msgspec.DecodeError:
            return
        match message:
            case Status():
                self._status(identity, message)
            case Words() if message.job == self.settings.job:
                self._heard_words(identity, message)
            case Pulses() if message.job == self.settings.job:
                now = time.monotonic_ns()
                self.pulses.update({pulse.chip: (now, pulse) for pulse in message.pulses})
            case Hello():
                self._hello(identity, message)

    def _hello(self, identity: bytes, hello: Hello) -> None:
        answer = self.admit(hello)
        known = self.members.host(hello.node)
        if hello.version != VERSION:
            answer = f"its messages are of version {hello.version}, those of this job of {VERSION}"
        elif known is not None and not known.silent:
            answer = f"node {hello.node} has an agent already"
        if isinstance(answer, str):
            self.refused.setdefault(hello.node, answer)
        self._send(identity, Refusal(why=answer) if isinstance(answer, str) else answer)

    def _status(self, identity: bytes, status: Status) -> None:
        why = ""
        if status.job != self.settings.job or status.version != VERSION:
            what = "job" if status.job != self.settings.job else "version"
            why = f"agent of host {status.host}: another {what}"
        why = why or self._claimed(status)
        if why:
            self.refused.setdefault(status.host, why)
            self._send(identity, Refusal(why=why))
            return
        self._identities[status.host] = identity
        self._heard_at[status.host] = time.monotonic()
        if self._requests:
            self._ask_again(status)
        if not self._is_heartbeat(status):
            self._after(Heard(status))

    def _is_heartbeat(self, status: Status) -> bool:
        """Tell whether a status says nothing new, as most do: no look at all hosts for it."""
        stamp = (status.incarnation, status.number)
        late = stamp <= self._newest.get(status.host, (0, -1))
        self._newest[status.host] = max(stamp, self._newest.get(status.host, stamp))
        known = self.members.host(status.host)
        if late or known is None or known.silent or status.order < self.members.order:
            return late
        same = known.status
        return (
            status.reports == same.reports
            and status.order == same.order
            and status.incarnation == same.incarnation
            and status.draining == same.draining
            and status.kept == same.kept
        )

    def _claimed(self, status: Status) -> str:
        """Say which chip of an agent another one has already; empty if none."""
        chips = {report.chip for report in status.reports}
        if status.host in self._identities:
            return ""  # it was asked when it came
        for name, host in self.members.hosts:
            if name != status.host and not host.silent:
                both = chips & {report.chip for report in host.status.reports}
                if both:
                    return f"chip {min(both)} is claimed by hosts {name} and {status.host}"
        return ""

    def _heard_words(self, identity: bytes, words: Words) -> None:
        """Take words in their order; what came before is confirmed again, what is ahead waits."""
        incarnation, last = self._words.get(words.host, (0, 0))
        if words.incarnation < incarnation:
            return
        if words.incarnation != incarnation:
            last = 0
        # what was before it, another controller heard, or nobody can any more
        last = max(last, words.first - 1)
        if words.number > last + 1:
            return
        if words.number == last + 1:
            last = words.number
            self._words[words.host] = (words.incarnation, last)
            self._rank_said(words.chip, words.process, dict(words.values))
        self._send(
            identity,
            HeardWords(job=self.settings.job, incarnation=words.incarnation, number=last),
        )

    def _rank_said(self, chip: str, process: int, values: dict[str, Any]) -> None:
        kind = str(values.pop("kind"))
        if kind == "fatal":
            self._after(Fatal(str(values["text"])))
            return
        generation = int(values.pop("generation", self.members.generation))
        rank = next((s.rank for s in self.members.seats if s.chip == chip), 0)
        accepts = self.members.accepts_late if values.get("late") else self.members.accepts
        if kind == "step":
            values["generation"] = generation
            if generation <= self._taken_up and not accepts(generation, chip, process):
                # it was told to the controller that was lost
                accepts, values["late"] = self.members.accepts_late, True
        if kind in ("died", "warning", "error", "stranger") or accepts(generation, chip, process):
            self._passed(rank, chip, kind, values)

    # --- out -----------------------------------------------------------------------------------

    def _after(self, event: Event) -> None:
        before = self.members
        self.members, instructions = before.after(event)
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Send(host, order):
                if host in self._identities:
                    self._say(self._identities[host], self._order(order))
            case Settle():
                self.tell(self._settle(instruction, self.members))
            case StartWaiting():
                self._give_up_at = min(self._give_up_at, time.monotonic() + self.settings.wait_s)
            case Decided(generation, phase, why):
                self._decided(generation, phase, why)

    def _order(self, order: Order) -> bytes:
        """Return an order as bytes; all hosts get the same, so it is packed once."""
        if self._packed is not None and self._packed[0] is order:
            return self._packed[1]
        whole = order
        if order.kind == "enter":
            generation = order.generation
            if generation not in self._addresses:
                size = len(order.seats) + len(order.donors)
                self._addresses[generation] = self._rendezvous(generation, size)
            whole = msgspec.structs.replace(order, address=self._addresses[generation])
        self._packed = (order, packed(whole, self.settings.key))
        return self._packed[1]

    def _decided(self, generation: int, phase: Phase, why: str) -> None:
        members = self.members
        if not members.seats and phase in (Phase.SETTLING, Phase.WAITING):
            # before the first generation every host that comes is a question of its own
            at = time.monotonic()
            if phase is Phase.SETTLING or at < self._waiting_at + _SAY_S:
                return
            self._waiting_at = at
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
                seats=members.seats if entering else (),
                order=members.order,
            )
        )
        self._passed(
            0, "", "generation", {"generation": generation, "phase": phase.value, "text": why}
        )

    def say_goodbye(self) -> None:
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
