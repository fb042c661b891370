"""Where a job stood when its controller was lost, from its log.

The hosts of the last generation are taken for there until they have been silent for too long: their
processes may still train, and what they hold counts once they have left.
"""

from __future__ import annotations

from collections.abc import Sequence

from tutti.elastic.events import Phase
from tutti.elastic.hosts import Host
from tutti.elastic.journal import Entry
from tutti.elastic.membership import OVER, Membership
from tutti.elastic.messages import Report, Seat, Standing, Status


def is_over(entries: Sequence[Entry]) -> bool:
    """Tell whether a run has finished or given up."""
    phases = [entry.phase for entry in entries if entry.phase in set(Phase)]
    return bool(phases) and Phase(phases[-1]) in OVER


def restored(job: str, entries: Sequence[Entry]) -> Membership | None:
    """Return the state of a job whose controller was lost in a generation; None: in none."""
    entered = [entry for entry in entries if entry.seats]
    if not entered or is_over(entries):
        return None
    last = entered[-1]
    by_host: dict[str, list[Seat]] = {}
    for seat in last.seats:
        by_host.setdefault(seat.host, []).append(seat)
    hosts = [
        (name, Host(status=_as_it_was(job, name, seats, last.generation)))
        for name, seats in sorted(by_host.items())
    ]
    return Membership(
        job=job,
        phase=Phase.LEAVING,
        generation=last.generation,
        order=max(entry.order for entry in entries) + 1,
        why="the controller was lost",
        seats=last.seats,
        plan=last.plan,
        hosts=tuple(hosts),
    )


def _as_it_was(job: str, name: str, seats: Sequence[Seat], generation: int) -> Status:
    reports = tuple(
        Report(
            chip=seat.chip,
            process=seat.process,
            standing=Standing.RUNNING,
            generation=generation,
        )
        for seat in seats
    )
    incarnation = seats[0].incarnation
    return Status(job=job, host=name, incarnation=incarnation, number=-1, reports=reports)
