"""AgentState: what an agent knows and does; orders and news of its processes in. Pure.

One process per chip. A process that ends is replaced at once: starting it takes longer than
deciding what it is for. Orders are obeyed by their number; an older one is passed over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from tutti.elastic.messages import Death, Order, Report, Seat, Standing, Status

_ACTIVE = frozenset({Standing.ENTERING, Standing.RUNNING, Standing.DONE})
KEPT_DEATHS = 8  # of a chip, in its reports


@dataclass(frozen=True, slots=True)
class Said:
    """A process says where it stands; only what concerns its standing is taken from the report."""

    report: Report


@dataclass(frozen=True, slots=True)
class Died:
    """A process ended."""

    chip: str
    death: Death


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process for a chip."""

    chip: str
    process: int


@dataclass(frozen=True, slots=True)
class Enter:
    """Tell a process to enter a generation."""

    chip: str
    seat: Seat
    order: Order


@dataclass(frozen=True, slots=True)
class Leave:
    """Tell a process to leave whatever generation it is in."""

    chip: str
    generation: int
    why: str
    gentle: bool = False  # after the step at hand


@dataclass(frozen=True, slots=True)
class Free:
    """Let a process go of the state that it holds: others have it."""

    chip: str


@dataclass(frozen=True, slots=True)
class End:
    """End all processes; the job is over."""

    why: str


Command = Start | Enter | Leave | Free | End


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """One host's side of the job."""

    job: str
    host: str
    incarnation: int
    number: int = 1
    order: Order | None = None
    reports: tuple[Report, ...] = ()
    leaving: tuple[tuple[str, int, bool], ...] = ()  # (chip, generation, gently) that were told
    draining: bool = False
    kept: tuple[tuple[str, int, int], ...] = ()  # copies of other hosts' chips
    copy_address: str = ""  # where they may be brought

    @classmethod
    def of(cls, job: str, host: str, chips: tuple[str, ...], *, incarnation: int) -> AgentState:
        """Return the state in which no process has said anything."""
        reports = tuple(Report(chip=chip, process=1) for chip in chips)
        return cls(job=job, host=host, incarnation=incarnation, reports=reports)

    def status(self) -> Status:
        """Return everything it knows."""
        return Status(
            job=self.job,
            host=self.host,
            incarnation=self.incarnation,
            number=self.number,
            order=self.order.number if self.order is not None else 0,
            reports=self.reports,
            draining=self.draining,
            kept=self.kept,
            copy_address=self.copy_address,
        )

    def report(self, chip: str) -> Report:
        """Return what is known of a chip."""
        return next(report for report in self.reports if report.chip == chip)

    def after(self, event: Order | Said | Died) -> tuple[AgentState, tuple[Command, ...]]:
        """Return the state after an event, and what is to be done for it."""
        match event:
            case Order():
                if self.order is not None and event.number <= self.order.number:
                    return self, ()  # late, or told twice
                taken, commands = replace(self, order=event), tuple[Command, ...]()
            case Said(said):
                taken, commands = self._said(said), ()
            case Died(chip, death):
                taken, commands = self._died(chip, death)
        if taken is self:
            return self, ()
        taken, more = taken._commands()
        return replace(taken, number=taken.number + 1), (*commands, *more)

    def drained(self) -> AgentState:
        """Return the state in which the host asks to be left."""
        return replace(self, draining=True, number=self.number + 1)

    def keeping(self, kept: tuple[tuple[str, int, int], ...]) -> AgentState:
        """Return the state in which the host has these copies of others."""
        return replace(self, kept=kept, number=self.number + 1)

    def refreshed(self) -> AgentState:
        """Return the same for another heartbeat, which must count as newer."""
        return replace(self, number=self.number + 1)

    def _with(self, report: Report) -> AgentState:
        reports = tuple(report if r.chip == report.chip else r for r in self.reports)
        return replace(self, reports=reports)

    def _said(self, said: Report) -> AgentState:
        known = self.report(said.chip)
        if known.process != said.process:
            return self  # of one that has ended since
        return self._with(_joined(known, said))

    def _died(self, chip: str, death: Death) -> tuple[AgentState, tuple[Command, ...]]:
        known = self.report(chip)
        if known.process != death.process:
            return self, ()
        if self.order is not None and self.order.kind == "stop":
            return self, ()
        fresh = Report(
            chip=chip,
            process=known.process + 1,
            copy_steps=known.copy_steps,  # they lie in the host's memory, and outlive it
            deaths=(*known.deaths, death)[-KEPT_DEATHS:],
        )
        kept = tuple(entry for entry in self.leaving if entry[0] != chip)
        return replace(self._with(fresh), leaving=kept), (Start(chip, fresh.process),)

    def _commands(self) -> tuple[AgentState, tuple[Command, ...]]:
        """Compare what is ordered with what there is."""
        order = self.order
        if order is None:
            return self, ()
        if order.kind == "stop":
            return self, (End(order.why),)
        state, commands = self, list[Command]()
        everybody = (*order.seats, *order.donors)
        seats = {seat.chip: seat for seat in everybody if seat.host == self.host}
        for report in self.reports:
            seat = seats.get(report.chip) if order.kind == "enter" else None
            fits = seat is not None and (seat.process, seat.incarnation) == (
                report.process,
                self.incarnation,
            )
            current = fits and report.generation == order.generation
            if report.standing in _ACTIVE and not current:
                entry = (report.chip, report.generation, order.gentle)
                if entry not in state.leaving:
                    state = replace(state, leaving=(*state.leaving, entry))
                    commands.append(Leave(report.chip, report.generation, order.why, order.gentle))
            elif seat is None and order.kind == "enter" and _is_full(report):
                commands.append(Free(report.chip))
            elif seat is not None and fits and _may_enter(report, order):
                commands.append(Enter(report.chip, seat, order))
                # known before the process says so: from now on it may be in
                state = state._with(
                    msgspec.structs.replace(
                        report, standing=Standing.ENTERING, generation=order.generation
                    )
                )
        return state, tuple(commands)


def _is_full(report: Report) -> bool:
    return report.standing is Standing.IDLE and report.step >= 0


def _may_enter(report: Report, order: Order) -> bool:
    return report.standing is Standing.IDLE and report.generation < order.generation


def _joined(known: Report, said: Report) -> Report:
    """Return what a process says of itself, with what its agent knows of its chip."""
    if said.generation < known.generation:  # said before it heard that it may enter
        return msgspec.structs.replace(known, copy_steps=said.copy_steps)
    return msgspec.structs.replace(said, deaths=known.deaths)
