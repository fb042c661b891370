"""Who sends which piece of a boundary tensor to whom, between stages that may differ in all.

The tensor that crosses a boundary has a batch and a sequence dimension. What a rank owns of it is
a list of (batch, sequence) rectangles: replicas split the batch in proportion to their shares,
context parallelism splits the sequence into two mirrored pieces per rank (so that causal work is
balanced), sequence parallelism cuts the row of a rank's tokens, one sequence after the other, into
equal slices. A receiving tensor-parallel group without sequence parallelism also receives in
slices, and joins them over its own fast links (`must_join`): no byte crosses a boundary twice.

Ranks are counted inside their stage. Everything is computed on demand from the two stages, so
that a boundary between 8,192 and 4,096 chips costs nothing until a rank asks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tutti.plan.plan import Plan, Replica, Stage
from tutti.schedule.instruction import What

Interval = tuple[int, int]  # half-open


class Transfer(NamedTuple):
    """One rectangle that travels from `sender` to `receiver`, ranks counted in their stages."""

    sender: int
    receiver: int
    batch: Interval
    sequence: Interval


class Holder(NamedTuple):
    """One rank of a stage: its replica group, its copy, its position, its share of the batch."""

    rank: int
    replica: Replica
    cp: int
    tp: int
    batch: Interval


@functools.lru_cache(maxsize=4096)
def context_intervals(sequence_length: int, cp: int, index: int) -> tuple[Interval, ...]:
    """Return the parts of a sequence that context rank `index` of `cp` holds, in order."""
    if cp == 1:
        return ((0, sequence_length),)
    pieces = 2 * cp
    bounds = [sequence_length * k // pieces for k in range(pieces + 1)]
    mirrored = pieces - 1 - index
    return ((bounds[index], bounds[index + 1]), (bounds[mirrored], bounds[mirrored + 1]))


class Rectangle(NamedTuple):
    """Some sequences of the micro-batch, and a part of each."""

    batch: Interval
    sequence: Interval


@functools.lru_cache(maxsize=4096)
def token_slice(
    sequences: int, parts: tuple[Interval, ...], tp: int, index: int
) -> tuple[Rectangle, ...]:
    """Return slice `index` of `tp` equal slices of a row of tokens, in their order.

    The row holds the same parts of so many sequences, one sequence after the other.
    """
    length = sum(stop - start for start, stop in parts)
    low, high = sequences * length * index // tp, sequences * length * (index + 1) // tp
    rectangles: list[Rectangle] = []
    while low < high:
        sequence, offset = divmod(low, length)
        whole = (high - low) // length if offset == 0 else 0
        if whole:
            batch = (sequence, sequence + whole)
            rectangles += (Rectangle(batch, part) for part in parts)
            low += whole * length
            continue
        stop = min(high - sequence * length, length)
        rectangles += (
            Rectangle((sequence, sequence + 1), i) for i in _between(parts, offset, stop)
        )
        low = sequence * length + stop
    return tuple(rectangles)


def _between(parts: tuple[Interval, ...], low: int, high: int) -> Iterator[Interval]:
    """Cut the concatenated parts from `low` to `high`."""
    position = 0
    for start, stop in parts:
        first, last = max(low - position, 0), min(high - position, stop - start)
        if first < last:
            yield start + first, start + last
        position += stop - start


def held(own: Holder, sequence_length: int) -> tuple[Rectangle, ...]:
    """Return what a rank holds after its stage has computed it, in the order of its tokens."""
    return _rectangles(own, sequence_length, sliced=own.replica.sequence_parallel)


def wanted(own: Holder, sequence_length: int) -> tuple[Rectangle, ...]:
    """Return what a rank takes from the wire (a slice, joined afterwards), in order."""
    return _rectangles(own, sequence_length, sliced=True)


def _rectangles(own: Holder, sequence_length: int, *, sliced: bool) -> tuple[Rectangle, ...]:
    parts = context_intervals(sequence_length, own.replica.cp, own.cp)
    first, last = own.batch
    if not sliced or own.replica.tp == 1:
        return tuple(Rectangle(own.batch, part) for part in parts)
    rectangles = token_slice(last - first, parts, own.replica.tp, own.tp)
    if not first:
        return rectangles
    return tuple(
        Rectangle((batch[0] + first, batch[1] + first), sequence) for batch, sequence in rectangles
    )


def must_join(replica: Replica) -> bool:
    """Tell whether a tensor-parallel group gathers its slices after receiving."""
    return replica.tp > 1 and not replica.sequence_parallel


def _overlap(a: Interval, b: Interval) -> Interval | None:
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return (low, high) if low < high else None


def holders(stage: Stage) -> Iterator[Holder]:
    """Yield all ranks of a stage with their share of the batch."""
    return overlapping_holders(stage, (0, 1 << 62))


def overlapping_holders(stage: Stage, batch: Interval) -> Iterator[Holder]:
    """Yield the ranks whose share of the micro-batch meets `batch`."""
    first_rank = first_sequence = 0
    for replica in stage.replicas:
        share = replica.sequences
        low = max(0, (batch[0] - first_sequence) // share)
        high = min(replica.count, -(-(batch[1] - first_sequence) // share))
        for copy in range(low, high):
            base = first_rank + copy * replica.width
            own = (first_sequence + copy * share, first_sequence + (copy + 1) * share)
            for position in range(replica.width):
                cp, tp = divmod(position, replica.tp)
                yield Holder(base + position, replica, cp, tp, own)
        first_rank += replica.num_chips
        first_sequence += replica.count * share


def holder(stage: Stage, rank: int) -> Holder:
    """Return one rank of a stage."""
    first_rank = first_sequence = 0
    for replica in stage.replicas:
        if rank < first_rank + replica.num_chips:
            copy, position = divmod(rank - first_rank, replica.width)
            cp, tp = divmod(position, replica.tp)
            start = first_sequence + copy * replica.sequences
            return Holder(rank, replica, cp, tp, (start, start + replica.sequences))
        first_rank += replica.num_chips
        first_sequence += replica.count * replica.sequences
    raise IndexError(f"rank {rank} of {first_rank}")


@dataclass(frozen=True, slots=True)
class Boundary:
    """The wire between a sending and a receiving stage, for one direction."""

    sender: Stage
    receiver: Stage
    sequence_length: int

    def to_rank(self, rank: int) -> list[Transfer]:
        """Return what a rank of the receiving stage receives, in a fixed order."""
        return self._into(holder(self.receiver, rank))

    def from_rank(self, rank: int) -> list[Transfer]:
        """Return what a rank of the sending stage sends, in a fixed order."""
        own = holder(self.sender, rank)
        return [
            transfer
            for target in overlapping_holders(self.receiver, own.batch)
            for transfer in self._between(own, target)
        ]

    def _into(self, target: Holder) -> list[Transfer]:
        return [
            transfer
            for source in overlapping_holders(self.sender, target.batch)
            for transfer in self._between(source, target)
        ]

    def _between(self, source: Holder, target: Holder) -> list[Transfer]:
        replica = source.replica
        position = target.cp * target.replica.tp + target.tp
        if not replica.sequence_parallel and source.tp != position % replica.tp:
            return []  # every tensor rank holds the same; they take the receivers in turn
        if _overlap(source.batch, target.batch) is None:
            return []
        return [
            Transfer(source.rank, target.rank, batch, sequence)
            for part in wanted(target, self.sequence_length)
            for own in held(source, self.sequence_length)
            if (batch := _overlap(own.batch, part.batch)) is not None
            if (sequence := _overlap(own.sequence, part.sequence)) is not None
        ]


def boundary_of(plan: Plan, pipeline: int, unit: int, what: What) -> Boundary:
    """Return the wire that activations enter `unit` by, or gradients leave it by."""
    stages = plan.pipelines[pipeline].stages
    lower = next(s for s in stages if any(stop == unit for _, stop in s.units))
    upper = next(s for s in stages if any(start == unit for start, _ in s.units))
    ends = (lower, upper) if what is What.ACTIVATIONS else (upper, lower)
    return Boundary(*ends, plan.job.sequence_length)


def alike_copies(wire: Boundary) -> tuple[int, int, int]:
    """Return how many copies send alike, each to its own, and how far they are apart."""
    ends = (wire.sender.replicas, wire.receiver.replicas)
    if any(len(replicas) > 1 for replicas in ends):
        return 1, 0, 0
    here, there = ends[0][0], ends[1][0]
    if (here.count, here.sequences) != (there.count, there.sequences):
        return 1, 0, 0
    return here.count, here.width, there.width
