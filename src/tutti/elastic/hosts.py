"""Hosts as the controller knows them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from tutti.elastic.messages import Death, Report, Seat, Source, Standing, Status

MOST_NAMED = 4  # losses
SAME_FAULTS = 3  # so often at one step and instruction: it would come for ever
Fault = tuple[str, int, int, int, int]
"""Chip, its agent's incarnation, process (or minus the generation), step, instruction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """An agent, as far as it was heard of."""

    status: Status
    silent: bool = False

    @property
    def usable(self) -> bool:
        """Whether its chips may be given seats."""
        return not self.silent and not self.status.draining

    def report(self, chip: str) -> Report | None:
        """Return what it says of a chip."""
        return next((r for r in self.status.reports if r.chip == chip), None)


def how_it_ended(status: Status, chip: str, process: int | None = None) -> str:
    """Return how a process of a chip ended, as far as it was told."""
    deaths: tuple[Death, ...] = ()
    for report in status.reports:
        if report.chip == chip:
            deaths = report.deaths
    for death in reversed(deaths):
        if process is None or death.process == process:
            return death.how
    return "is gone"


def loss(seat: Seat, host: Host | None) -> str:
    """Return how a seat was lost."""
    who = f"rank {seat.rank} ({seat.chip})"
    if host is None or host.silent:
        return f"{who}: host {seat.host} is silent"
    return f"{who} {how_it_ended(host.status, seat.chip, seat.process)}"


def named(losses: Sequence[str]) -> str:
    """Return several losses in one line, of many the first."""
    more = len(losses) - MOST_NAMED
    return "; ".join(losses[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def came_back(faults: Sequence[Fault], new: Sequence[Fault]) -> tuple[int, Fault] | None:
    """Return how often one of the new faults has come at its step and instruction, if too often."""
    for fault in new:
        same = [known for known in faults if known[3:] == fault[3:]]
        if fault[3] and len(same) >= SAME_FAULTS:
            return len(same), same[-1]
    return None


def failure(reports: Iterable[Report | None], generation: int) -> tuple[Fault, str] | None:
    """Return why a generation failed in which nobody was lost, as who noticed it says."""
    said = [r for r in reports if r is not None and r.why and r.generation == generation]
    first = next(iter(sorted(said, key=lambda report: "(told by" in report.why)), None)
    if first is None:
        return None
    return (first.chip, 0, -generation, first.step + 1, -1), f"nobody is lost, but {first.why}"


def seat_on(
    places: Mapping[str, tuple[str, Host]], rank: int, chip: str, *, any_host: bool = False
) -> Seat | None:
    """Return a seat for the process that a chip has now; None where it has none."""
    if chip not in places:
        return None
    name, host = places[chip]
    report = host.report(chip)
    if report is None or not (host.usable or any_host):
        return None
    return Seat(
        rank=rank, chip=chip, host=name, process=report.process,
        incarnation=host.status.incarnation,
    )  # fmt: skip


def copy_addresses(
    seats: Iterable[Seat], hosts: Iterable[tuple[str, Host]]
) -> tuple[tuple[str, str], ...]:
    """Return where the hosts of a generation take copies of each other's chips."""
    there = {seat.host for seat in seats}
    return tuple(
        (name, host.status.copy_address)
        for name, host in hosts
        if name in there and host.status.copy_address
    )


def giving_chips(source: Source, hosts: Sequence[tuple[str, Host]], ranks: Set[str]) -> list[str]:
    """Return the chips without a seat whose state, or copies on whose hosts, are needed."""
    # a seat on the same host reads the copies that lie there
    near, far = set[str](), list[str]()
    keepers = {host for _, host in source.elsewhere}
    for name, host in hosts:
        chips = [report.chip for report in host.status.reports]
        if ranks & set(chips):
            near |= set(chips)
        elif name in keepers and chips:
            far.append(chips[0])
    far = [*(chip for chip in source.copies if chip not in near), *far]
    return [chip for chip in dict.fromkeys((*source.holders, *far)) if chip not in ranks]


def new_faults(status: Status, known: Sequence[Fault]) -> tuple[Fault, ...]:
    """Return the deaths that a host tells of for the first time."""
    old = {fault[:3] for fault in known}
    return tuple(
        (report.chip, status.incarnation, death.process, death.step, death.instruction)
        for report in status.reports
        for death in report.deaths
        if (report.chip, status.incarnation, death.process) not in old
    )


def all_are(
    first: Sequence[Report], seats: Sequence[Seat], hosts: Mapping[str, Host], generation: int,
    standings: Set[Standing],
) -> bool:  # fmt: skip
    """Tell whether all seats, of which none is lost, are in a generation with such a standing.

    `first` are reports to begin with: thousands of hosts tell it one after the other, and for most
    of them no other need be looked at.
    """

    def are(report: Report | None) -> bool:
        return (
            report is not None and report.generation == generation and report.standing in standings
        )

    if not first or not all(map(are, first)):
        return False
    alone = len(first) < len(seats)
    return not alone or all(are(hosts[seat.host].report(seat.chip)) for seat in seats)


_Entry = TypeVar("_Entry", bound=tuple[Any, ...])


def with_entry(entries: tuple[_Entry, ...], entry: _Entry) -> tuple[_Entry, ...]:
    """Return entries, whose first are names in their order, with one in its name's place."""
    at = bisect.bisect_left(entries, entry[0], key=lambda known: known[0])
    known = at < len(entries) and entries[at][0] == entry[0]
    return (*entries[:at], entry, *entries[at + known :])
