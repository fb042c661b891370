"""Membership: who takes part, in which generation; events in, instructions out. Pure.

A generation is a set of seats that train together. Whenever one of them is lost, all are asked to
leave; when every one that is left has said how far it came, somebody who knows plans and copies is
asked to settle the next generation; then its seats are asked to enter. Whoever has state that
counts, and no seat any more, is asked to give it to them. Where nobody is lost (a better plan, a
host to be drained) all leave after the step at hand. The generation's number only rises and is a
fencing token: whatever carries a lower one is refused.

    WAITING → SETTLING → ENTERING → RUNNING → FINISHED
       ↑         ↑  ↖──── LEAVING ←───┘ ↲
       └─────────┘                        any → GIVEN_UP

There is no clock here: that a host is silent, or that waiting was long enough, is an event.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tutti.elastic.events import (
    Change,
    Decided,
    Drain,
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
from tutti.elastic.hosts import (
    Fault,
    Host,
    all_are,
    came_back,
    copy_addresses,
    failure,
    giving_chips,
    how_it_ended,
    loss,
    named,
    new_faults,
    seat_on,
    with_entry,
)
from tutti.elastic.messages import Order, Report, Seat, Source, Standing, Status

OVER = frozenset({Phase.FINISHED, Phase.GIVEN_UP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The state of the machine."""

    job: str
    phase: Phase = Phase.WAITING
    generation: int = 0
    order: int = 0
    request: int = 0
    why: str = ""
    seats: tuple[Seat, ...] = ()
    donors: tuple[Seat, ...] = ()  # without a seat, but with state that the seats are given
    last: bool = False  # others were waited for long enough
    gentle: bool = False  # leaving after the step at hand: nobody is lost
    drained: tuple[str, ...] = ()  # places whose chips are not to be used
    plan: str = ""
    source: Source | None = None
    asked: tuple[str, ...] = ()  # the chips of the request that is open, or was refused
    counted: tuple[Seat, ...] = ()  # whose state that request counts on
    hosts: tuple[tuple[str, Host], ...] = ()  # by name
    faults: tuple[Fault, ...] = ()
    told: tuple[tuple[str, int, int], ...] = field(default=())  # host, order, its number when told

    def host(self, name: str) -> Host | None:
        """Return a host by its name."""
        at = bisect.bisect_left(self.hosts, name, key=lambda known: known[0])
        entry = self.hosts[at] if at < len(self.hosts) else None
        return entry[1] if entry is not None and entry[0] == name else None

    def chips(self) -> tuple[str, ...]:
        """Return the chips that may be given seats."""
        return tuple(
            sorted(
                report.chip
                for _, host in self.hosts
                if host.usable
                for report in host.status.reports
                if not self.is_drained(report.chip)
            )
        )

    def is_drained(self, chip: str) -> bool:
        """Tell whether a chip is to be left."""
        return any(chip == place or chip.startswith(f"{place}/") for place in self.drained)

    def seated(self, seat: Seat) -> Report | None:
        """Return what is heard of a seat; None if its process is gone."""
        host = self.host(seat.host)
        if host is None or host.silent or host.status.incarnation != seat.incarnation:
            return None
        report = host.report(seat.chip)
        return report if report is not None and report.process == seat.process else None

    def accepts(self, generation: int, chip: str, process: int) -> bool:
        """Tell whether what a rank's process writes counts: of this generation, and of a seat."""
        if generation != self.generation or self.phase in (Phase.SETTLING, Phase.WAITING):
            return False
        return any(seat.chip == chip and seat.process == process for seat in self.seats)

    def accepts_late(self, generation: int, chip: str, process: int) -> bool:
        """Tell whether a seat may still say what it did in a generation that is over."""
        known = any(seat.chip == chip and seat.process == process for seat in self.seats)
        return known and generation <= self.generation

    def after(self, event: Event) -> tuple[Membership, tuple[Instruction, ...]]:
        """Return the state after an event, and what is to be done for it."""
        if self.phase in OVER:
            return self._still_told(event)
        taken = self._take(event)
        if taken is None:
            return self, ()
        moved, instructions = taken, list[Instruction]()
        # where the event is of one host, and nothing has followed from it, all others are as before
        only = event.status.host if isinstance(event, Heard) and taken.order == self.order else ""
        while True:
            following, more = moved._next(only)
            instructions += more
            if following is moved:
                break
            moved, only = following, ""
        if moved.phase is not self.phase or moved.generation != self.generation:
            instructions.append(Decided(moved.generation, moved.phase, moved.why))
        if moved.phase is Phase.WAITING and self.phase is not Phase.WAITING:
            instructions.append(StartWaiting(moved.why))
        moved, sends = moved._tell(only)
        return moved, (*instructions, *sends)

    # --- what an event says ------------------------------------------------------------------

    def _take(self, event: Event) -> Membership | None:
        match event:
            case Heard(status):
                return self._heard(status)
            case Silent(name):
                host = self.host(name)
                if host is None or host.silent:
                    return None
                return self._with_host(name, replace(host, silent=True))
            case Settled() | Unsettled():
                return self._answered(event)
            case WaitedEnough():
                if self.phase is not Phase.WAITING:
                    return None
                # those that are there are asked about once more
                again = replace(self, last=True, asked=())
                return again if self.chips() else self._give_up(self.why)
            case Change(why):
                running = self.phase in (Phase.RUNNING, Phase.ENTERING)
                return self._leave(why, gentle=True) if running else None
            case Drain(place, back):
                kept = tuple(known for known in self.drained if known != place)
                return replace(self, drained=kept if back else (*kept, place))
            case Fatal(why):
                return self._give_up(why)

    def _heard(self, status: Status) -> Membership | None:
        if self._is_late(status):
            return None
        taken = self._with_host(status.host, Host(status=status))
        if status.order > self.order:  # an earlier controller got further than its log says
            taken = replace(taken, order=status.order + 1)
        new = new_faults(status, self.faults)
        if not new:
            return taken
        taken = replace(taken, faults=(*taken.faults, *new))
        again = came_back(taken.faults, new)
        if again is None:
            return taken
        count, (last, *_, step, instruction) = again
        return taken._give_up(
            f"{count} processes ended at step {step}, instruction {instruction} "
            f"(the last on {last}: {how_it_ended(status, last)}); going on would repeat it"
        )

    def _is_late(self, status: Status) -> bool:
        """Tell whether a status is older than what is known, or told twice."""
        host = self.host(status.host)
        known = (-1, -1) if host is None else (host.status.incarnation, host.status.number)
        return (status.incarnation, status.number) <= known

    def _with_host(self, name: str, host: Host) -> Membership:
        return replace(self, hosts=with_entry(self.hosts, (name, host)))

    def _answered(self, event: Settled | Unsettled) -> Membership | None:
        if self.phase is not Phase.SETTLING or event.request != self.request:
            return None
        if isinstance(event, Unsettled) and self.last:
            return self._give_up(event.why)
        if isinstance(event, Unsettled):
            return replace(self, phase=Phase.WAITING, why=event.why)
        places = {
            report.chip: (name, host)
            for name, host in self.hosts
            if not host.silent
            for report in host.status.reports
        }
        seats = [seat_on(places, rank, chip) for rank, chip in enumerate(event.ranks)]
        given = giving_chips(event.source, self.hosts, frozenset(event.ranks))
        donors = [
            seat_on(places, len(seats) + n, chip, any_host=True) for n, chip in enumerate(given)
        ]
        if None in seats or None in donors:  # lost in the meantime
            return replace(self, asked=())
        return replace(
            self,
            phase=Phase.ENTERING,
            generation=self.generation + 1,
            order=self.order + 1,
            seats=tuple(seat for seat in seats if seat is not None),
            donors=tuple(seat for seat in donors if seat is not None),
            gentle=False,
            last=False,
            plan=event.plan,
            source=event.source,
            why=event.source.text,
        )

    # --- where that leads ----------------------------------------------------------------------

    def _next(self, only: str) -> tuple[Membership, tuple[Instruction, ...]]:
        """Return the state that follows, the same if none does; `only` that host has changed."""
        match self.phase:
            case Phase.ENTERING | Phase.RUNNING:
                return self._watch(only), ()
            case Phase.LEAVING if self._all_left():
                return self._ask()
            case Phase.LEAVING if self.gentle and None in map(self.seated, self.seats):
                # one is lost after all: the others need not wait for it
                return self._leave(self.why), ()
            case Phase.SETTLING | Phase.WAITING if not self._all_left():
                return replace(self, phase=Phase.LEAVING), ()  # one came back, and still trains
            case Phase.SETTLING if self.asked != self.chips() or None in map(
                self.seated, self.counted
            ):
                return self._ask()
            case Phase.WAITING if self.chips() and self.asked != self.chips():
                return self._ask()
        return self, ()

    def _watch(self, only: str) -> Membership:
        seats = [seat for seat in self.seats if not only or seat.host == only]
        if losses := self._losses(seats):
            return self._leave(losses)
        reports = [report for seat in seats if (report := self.seated(seat)) is not None]
        for seat, report in zip(seats, reports, strict=True):
            host = self.host(seat.host)
            if (host is not None and host.status.draining) or self.is_drained(seat.chip):
                return self._leave(f"{seat.chip} on host {seat.host} is to be left", gentle=True)
            if report.standing is Standing.IDLE and report.generation == self.generation:
                return self._leave(f"rank {seat.rank} ({seat.chip}) lost the others")
        donors = [d for d in self.donors if not only or d.host == only]
        lost = [d for d in donors if self.phase is Phase.ENTERING and self.seated(d) is None]
        if lost:
            return self._leave(loss(lost[0], self.host(lost[0].host)))
        seated = self.seats, dict(self.hosts), self.generation
        if all_are(reports, *seated, {Standing.DONE}):
            over = replace(self, phase=Phase.FINISHED, order=self.order + 1)
            return replace(over, why="all steps are made")
        going = {Standing.RUNNING, Standing.DONE}
        if self.phase is Phase.ENTERING and all_are(reports, *seated, going):
            # whoever was only waited for may go now, or let go of its state; and is told so
            free = bool(self.donors) or any(host.status.draining for _, host in self.hosts)
            return replace(self, phase=Phase.RUNNING, donors=(), order=self.order + free)
        return self

    def _losses(self, seats: Iterable[Seat]) -> str:
        """Return who of the seats is lost, and how; empty if nobody is."""
        return named(
            [loss(seat, self.host(seat.host)) for seat in seats if self.seated(seat) is None]
        )

    def _has_left(self, seat: Seat) -> bool:
        report = self.seated(seat)
        if report is None:
            return True
        if report.generation < self.generation:
            # it never came in; it must know that it may not any more, or it could yet do so with
            # one that only seems to be lost
            host = self.host(seat.host)
            return host is not None and host.status.order >= self.order
        return report.standing is Standing.IDLE

    def _all_left(self) -> bool:
        return all(map(self._has_left, (*self.seats, *self.donors)))

    def _leave(self, why: str, *, gentle: bool = False) -> Membership:
        # before all are in there is no step that could be finished
        gentle = gentle and self.phase is Phase.RUNNING
        return replace(self, phase=Phase.LEAVING, order=self.order + 1, why=why, gentle=gentle)

    def _ask(self) -> tuple[Membership, tuple[Instruction, ...]]:
        chips = self.chips()
        # one that was believed lost and is heard of again may still be training: it does not count
        counted = tuple(
            seat
            for seat in (*self.seats, *self.donors)
            if self._has_left(seat) and self.seated(seat) is not None
        )
        # who lost the others was heard of first; who was lost is known by now
        why = (self.phase is Phase.LEAVING and self._losses(self.seats)) or self.why
        reports = list(map(self.seated, (*self.seats, *self.donors)))
        faults = self.faults
        if self.phase is Phase.LEAVING and not self.gentle and None not in reports:
            failed = failure(reports, self.generation)
            if failed is not None:
                faults, why = (*faults, failed[0]), failed[1]
            if failed is not None and (again := came_back(faults, failed[:1])) is not None:
                times = f"{again[0]} times at step {again[1][3]}"
                return self._give_up(f"{times}: {why}; going on would repeat it"), ()
        asking = replace(
            self, faults=faults, phase=Phase.SETTLING, request=self.request + 1, asked=chips,
            counted=counted, why=why,
        )  # fmt: skip
        left = tuple(report for report in map(self.seated, counted) if report is not None)
        return asking, (Settle(asking.request, chips, left, self.last),)

    def _give_up(self, why: str) -> Membership:
        return replace(self, phase=Phase.GIVEN_UP, order=self.order + 1, why=why)

    # --- who is told ---------------------------------------------------------------------------

    def order_for(self, host: str) -> Order | None:
        """Return what an agent is to bring about now; None before the first generation."""
        if not self.order:
            return None
        common = {"job": self.job, "number": self.order, "generation": self.generation}
        free = self.phase is Phase.RUNNING and self._is_free(host)
        if free or self.phase in OVER:
            why = "the host is drained, and the others go on without it" if free else self.why
            return Order(**common, kind="stop", why=why)  # type: ignore[arg-type]
        if self.phase in (Phase.ENTERING, Phase.RUNNING):
            return Order(
                **common,  # type: ignore[arg-type]
                kind="enter", seats=self.seats, donors=self.donors, plan=self.plan,
                source=self.source, copy_addresses=copy_addresses(self.seats, self.hosts),
            )  # fmt: skip
        words = {"why": self.why, "gentle": self.gentle}
        return Order(**common, kind="leave", **words)  # type: ignore[arg-type]

    def _is_free(self, name: str) -> bool:
        host = self.host(name)
        draining = host is not None and host.status.draining
        return draining and not any(seat.host == name for seat in self.seats)

    def _tell(self, only: str) -> tuple[Membership, tuple[Send, ...]]:
        """Send the order to whoever has an older one; again whenever it is heard of without."""
        if not self.order:
            return replace(self, told=()), ()
        if only and self.told and self.told[0][1] == self.order:
            return self._tell_one(only)
        sends, told = list[Send](), list[tuple[str, int, int]]()
        before, common = set(self.told), None
        for name, host in self.hosts:
            if host.silent:
                continue
            note = (name, self.order, host.status.number)
            told.append(note)
            if host.status.order < self.order and note not in before:
                # one order for all, so that it is packed once
                own = host.status.draining or common is None
                order = self.order_for(name) if own else common
                common = common if host.status.draining else order
                assert order is not None
                sends.append(Send(name, order))
        return replace(self, told=tuple(told)), tuple(sends)

    def _tell_one(self, name: str) -> tuple[Membership, tuple[Send, ...]]:
        """Send the order to the one host that has changed, if it has an older one."""
        host = self.host(name)
        assert host is not None  # it was heard, so it is not silent
        told = with_entry(self.told, (name, self.order, host.status.number))
        order = self.order_for(name) if host.status.order < self.order else None
        sends = () if order is None or told == self.told else (Send(name, order),)
        return replace(self, told=told), sends

    def _still_told(self, event: Event) -> tuple[Membership, tuple[Instruction, ...]]:
        """When all is over, agents are still told so."""
        if not isinstance(event, Heard) or self._is_late(event.status):
            return self, ()
        return self._with_host(event.status.host, Host(status=event.status))._tell("")
