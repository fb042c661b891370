"""Which rank of which engine is on which host. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tutti.hardware.topology import Position
from tutti.launch.hosts import find_components
from tutti.plan.check import embedded_cluster
from tutti.plan.engine_part import engine_part, num_engines
from tutti.plan.plan import Plan, RankMap

PORTS_EACH = 5  # of a rank: one for each kind of its sockets


class Seat(NamedTuple):
    """A host as TUTTI_NODE says it, and which of the chips there that the plan uses."""

    host: str
    local: int
    chip: Position


Seats = Mapping[tuple[int, int], Seat]
"""By engine and rank."""


def seats_of(plan: Plan) -> Seats:
    """Return where each rank of each engine is."""
    host_of_chip: dict[tuple[str, int, int], tuple[str, int]] = {}
    for component in find_components(plan, embedded_cluster(plan)):
        for host in component.hosts:
            for local, slot in enumerate(host.slots):
                host_of_chip[host.pool, host.node, slot] = (host.name, local)
    seats = {}
    for engine in range(num_engines(plan)):
        ranks = RankMap(engine_part(plan, engine))
        for rank in range(ranks.num_ranks):
            chip = ranks.place(rank).chip
            seats[engine, rank] = Seat(*host_of_chip[chip.pool, chip.node, chip.slot], chip)
    return seats


def hosts_of(seats: Seats) -> list[str]:
    """Return the hosts that have seats, in the order of the plan."""
    return list(dict.fromkeys(seat.host for seat in seats.values()))
