"""A Schedule as flat arrays: instructions, channels, dependencies and meetings.

Instructions of all classes stand one after the other; an index means the same instruction
everywhere in `simulate`. Built once per Schedule, it is executed against any number of costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.schedule.instruction import COLLECTIVES, LANES, Instruction, Lane, Op, Scope, What
from tutti.schedule.partners import Partners
from tutti.schedule.schedule import RankClass, Schedule

Integers = npt.NDArray[np.int64]


class Track(IntEnum):
    """Where an instruction shows; those of the network may hold several channels each."""

    COMPUTE = 0
    COPY_IN = 1
    COPY_OUT = 2
    SEND = 3
    RECEIVE = 4
    COLLECTIVE = 5

    @property
    def label(self) -> str:
        """The name that people read."""
        return self.name.lower().replace("_", " ")


class Kind(IntEnum):
    """How the kernel treats an instruction."""

    PLAIN = 0
    SEND = 1
    RECEIVE = 2
    MEETING = 3  # a collective in which other classes take part


OPS = tuple(Op)
WHATS = tuple(What)
_OP_CODE = {op: code for code, op in enumerate(OPS)}
_WHAT_CODE = {what: code for code, what in enumerate(WHATS)}
_SPECIAL = {
    Op.FETCH: Track.COPY_IN,
    Op.OFFLOAD: Track.COPY_OUT,
    Op.SEND: Track.SEND,
    Op.RECEIVE: Track.RECEIVE,
}
_TRACKS = np.array(
    [
        Track.COMPUTE if LANES[op] is Lane.COMPUTE else _SPECIAL.get(op, Track.COLLECTIVE)
        for op in OPS
    ]
)
_COLLECTIVE_CODES = np.array([_OP_CODE[op] for op in OPS if op in COLLECTIVES])
_NO_INDEX = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class ClassColumns:
    """One instruction list as columns; indices count inside the list."""

    op: Integers
    micro_batch: Integers
    first: Integers
    stop: Integers
    what: Integers
    inside: Integers  # 1: a collective among the holders of one pipeline
    after_counts: Integers
    after: Integers

    @classmethod
    def of(cls, instructions: tuple[Instruction, ...]) -> ClassColumns:
        """Transpose a list without looking at its entries one by one."""
        if not instructions:
            return cls(*(_NO_INDEX,) * 8)
        op, micro_batch, first, stop, what, scope, after = zip(*instructions, strict=True)
        size = len(instructions)
        return cls(
            op=_integers(map(_OP_CODE.__getitem__, op), size),
            micro_batch=_integers(micro_batch, size),
            first=_integers(first, size),
            stop=_integers(stop, size),
            what=_integers(map(_WHAT_CODE.__getitem__, what), size),
            inside=_integers((s is Scope.PIPELINE for s in scope), size),
            after_counts=_integers(map(len, after), size),
            after=_integers(itertools.chain.from_iterable(after)),
        )


def _integers(values: Iterable[Any], count: int = -1) -> Integers:
    return np.fromiter(values, dtype=np.int64, count=count)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Program:
    """All lists of a Schedule, flat; `offsets` says where each class begins."""

    schedule: Schedule
    offsets: Integers
    op: Integers
    micro_batch: Integers
    first: Integers
    stop: Integers
    what: Integers
    inside: Integers  # 1: a collective among the holders of one pipeline
    track: Integers
    kind: Integers
    channel: Integers  # which first-in-first-out channel, counted over all classes
    num_channels: int
    after_offsets: Integers
    after: Integers
    meeting: Integers  # −1: none
    arrivals: Integers  # per meeting: how many must come before it is complete

    @property
    def size(self) -> int:
        """Number of instructions."""
        return len(self.op)

    def span(self, index: int) -> slice:
        """Return where the instructions of a class stand."""
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))

    def class_of(self, instruction: int) -> int:
        """Return the class that an instruction belongs to."""
        return int(np.searchsorted(self.offsets, instruction, side="right")) - 1

    def place(self, instruction: int) -> tuple[int, int]:
        """Return (class, index in its list)."""
        index = self.class_of(instruction)
        return index, instruction - int(self.offsets[index])

    def entry(self, instruction: int) -> Instruction:
        """Return the instruction itself."""
        index, position = self.place(instruction)
        return self.schedule.classes[index].instructions[position]


def compile_schedule(schedule: Schedule) -> Program:
    """Flatten a Schedule; the instruction lists must have passed the static check."""
    shared: dict[int, ClassColumns] = {}
    lists = []
    for rank_class in schedule.classes:
        key = id(rank_class.instructions)
        if key not in shared:
            shared[key] = ClassColumns.of(rank_class.instructions)
        lists.append(shared[key])
    sizes = [len(columns.op) for columns in lists]
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    op, micro_batch, first, stop, what, inside, counts = (
        np.concatenate([getattr(columns, name) for columns in lists])
        for name in ("op", "micro_batch", "first", "stop", "what", "inside", "after_counts")
    )
    after = [columns.after + start for columns, start in zip(lists, offsets, strict=False)]
    track = _TRACKS[op]
    channel, num_channels = _channels(track, first, what, inside, sizes)
    meeting, arrivals = _move_meetings(schedule.classes, sizes, track, (first, what, micro_batch))
    arrivals = _collective_meetings(schedule, offsets, op, meeting, arrivals)
    kind = np.full(len(op), Kind.PLAIN, dtype=np.int64)
    kind[meeting >= 0] = Kind.MEETING
    kind[track == Track.SEND] = Kind.SEND
    kind[track == Track.RECEIVE] = Kind.RECEIVE
    return Program(
        schedule=schedule,
        offsets=offsets,
        op=op,
        micro_batch=micro_batch,
        first=first,
        stop=stop,
        what=what,
        inside=inside,
        track=track,
        kind=kind,
        channel=channel,
        num_channels=num_channels,
        after_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        after=np.concatenate(after).astype(np.int64),
        meeting=meeting,
        arrivals=arrivals,
    )


def _channels(
    track: Integers, first: Integers, what: Integers, inside: Integers, sizes: list[int]
) -> tuple[Integers, int]:
    """Give each channel a number: a class's tracks, its moves apart by boundary and tensor.

    Collectives inside a pipeline and across pipelines are apart, too: other groups, and one that
    waits for a slow pipeline must not hold up the parameters of the next pass.
    """
    moves = (track == Track.SEND) | (track == Track.RECEIVE)
    wire = np.where(moves, 2 + first * len(WHATS) + what, inside)
    owner = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    code = (owner * len(Track) + track) * (int(wire.max(initial=0)) + 1) + wire
    distinct, channel = np.unique(code, return_inverse=True)
    return channel.astype(np.int64).reshape(-1), len(distinct)


def _move_meetings(
    classes: tuple[RankClass, ...],
    sizes: list[int],
    track: Integers,
    tensor: tuple[Integers, Integers, Integers],
) -> tuple[Integers, Integers]:
    """Join the Sends of one boundary tensor, from all classes of a stage, with its Receives."""
    first, what, micro_batch = tensor
    meeting = np.full(len(track), -1, dtype=np.int64)
    moves = np.flatnonzero((track == Track.SEND) | (track == Track.RECEIVE))
    if not len(moves):
        return meeting, _NO_INDEX
    pipeline = np.repeat(np.array([c.pipeline for c in classes], dtype=np.int64), sizes)[moves]
    code = pipeline
    for column, size in (
        (first[moves], int(first.max()) + 1),
        (what[moves], len(WHATS)),
        (micro_batch[moves], int(micro_batch.max()) + 1),
    ):
        code = code * size + column
    distinct, found = np.unique(code, return_inverse=True)
    found = found.reshape(-1)
    meeting[moves] = found
    sends = np.bincount(found[track[moves] == Track.SEND], minlength=len(distinct))
    return meeting, np.maximum(sends, 1).astype(np.int64)  # without a Send, wait for ever


def _collective_meetings(
    schedule: Schedule, offsets: Integers, op: Integers, meeting: Integers, arrivals: Integers
) -> Integers:
    """Give a number to each collective of several classes; n-th of a key meets n-th elsewhere."""
    partners = Partners(schedule)
    base = len(arrivals)
    numbers: dict[tuple[object, int], int] = {}
    members: list[int] = []
    for index, rank_class in enumerate(schedule.classes):
        start = int(offsets[index])
        own = op[start : int(offsets[index + 1])]
        times: dict[object, int] = {}
        for position in np.flatnonzero(np.isin(own, _COLLECTIVE_CODES)).tolist():
            met = partners.meeting(index, rank_class.instructions[position])
            if met is None:
                continue
            key, together = met
            turn = times[key] = times.get(key, 0) + 1
            number = numbers.setdefault((key, turn), len(numbers))
            if number == len(members):
                members.append(len(together))
            meeting[start + position] = base + number
    return np.concatenate([arrivals, np.array(members, dtype=np.int64)])
