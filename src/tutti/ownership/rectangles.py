"""Flat ranges of a box as rectangles, and what two rectangles share. Pure.

A rank keeps a range of the numbers of a block, counted row by row. Such a range is no rectangle,
but it is a few of them one after the other: the end of a first row, whole rows, the start of a last
one, and so on inwards. Each of them is a contiguous run of the range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of a tensor: where it begins and how far it reaches in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many numbers."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The same as an index."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(start, start + size) for start, size in pairs)

    def within(self, outer: Rectangle) -> Rectangle:
        """Return it counted from where an outer one begins."""
        pairs = zip(self.offsets, outer.offsets, strict=True)
        return Rectangle(tuple(own - base for own, base in pairs), self.sizes)


def rectangles(
    shape: Sequence[int], start: int, stop: int, *, most: int | None = None
) -> Iterator[tuple[int, Rectangle]]:
    """Yield the rectangles that a range of a box's elements consists of, in their order.

    Each comes with the index of its first element. None has more than `most` elements.
    """
    for first, rectangle in _cut(tuple(shape), start, stop):
        yield from _limited(first, rectangle, most)


def _cut(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Rectangle]]:
    if start >= stop:
        return
    if not shape:
        yield start, Rectangle((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the rows that are whole
    if first > last:  # begins and ends inside one row
        yield from _of_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _of_row(shape, first - 1, start, first * row)
    if first < last:
        sizes = (last - first, *shape[1:])
        yield first * row, Rectangle((first, *[0] * (len(shape) - 1)), sizes)
    if last * row < stop:
        yield from _of_row(shape, last, last * row, stop)


def _of_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[int, Rectangle]]:
    """Yield the rectangles of a range that lies inside one row."""
    base = row * math.prod(shape[1:])
    for first, inner in _cut(shape[1:], start - base, stop - base):
        yield base + first, Rectangle((row, *inner.offsets), (1, *inner.sizes))


def _limited(first: int, rectangle: Rectangle, most: int | None) -> Iterator[tuple[int, Rectangle]]:
    """Cut a contiguous rectangle into runs of rows; a row that is too long, too."""
    if most is None or rectangle.count <= most:
        yield first, rectangle
        return
    dim = next(d for d, size in enumerate(rectangle.sizes) if size > 1)
    row = math.prod(rectangle.sizes[dim + 1 :])
    step = max(1, most // row)
    for start in range(0, rectangle.sizes[dim], step):
        size = min(step, rectangle.sizes[dim] - start)
        offsets, sizes = list(rectangle.offsets), list(rectangle.sizes)
        offsets[dim] += start
        sizes[dim] = size
        yield from _limited(first + start * row, Rectangle(tuple(offsets), tuple(sizes)), most)


def intersection(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """Return what two rectangles of a tensor share; None if nothing."""
    offsets, sizes = [], []
    for start, size, other, extent in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        low, high = max(start, other), min(start + size, other + extent)
        if low >= high:
            return None
        offsets.append(low)
        sizes.append(high - low)
    return Rectangle(tuple(offsets), tuple(sizes))


def difference(a: Rectangle, b: Rectangle) -> list[Rectangle]:
    """Return what of a rectangle is outside of another, as rectangles that share nothing."""
    common = intersection(a, b)
    if common is None:
        return [a]
    parts, offsets, sizes = [], list(a.offsets), list(a.sizes)
    for dim, (low, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        for start, stop in ((offsets[dim], low), (low + size, offsets[dim] + sizes[dim])):
            if start < stop:
                part = Rectangle(
                    (*offsets[:dim], start, *offsets[dim + 1 :]),
                    (*sizes[:dim], stop - start, *sizes[dim + 1 :]),
                )
                parts.append(part)
        offsets[dim], sizes[dim] = low, size
    return parts
