"""The kinds of schedules as data: one record each, which everybody reads who asks about a kind.

How far a stage runs ahead, what it holds, whether passes come in groups or weight passes wait:
the order of passes, the checker, the search and its prices, exports and drawings take it from
here. The formulas hold for numbers and for arrays of them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tutti.errors import InputError, hint
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Pipeline

Counts = Any  # a whole number, or an array of them


class StagePlace(NamedTuple):
    """A stage of a pipeline, as far as its schedule depends on it."""

    depth: Counts  # stages of the pipeline
    stage: Counts
    micro_batches: Counts
    ranges: Counts = 1  # unit ranges of every stage

    @property
    def group(self) -> Counts:
        """Micro-batches of the longest group that passes one range after the other.

        Groups are as long as the pipeline is deep, or longer where that does not come out even.
        """
        groups = self.micro_batches // self.depth
        return -(-self.micro_batches // (groups + (groups == 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRecord:
    """What there is to know of a kind of schedule."""

    # Forward passes that a stage runs before its first backward pass, one for each unit range and
    # micro-batch, if there are so many.
    ahead: Callable[[StagePlace], Counts]
    several_ranges: bool = False  # a group of micro-batches visits the stages several times
    delays_weights: bool = False  # weight passes wait for a gap, on every stage as on the first
    sets_warm_up: bool = False  # a plan may say how far a stage runs ahead
    steady: bool = False  # once it runs, a micro-batch more adds time, but no memory
    searched: bool = True  # unless the question names kinds
    systems: tuple[str, ...] = ()  # others that have it

    def passes_ahead(self, place: StagePlace) -> Counts:
        """Return the forward passes that a stage runs before its first backward pass."""
        return _smaller(self.ahead(place), place.ranges * place.micro_batches)

    def in_flight(self, place: StagePlace) -> Counts:
        """Return how many micro-batches of a whole stage wait for their weight pass at most."""
        held = place._replace(stage=0) if self.delays_weights else place
        return self.passes_ahead(held) / place.ranges


_RECORDS = {
    ScheduleKind.GPIPE: ScheduleRecord(
        ahead=lambda place: place.micro_batches,
        searched=False,
    ),
    ScheduleKind.ONE_F_ONE_B: ScheduleRecord(
        ahead=lambda place: place.depth - place.stage,
        sets_warm_up=True,
        steady=True,
        systems=("Megatron-LM", "FlagScale"),
    ),
    ScheduleKind.ZERO_BUBBLE: ScheduleRecord(
        ahead=lambda place: place.depth - place.stage,
        delays_weights=True,
        sets_warm_up=True,
    ),
    ScheduleKind.INTERLEAVED: ScheduleRecord(
        ahead=lambda place: (
            2 * (place.depth - place.stage - 1) + (place.ranges - 1) * place.group + 1
        ),
        several_ranges=True,
        steady=True,
        systems=("Megatron-LM",),
    ),
}
# Every kind does the same on a pipeline of one stage: this one stands for all of them there.
PLAIN = ScheduleKind.ONE_F_ONE_B


def schedule_record(kind: ScheduleKind) -> ScheduleRecord:
    """Return the record of a kind; refuse one that has none."""
    if kind not in _RECORDS:
        raise InputError(f"schedule '{kind}' has no record; {hint(kind, _RECORDS)}")
    return _RECORDS[kind]


def kinds_with(test: Callable[[ScheduleRecord], bool]) -> tuple[ScheduleKind, ...]:
    """Return the kinds whose record passes a test, in the order in which a search tries them."""
    return tuple(kind for kind, record in _RECORDS.items() if test(record))


def warm_up_depth(pipeline: Pipeline, stage: int, kind: ScheduleKind) -> int:
    """Return the forward passes that a stage runs ahead: as the plan says, else as is usual."""
    record, this = schedule_record(kind), pipeline.stages[stage]
    if record.sets_warm_up and this.order.warm_up is not None:
        return min(this.order.warm_up, pipeline.micro_batches)
    ranges = len(this.units) if record.several_ranges else 1
    place = StagePlace(len(pipeline.stages), stage, pipeline.micro_batches, ranges)
    return int(record.passes_ahead(place))


def _smaller(one: Counts, other: Counts) -> Counts:
    """Return the smaller of two whole numbers, or of each pair of them."""
    if type(one) is type(other) is int:
        return min(one, other)
    return other + (one - other) * (one < other)
