"""Who sends which piece of a boundary tensor to whom, between stages that may differ in all.

The tensor that crosses a boundary has a batch and a sequence dimension. What a rank owns of it is
a list of (batch, sequence) rectangles: replicas split the batch in proportion to their shares,
context parallelism splits the sequence into two mirrored pieces per rank (so that causal work is
balanced), sequence parallelism splits each rank's own part again. A receiving tensor-parallel
group without sequence parallelism also receives in slices, and joins them over its own fast links
(`must_join`): no byte crosses a boundary twice.

Ranks are counted inside their stage. Everything is computed on demand from the two stages, so
that a boundary between 8,192 and 4,096 chips costs nothing until a rank asks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tutti.plan.plan import Replica, Stage

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


@functools.lru_cache(maxsize=4096)
def slice_intervals(parts: tuple[Interval, ...], tp: int, index: int) -> tuple[Interval, ...]:
    """Return slice `index` of `tp` equal slices of the concatenated parts."""
    total = sum(stop - start for start, stop in parts)
    low, high = total * index // tp, total * (index + 1) // tp
    found: list[Interval] = []
    position = 0
    for start, stop in parts:
        first, last = max(low - position, 0), min(high - position, stop - start)
        if first < last:
            found.append((start + first, start + last))
        position += stop - start
    return tuple(found)


def held_sequence(replica: Replica, cp: int, tp: int, sequence_length: int) -> tuple[Interval, ...]:
    """Return what of each sequence a rank holds after its stage has computed it."""
    parts = context_intervals(sequence_length, replica.cp, cp)
    return slice_intervals(parts, replica.tp, tp) if replica.sequence_parallel else parts


def received_sequence(
    replica: Replica, cp: int, tp: int, sequence_length: int
) -> tuple[Interval, ...]:
    """Return what of each sequence a rank takes from the wire (a slice, joined afterwards)."""
    return slice_intervals(context_intervals(sequence_length, replica.cp, cp), replica.tp, tp)


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
        batch = _overlap(source.batch, target.batch)
        if batch is None:
            return []
        wanted = received_sequence(target.replica, target.cp, target.tp, self.sequence_length)
        held = held_sequence(replica, source.cp, source.tp, self.sequence_length)
        return [
            Transfer(source.rank, target.rank, batch, sequence)
            for part in wanted
            for own in held
            if (sequence := _overlap(own, part)) is not None
        ]
