"""Which ranks put tensors together that an optimizer must see whole: Muon's, Adafactor's. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tutti.ranks.rank_places import Seat, Seats


def unit_ranks(seats: Seats, unit: int) -> tuple[int, ...]:
    """Return the ranks that hold parts of a unit."""
    return tuple(rank for rank in range(seats.num_ranks) if unit in seats[rank].units)


def joined_units(seats: Seats, seat: Seat) -> Iterator[int]:
    """Yield the units of a rank whose tensors the job's optimizer sees whole."""
    optimizer = seats.plan.job.optimizer
    if optimizer == "adafactor":
        yield from seat.units
    elif optimizer == "muon":
        yield from (unit for unit in seat.units if 0 < unit < seats.spec.head_unit)
