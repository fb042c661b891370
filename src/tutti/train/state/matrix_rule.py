"""Which ranks put the matrices that Muon moves together. Pure."""

from __future__ import annotations

from tutti.ranks.rank_places import Seats


def matrix_ranks(seats: Seats, unit: int) -> tuple[int, ...]:
    """Return the ranks that put the matrices of a unit together."""
    return tuple(rank for rank in range(seats.num_ranks) if unit in seats[rank].units)
