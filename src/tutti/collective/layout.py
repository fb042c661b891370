"""Layout: which sections an operation has, who holds which before and after, and how long they are.

This is the contract of the operations, in one place: the checker proves programs against it, the
interpreter and `comm` fill and read buffers by it, the cost model sizes messages by it. A caller's
buffer is the concatenation of the sections it holds, by ascending rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tutti.collective.program import CollectiveProgram, Operation
from tutti.collective.slices import Part, Slice
from tutti.errors import InputError

_PER_SEAT = frozenset(
    {Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.GATHER, Operation.SCATTER}
)
_NOTHING = range(0)


def num_sections(program: CollectiveProgram) -> int:
    """Return how many sections the operation has on this group."""
    size = program.group.size
    if program.operation in _PER_SEAT:
        return size
    if program.operation is Operation.ALL_TO_ALL:
        return size * size
    return len(program.messages) if program.operation is Operation.SEND_RECEIVE else 1


def held_before(program: CollectiveProgram, seat: int) -> Sequence[int]:
    """Return the sections that a seat brings, in the order of its input buffer."""
    group, root = program.group, program.root
    match program.operation:
        case Operation.ALL_REDUCE | Operation.REDUCE | Operation.BARRIER:
            return range(1)
        case Operation.BROADCAST:
            return range(1) if seat == root else _NOTHING
        case Operation.REDUCE_SCATTER:
            return group.by_rank
        case Operation.SCATTER:
            return group.by_rank if seat == root else _NOTHING
        case Operation.ALL_GATHER | Operation.GATHER:
            return range(seat, seat + 1)
        case Operation.ALL_TO_ALL:
            return [seat * group.size + target for target in group.by_rank]
        case Operation.SEND_RECEIVE:
            return [k for k, (source, _) in enumerate(program.messages) if source == seat]


def held_after(program: CollectiveProgram, seat: int) -> Sequence[int]:
    """Return the sections that a seat ends with, in the order of its output buffer."""
    group, root = program.group, program.root
    match program.operation:
        case Operation.ALL_REDUCE | Operation.BROADCAST | Operation.BARRIER:
            return range(1)
        case Operation.REDUCE:
            return range(1) if seat == root else _NOTHING
        case Operation.ALL_GATHER:
            return group.by_rank
        case Operation.GATHER:
            return group.by_rank if seat == root else _NOTHING
        case Operation.REDUCE_SCATTER | Operation.SCATTER:
            return range(seat, seat + 1)
        case Operation.ALL_TO_ALL:
            return [source * group.size + seat for source in group.by_rank]
        case Operation.SEND_RECEIVE:
            return [k for k, (_, target) in enumerate(program.messages) if target == seat]


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The number of elements of each section; one number stands for all of equal length."""

    counts: int | tuple[int, ...]
    num_sections: int

    @classmethod
    def of(cls, program: CollectiveProgram, counts: int | Sequence[int]) -> Layout:
        """Return the layout of a call.

        `counts` is the length of every section, or one length each as callers order them: by
        ascending rank; for an all-to-all by (source, target); for send_receive by message.
        """
        number = num_sections(program)
        if program.operation is Operation.BARRIER:
            return cls(1, number)  # a token, whatever is asked for
        given = (counts,) if isinstance(counts, int) else tuple(counts)
        if not isinstance(counts, int) and len(given) != number:
            raise InputError(f"{program}: {len(given)} counts for {number} sections")
        if any(count < 0 for count in given):
            raise InputError(f"{program}: a count of {min(given)} elements is below 0")
        if isinstance(counts, int) or len(set(given)) == 1:
            return cls(given[0], number)
        return cls(_by_seat(program, given), number)

    def count(self, section: int) -> int:
        """Return the number of elements of a section."""
        return self.counts if isinstance(self.counts, int) else self.counts[section]

    @property
    def total(self) -> int:
        """Return the number of elements of all sections."""
        if isinstance(self.counts, int):
            return self.counts * self.num_sections
        return sum(self.counts)

    def length(self, piece: Slice) -> int:
        """Return the number of elements of a slice."""
        if isinstance(self.counts, int):
            start, stop = piece.bounds(self.counts)
            return (stop - start) * len(piece.sections)
        if piece.is_whole:
            return sum(self.counts[section] for section in piece.sections)
        bounds = (piece.bounds(self.counts[section]) for section in piece.sections)
        return sum(stop - start for start, stop in bounds)

    def size(self, part: Part) -> int:
        """Return the number of elements of a part."""
        return sum(self.length(piece) for piece in part)


def _by_seat(program: CollectiveProgram, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return counts given by ascending rank in the order of the sections."""
    order = program.group.by_rank
    if isinstance(order, range) or program.operation is Operation.SEND_RECEIVE:
        return counts
    size = len(order)
    by_seat = [0] * len(counts)
    if program.operation is not Operation.ALL_TO_ALL:
        for count, seat in zip(counts, order, strict=True):
            by_seat[seat] = count
        return tuple(by_seat)
    for at, source in enumerate(order):
        for to, target in enumerate(order):
            by_seat[source * size + target] = counts[at * size + to]
    return tuple(by_seat)
