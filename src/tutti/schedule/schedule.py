"""The Schedule of a Plan: one instruction list per class of equal ranks.

Ranks of one replica group do the same things at the same time; only whom they talk to differs,
and that is looked up in the boundary and in the Plan's holders. So the Schedule of 16,384 chips
is some dozens of lists.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tutti.errors import InputError
from tutti.ownership.buckets import Bucket, make_buckets, tied_apart
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Pipeline, Plan, Replica, Stage, chunks, covers
from tutti.schedule.boundary import Boundary, boundary_of
from tutti.schedule.events import Event, stage_events
from tutti.schedule.instruction import Instruction, Op, What
from tutti.schedule.listing import Listing
from tutti.schedule.lists import ListInput, write_list


@dataclass(frozen=True, slots=True)
class RankClass:
    """The ranks of one replica group, and what each of them does."""

    pipeline: int
    stage: int
    replica: int
    num_ranks: int
    instructions: Sequence[Instruction]  # as written by us: a `Listing`

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"pipeline {self.pipeline}, stage {self.stage}, replica {self.replica}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """All classes of ranks of a Plan, in rank order."""

    plan: Plan
    classes: tuple[RankClass, ...]
    buckets: tuple[Bucket, ...]

    def boundary(self, pipeline: int, unit: int, what: What) -> Boundary:
        """Return the wire that activations enter `unit` by, or gradients leave it by."""
        return boundary_of(self.plan, pipeline, unit, what)


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Pause the cycle collector: hundreds of thousands of plain tuples hold no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class ScheduleMemo:
    """Events and lists that were written before: plans of a search differ in little.

    Keys hold all that an entry depends on, so that a Schedule is the same with a memo and without.
    Lists go by what happens in their own stage, which a change elsewhere often leaves as it was.
    """

    MOST = 4_000_000  # events of all lists that are kept

    def __init__(self) -> None:
        self._events: dict[object, list[tuple[int, list[Event]]]] = {}
        self._numbers: dict[tuple[Event, ...], int] = {}
        self._lists: dict[object, Listing] = {}
        self._size = 0

    def events(self, pipeline: Pipeline, kind: ScheduleKind) -> list[tuple[int, list[Event]]]:
        """Return each stage's events, with a number that stands for them."""
        shape = tuple((stage.units, stage.order) for stage in pipeline.stages)
        key = (shape, pipeline.micro_batches, kind)
        if key not in self._events:
            stages = stage_events(pipeline, kind)
            self._size += sum(map(len, stages))
            if self._size > self.MOST:
                self._events.clear()
                self._numbers.clear()
                self._lists.clear()
                self._size = sum(map(len, stages))
            self._events[key] = [(self._number(events), events) for events in stages]
        return self._events[key]

    def _number(self, events: list[Event]) -> int:
        return self._numbers.setdefault(tuple(events), len(self._numbers))

    def written(self, events: int, given: ListInput) -> Listing:
        """Return the list of a class of ranks, whose events have a number."""
        stage = given.stage
        key = (
            events,
            stage.units,
            tuple(given.chunk_bounds.items()),
            given.micro_batches,
            given.replica.recompute,
            given.replica.offload,
            tuple((replica.recompute, replica.offload) for replica in stage.replicas),
            tuple(bucket for bucket in given.buckets if covers(stage.units, bucket.start)),
            given.tied,
        )
        if key not in self._lists:
            self._lists[key] = write_list(given)
        return self._lists[key]


@_no_garbage()
def build_schedule(plan: Plan, memo: ScheduleMemo | None = None) -> Schedule:
    """Turn a Plan into its instruction lists; depends on nothing but the Plan."""
    if plan.job.serving is not None:
        raise InputError(
            "the plan is for serving, which has no training step; show and simulate take it"
        )
    memo = memo or ScheduleMemo()
    buckets = make_buckets(plan)
    apart = tied_apart(plan)
    last_unit = buckets[-1].stop - 1
    classes: list[RankClass] = []
    for p, pipeline in enumerate(plan.pipelines):
        path = chunks(pipeline)
        known = memo.events(pipeline, plan.job.schedule)
        for s, (stage, (number, events)) in enumerate(zip(pipeline.stages, known, strict=True)):
            bounds = {i: (c.start, c.stop) for i, c in enumerate(path) if c.stage == s}
            tied = apart and (covers(stage.units, 0) or covers(stage.units, last_unit))
            written: dict[object, Listing] = {}
            for r, replica in enumerate(stage.replicas):
                duties = (replica.recompute, replica.offload)
                if duties not in written:
                    given = ListInput(
                        stage=stage,
                        replica=replica,
                        buckets=buckets,
                        events=events,
                        chunk_bounds=bounds,
                        micro_batches=pipeline.micro_batches,
                        tied=tied,
                    )
                    written[duties] = memo.written(number, given)
                classes.append(RankClass(p, s, r, replica.num_chips, written[duties]))
    return Schedule(plan, tuple(classes), tuple(buckets))


def peak_in_flight(instructions: Iterable[Instruction]) -> int:
    """Return the most unit-passes that lie between forward and weight gradient at any time."""
    now = peak = 0
    for entry in instructions:
        if entry.op is Op.FORWARD:
            now += entry.stop - entry.start
            peak = max(peak, now)
        elif entry.op is Op.BACKWARD_WEIGHT:
            now -= entry.stop - entry.start
    return peak


def stage_of(plan: Plan, rank_class: RankClass) -> Stage:
    """Return the stage that a class of ranks belongs to."""
    return plan.pipelines[rank_class.pipeline].stages[rank_class.stage]


def replica_of(plan: Plan, rank_class: RankClass) -> Replica:
    """Return the replica group that a class of ranks is."""
    return stage_of(plan, rank_class).replicas[rank_class.replica]
