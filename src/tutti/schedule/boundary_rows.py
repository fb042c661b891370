"""Which rows of a rank's tokens cross a boundary: what the engine sends, and what memory counts.

Rectangles of (batch, sequence) become rows, which may follow each other in memory or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.schedule.boundary import (
    Boundary,
    Holder,
    Rectangle,
    Transfer,
    held,
    holder,
    must_join,
    wanted,
)

Rows = slice | npt.NDArray[np.int64]


class TokenRows:
    """Which row of a rank's tokens each (sequence, position) is."""

    def __init__(self, own: Holder, rectangles: Sequence[Rectangle], length: int) -> None:
        self._first = own.batch[0]
        self._grid = np.full((own.batch[1] - own.batch[0], length), -1, dtype=np.int64)
        ordered = sorted(
            (sequence, order, part)
            for order, (batch, part) in enumerate(rectangles)
            for sequence in range(*batch)
        )
        row = 0
        for sequence, _, (start, stop) in ordered:
            self._grid[sequence - self._first, start:stop] = np.arange(row, row + stop - start)
            row += stop - start
        self.count = row

    def of(self, transfer: Transfer) -> Rows:
        """Return the rows of a rectangle; a slice where they follow each other."""
        (first, last), (start, stop) = transfer.batch, transfer.sequence
        rows = self._grid[first - self._first : last - self._first, start:stop].flatten()
        begin = int(rows[0])
        if (rows == np.arange(begin, begin + len(rows))).all():
            return slice(begin, begin + len(rows))
        return rows


@dataclass(frozen=True, slots=True)
class WireRows:
    """One direction of one boundary, as a rank of one of its stages sees it."""

    transfers: tuple[Transfer, ...]
    places: tuple[Rows, ...]  # where each lies among this rank's rows
    count: int  # rows of what is sent, or of what arrives before it is joined
    whole: int  # rows of what a tensor-parallel group joins from its slices; 0: it joins nothing


def wire_rows(wire: Boundary, rank: int, *, sends: bool) -> WireRows:
    """Return what a rank, counted in its stage, sends or receives."""
    own, length = holder(wire.sender if sends else wire.receiver, rank), wire.sequence_length
    rows = TokenRows(own, (held if sends else wanted)(own, length), length)
    transfers = tuple(wire.from_rank(rank) if sends else wire.to_rank(rank))
    joins = not sends and must_join(own.replica)
    whole = TokenRows(own, held(own, length), length).count if joins else 0
    return WireRows(transfers, tuple(map(rows.of, transfers)), rows.count, whole)
