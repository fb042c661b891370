"""Columns: how unequal islands share the traffic between them.

Each island lays its ranks along the line 0..1, by rail, each with a length in proportion to its
NIC. Where all islands' cuts are overlaid, every interval between two neighbouring cuts (a column)
has exactly one owner in each island. The owners of a column talk across islands for that interval:
every NIC carries its share, whatever the islands' sizes; for equal islands a column is a rail.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

from tutti.collective.group import Group, Island
from tutti.collective.parts import fences
from tutti.collective.slices import Slice


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """An interval of the line, and the seat that owns it in each island."""

    owners: tuple[int, ...]
    start: Fraction
    stop: Fraction

    def of(self, sections: range) -> Slice:
        """Return this column's slice of some sections."""
        return Slice(sections, self.start, self.stop)


def whole_numbers(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the weights in smallest whole numbers; none if they are all equal."""
    if len(set(weights)) == 1:
        return ()
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    common = math.gcd(*whole)
    return tuple(weight // common for weight in whole)


def line_positions(island: Island) -> list[int]:
    """Return an island's positions in their order along the line: by rail."""
    return sorted(range(island.size), key=island.rail)


def line(group: Group, island: int) -> tuple[int, ...]:
    """Return an island's seats in their order along the line."""
    start = group.seats(island).start
    return tuple(start + position for position in line_positions(group.islands[island]))


def line_weights(island: Island) -> tuple[int, ...]:
    """Return the NIC weights in the order of the line; none if they are all equal."""
    if not island.bandwidths:
        return ()
    return whole_numbers([Fraction(island.bandwidths[p]) for p in line_positions(island)])


def columns(group: Group) -> tuple[Column, ...]:
    """Return the columns of a group, along the line."""
    kinds = group.kinds
    cuts = {kind: fences(line_weights(one) or (1,) * one.size) for kind, one in kinds.items()}
    points = sorted({point for line_cuts in cuts.values() for point in line_cuts})
    owner = {
        kind: [line_positions(one)[bisect_right(cuts[kind], point) - 1] for point in points[:-1]]
        for kind, one in kinds.items()
    }
    starts = [group.seats(i).start for i in range(len(group.islands))]
    chosen = [owner[island.kind] for island in group.islands]
    return tuple(
        Column(
            tuple(start + picked[at] for start, picked in zip(starts, chosen, strict=True)),
            points[at],
            points[at + 1],
        )
        for at in range(len(points) - 1)
    )


def proportional_shares(bandwidths: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the share of the sum that each island should reduce when all talk to all.

    Of an all-reduce of size 1 among K islands, the one that reduces the share w sends 1 − w and
    returns (K − 1)·w: 1 + (K − 2)·w in all, and receives as much. That is in proportion to its
    bandwidth b where w = (t·b − 1) / (K − 2); an island too slow for any share gets none.
    """
    number = len(bandwidths)
    if number <= 2:
        return ()
    active = set(range(number))
    while True:
        total = sum((bandwidths[k] for k in active), Fraction(0))
        pace = (number - 2 + len(active)) / total
        slow = {k for k in active if pace * bandwidths[k] < 1}
        if not slow:
            break
        active -= slow
    shares = [
        (pace * bandwidth - 1) / (number - 2) if k in active else Fraction(0)
        for k, bandwidth in enumerate(bandwidths)
    ]
    return whole_numbers(shares)
