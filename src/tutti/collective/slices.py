"""Slice: a piece of what a collective moves, named by content, not by place.

The data of an operation are *sections*: one for an all-reduce, one per seat for an all-gather,
one per pair for an all-to-all. A slice is the same half-open interval of exact fractions in each
of some sections. In a section of `count` elements the fraction f lies at element floor(f·count);
so neighbouring slices always tile, sections smaller than the number of pieces give empty ones, and
every rank computes the same integers. Since a slice says *what* it is, no step permutes data: each
rank keeps a slice where it likes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from fractions import Fraction

from tutti.collective.notation import read_fraction, read_run, write_run
from tutti.document import Place, shown

ZERO, ONE = Fraction(0), Fraction(1)


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """The interval [start, stop) of each of `sections`."""

    sections: range
    start: Fraction = ZERO
    stop: Fraction = ONE

    document_shape = str

    @property
    def is_whole(self) -> bool:
        """Tell whether it is all of its sections."""
        return self.start == 0 and self.stop == 1

    def cut(self, start: Fraction, stop: Fraction) -> Slice:
        """Return the part [start, stop) of this slice, 0 and 1 being its own ends."""
        if start == 0 and stop == 1:
            return self
        if self.is_whole:
            return Slice(self.sections, start, stop)
        length = self.stop - self.start
        return Slice(self.sections, self.start + start * length, self.start + stop * length)

    def in_chunk(self, chunk: int, chunks: int) -> Slice:
        """Return this slice of the program's run on the `chunk`-th of `chunks` equal pieces."""
        if chunks == 1:
            return self
        return Slice(self.sections, (chunk + self.start) / chunks, (chunk + self.stop) / chunks)

    def bounds(self, count: int) -> tuple[int, int]:
        """Return the first element and the one after the last, in a section of `count`."""
        return (
            self.start.numerator * count // self.start.denominator,
            self.stop.numerator * count // self.stop.denominator,
        )

    @classmethod
    def from_document(cls, value: object, place: Place) -> Slice:
        """Parse "0-7", or "0-7 @ 1/8..1/4"."""
        if not isinstance(value, str):
            raise place.value_error(f"is {shown(value)}; expected a slice such as '0-7 @ 0..1/2'")
        sections, _, interval = value.partition("@")
        if not interval:
            return cls(read_run(sections, place))
        start, _, stop = interval.strip().partition("..")
        return cls(
            read_run(sections, place), read_fraction(start, place), read_fraction(stop, place)
        )

    def to_document(self) -> str:
        """Return the text that `from_document` parses."""
        text = write_run(self.sections)
        return text if self.is_whole else f"{text} @ {self.start}..{self.stop}"

    def __str__(self) -> str:
        return self.to_document()


Part = tuple[Slice, ...]


def section(index: int) -> Slice:
    """Return all of one section."""
    return Slice(range(index, index + 1))


def join(slices: Iterable[Slice]) -> Part:
    """Return the slices with neighbours made one."""
    joined: list[Slice] = []
    for piece in slices:
        if joined and joined[-1].sections == piece.sections and joined[-1].stop == piece.start:
            joined[-1] = Slice(piece.sections, joined[-1].start, piece.stop)
        elif joined and _follows(joined[-1], piece):
            last = joined[-1]
            sections = range(last.sections.start, piece.sections.stop)
            joined[-1] = Slice(sections, last.start, last.stop)
        else:
            joined.append(piece)
    return tuple(joined)


def _follows(one: Slice, other: Slice) -> bool:
    return (
        one.sections.step == other.sections.step == 1
        and one.sections.stop == other.sections.start
        and (one.start, one.stop) == (other.start, other.stop)
    )
