"""A Schedule as flat arrays: instructions, channels, dependencies and meetings.

Instructions of all classes stand one after the other; an index means the same instruction
everywhere in `simulate`. Built once per Schedule, it is executed against any number of costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tutti.schedule.instruction import COLLECTIVES, LANES, Instruction, Lane, Op
from tutti.schedule.listing import COLUMNS, OP_CODE, OPS, WHATS, Integers, Listing, listing_of
from tutti.schedule.partners import Partners
from tutti.schedule.schedule import RankClass, Schedule


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
_COLLECTIVE_CODES = np.array([OP_CODE[op] for op in OPS if op in COLLECTIVES])
_NO_INDEX = np.zeros(0, dtype=np.int64)


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
    lists = [listing_of(rank_class.instructions) for rank_class in schedule.classes]
    sizes = [len(columns.op) for columns in lists]
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    op, micro_batch, first, stop, what, inside, counts = (
        np.concatenate([getattr(columns, name) for columns in lists])
        for name in (*COLUMNS, "after_counts")
    )
    after = [columns.after + start for columns, start in zip(lists, offsets, strict=False)]
    track = _TRACKS[op]
    channel, num_channels = _channels(track, first, what, inside, sizes)
    meeting, arrivals = _move_meetings(schedule.classes, sizes, track, (first, what, micro_batch))
    arrivals = _collective_meetings(schedule, lists, offsets, meeting, arrivals)
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
    distinct, numbers = np.unique(code, return_inverse=True)
    numbers = numbers.reshape(-1)
    meeting[moves] = numbers
    sends = np.bincount(numbers[track[moves] == Track.SEND], minlength=len(distinct))
    return meeting, np.maximum(sends, 1).astype(np.int64)  # without a Send, wait for ever


def _collective_meetings(
    schedule: Schedule,
    lists: list[Listing],
    offsets: Integers,
    meeting: Integers,
    arrivals: Integers,
) -> Integers:
    """Give a number to each collective of several classes; n-th of a key meets n-th elsewhere."""
    partners = Partners(schedule)
    known: dict[object, int] = {}  # what collectives have in common but the micro-batch
    members: list[int] = []
    where, which, turns = [_NO_INDEX], [_NO_INDEX], [_NO_INDEX]
    most = max(int(listing.micro_batch.max(initial=0)) for listing in lists) + 2
    for index, listing in enumerate(lists):
        own = np.full(len(listing.examples), -1, dtype=np.int64)
        for code, example in enumerate(listing.examples):
            met = partners.series(index, example) if example.op in COLLECTIVES else None
            if met is not None:
                own[code] = known.setdefault(met[0], len(known))
                if own[code] == len(members):
                    members.append(len(met[1]))
        entries = own[listing.kinds[1]]
        at = np.flatnonzero(entries >= 0)
        codes = entries[at] * most + listing.micro_batch[at] + 1
        where.append(at + offsets[index])
        which.append(codes)
        turns.append(_turns(codes))
    places, codes = np.concatenate(where), np.concatenate(which)
    if not len(places):
        return arrivals
    turn = np.concatenate(turns)
    _, first, numbers = np.unique(
        codes * (int(turn.max()) + 1) + turn, return_index=True, return_inverse=True
    )
    meeting[places] = len(arrivals) + numbers.reshape(-1)
    together = np.array(members, dtype=np.int64)[codes[first] // most]
    return np.concatenate([arrivals, together])


def _turns(codes: Integers) -> Integers:
    """Return how often each code stood before."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    new = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if len(codes) else _NO_INDEX
    begins = np.flatnonzero(new)
    lengths = np.diff(np.concatenate([begins, [len(codes)]]))
    turns = np.empty(len(codes), dtype=np.int64)
    turns[order] = np.arange(len(codes)) - np.repeat(begins, lengths)
    return turns
