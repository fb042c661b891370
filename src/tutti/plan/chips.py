"""Chip ids and sets of chips, written as ranges so that 16,384 chips fit on a line.

A chip's stable id is "pool/node/slot". A `ChipSet` is an *ordered* list of rectangles
"pool/nodes/slots" ("a800/0-63/0-7"), enumerated node by node, slot by slot. Whether the chips
exist is the checker's question.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from tutti.document import Place, shown
from tutti.hardware.topology import Position

_RANGE = re.compile(
    r"(?P<pool>[^/\s]+)/(?P<nodes>\d{1,7}(-\d{1,7})?)/(?P<slots>\d{1,7}(-\d{1,7})?)"
)


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def _span_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


class ChipRange(NamedTuple):
    """The chips of slots first_slot…last_slot on nodes first_node…last_node, inclusive."""

    pool: str
    first_node: int
    last_node: int
    first_slot: int
    last_slot: int

    @classmethod
    def parse(cls, text: str) -> ChipRange:
        """Read "pool/0-3/0-7"; raise ValueError with the remedy."""
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ValueError(f"is {shown(text)}; write chips as 'pool/node/slot' or 'pool/0-3/0-7'")
        nodes, slots = _span(match["nodes"]), _span(match["slots"])
        if nodes[0] > nodes[1] or slots[0] > slots[1]:
            raise ValueError(
                f"is {shown(text)}; a range runs from the smaller to the larger number"
            )
        return cls(match["pool"], *nodes, *slots)

    def __str__(self) -> str:
        nodes = _span_text(self.first_node, self.last_node)
        return f"{self.pool}/{nodes}/{_span_text(self.first_slot, self.last_slot)}"

    @property
    def width(self) -> int:
        """Slots per node."""
        return self.last_slot - self.first_slot + 1

    @property
    def size(self) -> int:
        """Number of chips."""
        return (self.last_node - self.first_node + 1) * self.width

    def at(self, index: int) -> Position:
        """Return the chip at `index` in node-then-slot order."""
        node, slot = divmod(index, self.width)
        return Position(self.pool, self.first_node + node, self.first_slot + slot)

    def cut(self, start: int, stop: int) -> Iterator[ChipRange]:
        """Yield the rectangles that cover positions start…stop (half-open)."""
        width = self.width
        while start < stop:
            node, slot = divmod(start, width)
            nodes = (stop - start) // width if slot == 0 else 0
            if nodes:
                first = self.first_node + node
                yield self._replace(first_node=first, last_node=first + nodes - 1)
                start += nodes * width
            else:
                count = min(width - slot, stop - start)
                low = self.first_slot + slot
                yield ChipRange(
                    self.pool, self.first_node + node, self.first_node + node, low, low + count - 1
                )
                start += count


@dataclass(frozen=True, slots=True)
class ChipSet:
    """An ordered set of chips as few rectangles."""

    ranges: tuple[ChipRange, ...] = ()

    document_shape: ClassVar[tuple[type, ...]] = (str, list)

    @classmethod
    def of(cls, *texts: str) -> ChipSet:
        """Read the written form, one text per rectangle."""
        return cls(tuple(ChipRange.parse(text) for text in texts))

    @classmethod
    def from_ids(cls, ids: Iterable[Position]) -> ChipSet:
        """Collect single chips, in their order, into rectangles."""
        return cls(_merge(ChipRange(i.pool, i.node, i.node, i.slot, i.slot) for i in ids))

    @classmethod
    def join(cls, sets: Iterable[ChipSet]) -> ChipSet:
        """Return the chips of all sets, one after the other."""
        return cls(_merge(itertools.chain.from_iterable(s.ranges for s in sets)))

    @classmethod
    def from_document(cls, value: object, place: Place) -> ChipSet:
        """Read one range or a list of ranges."""
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise place.value_error(f"is {shown(value)}; expected a range or a list of ranges")
        try:
            return cls(tuple(ChipRange.parse(text) for text in texts))
        except ValueError as error:
            raise place.value_error(str(error)) from None

    def to_document(self) -> str | list[str]:
        """Write a single range as text, otherwise a list."""
        texts = [str(r) for r in self.ranges]
        return texts[0] if len(texts) == 1 else texts

    def __str__(self) -> str:
        return ", ".join(map(str, self.ranges)) or "none"

    def __len__(self) -> int:
        return sum(r.size for r in self.ranges)

    def __iter__(self) -> Iterator[Position]:
        for r in self.ranges:
            for node in range(r.first_node, r.last_node + 1):
                for slot in range(r.first_slot, r.last_slot + 1):
                    yield Position(r.pool, node, slot)

    def at(self, index: int) -> Position:
        """Return the chip at a position."""
        for r in self.ranges:
            if index < r.size:
                return r.at(index)
            index -= r.size
        raise IndexError("chip index out of range")

    def cut(self, start: int, stop: int) -> ChipSet:
        """Return the chips at positions start…stop (half-open)."""
        pieces: list[ChipRange] = []
        for r in self.ranges:
            if stop <= 0:
                break
            pieces.extend(r.cut(max(start, 0), min(stop, r.size)))
            start -= r.size
            stop -= r.size
        return ChipSet(_merge(pieces))

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools that the chips come from, in order of appearance."""
        return tuple(dict.fromkeys(r.pool for r in self.ranges))


NO_CHIPS = ChipSet()


def _merge(ranges: Iterable[ChipRange]) -> tuple[ChipRange, ...]:
    """Join neighbours whose concatenation is again a rectangle in the same order."""
    merged: list[ChipRange] = []
    for r in ranges:
        merged.append(r)
        while len(merged) > 1:
            joined = _joined(merged[-2], merged[-1])
            if joined is None:
                break
            merged[-2:] = [joined]
    return tuple(merged)


def _joined(a: ChipRange, b: ChipRange) -> ChipRange | None:
    if a.pool != b.pool:
        return None
    one_node = a.first_node == a.last_node == b.first_node == b.last_node
    if one_node and b.first_slot == a.last_slot + 1:
        return a._replace(last_slot=b.last_slot)
    same_slots = (a.first_slot, a.last_slot) == (b.first_slot, b.last_slot)
    if same_slots and b.first_node == a.last_node + 1:
        return a._replace(last_node=b.last_node)
    return None
