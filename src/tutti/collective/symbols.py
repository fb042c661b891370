"""Symbols for the checker: atoms of data, and expressions of what was added up."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from fractions import Fraction

from tutti.collective.slices import ONE, ZERO, Slice


class Atoms:
    """The finest slices that a set of slices cuts the sections into, numbered."""

    def __init__(self, num_sections: int, slices: Iterable[Slice]) -> None:
        points: list[set[Fraction]] = [{ZERO, ONE} for _ in range(num_sections)]
        for piece in slices:
            for section in piece.sections:
                points[section] |= {piece.start, piece.stop}
        self._points = [sorted(cut_points) for cut_points in points]
        self._firsts = [0]
        for cuts in self._points:
            self._firsts.append(self._firsts[-1] + len(cuts) - 1)

    def all_of(self, section: int) -> range:
        """Return the atoms of a section."""
        return range(self._firsts[section], self._firsts[section + 1])

    def of(self, piece: Slice) -> list[int]:
        """Return the atoms of a slice."""
        atoms: list[int] = []
        for section in piece.sections:
            cuts, first = self._points[section], self._firsts[section]
            start, stop = bisect_left(cuts, piece.start), bisect_left(cuts, piece.stop)
            atoms.extend(range(first + start, first + stop))
        return atoms

    def name(self, atom: int) -> str:
        """Return an atom as a person reads it."""
        section = bisect_right(self._firsts, atom) - 1
        at = atom - self._firsts[section]
        cuts = self._points[section]
        return f"slice {Slice(range(section, section + 1), cuts[at], cuts[at + 1])}"


class Expressions:
    """Sums, each known by a number; a + b and b + a are one, (a + b) + c and a + (b + c) two.

    Numbers 0…n−1 are the seats' own data.
    """

    def __init__(self, num_seats: int) -> None:
        self._masks = [1 << seat for seat in range(num_seats)]
        self._known: dict[tuple[int, int], int] = {}

    def mask(self, value: int) -> int:
        """Return the set of seats in a sum, as bits."""
        return self._masks[value]

    def overlap(self, one: int, other: int) -> bool:
        """Tell whether a seat's data are in both sums."""
        return bool(self._masks[one] & self._masks[other])

    def sum(self, one: int, other: int) -> int:
        """Return the sum of two."""
        key = (min(one, other), max(one, other))
        if key not in self._known:
            self._known[key] = len(self._masks)
            self._masks.append(self._masks[one] | self._masks[other])
        return self._known[key]
