"""One copy of a pipeline over some pools, as the coarse model describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tutti.plan.job import ScheduleKind
from tutti.plan.schedules import ScheduleRecord, StagePlace, schedule_record
from tutti.search.pricing.unit_tables import Config
from tutti.search.question.space import Problem
from tutti.search.thresholds import THRESHOLDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOption:
    """A schedule and how many unit ranges a stage has under it."""

    kind: ScheduleKind
    virtual: int = 1

    @property
    def record(self) -> ScheduleRecord:
        """What there is to know of the kind."""
        return schedule_record(self.kind)

    def place(self, depth: Any, stage: Any, micro_batches: Any) -> StagePlace:
        """Return a stage, or an array of them, under this schedule."""
        return StagePlace(depth, stage, micro_batches, self.virtual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """One kind of pipeline copy, with what the coarse model says of it."""

    configs: tuple[Config, ...]  # per pool of the chain, in order
    stages: tuple[int, ...]
    copies: int
    sequences: int  # per copy and micro-batch
    schedule: ScheduleOption
    shard: int
    pace: float  # seconds per micro-batch
    fill: float
    closing: float
    traffic: tuple[float, ...] = ()  # per pool: seconds that sharding a block keeps a NIC busy

    def seconds(self, sequences: float) -> float:
        """Return the step time if all copies together take so many sequences."""
        rounds = -(-sequences // (self.copies * self.sequences))
        return (rounds * self.pace + self.fill + self.closing) * THRESHOLDS.optimism[self.shard]

    def elastic_seconds(self, sequences: float) -> float:
        """Return the same if it may take a little more or less, in whole micro-batches."""
        size = self.copies * self.sequences
        taken = max(1, round(sequences / size)) * size
        return self.seconds(taken) * sequences / taken

    @property
    def key(self) -> object:
        """What makes two chains the same strategy.

        How a replica's chips split their work between tensor and context parallelism is a detail.
        """
        configs = tuple((c.pool, c.width, c.sequences, c.ep) for c in self.configs)
        return (configs, self.stages, self.copies, self.schedule, self.shard)

    @property
    def form(self) -> tuple[object, ...]:
        """What its cut depends on, beside the number of micro-batches and of those who share."""
        return (self.configs, self.stages, self.sequences, self.schedule, self.shard)

    @property
    def quantum(self) -> int:
        """The fewest copies whose chips come out even for the expert groups of every stage."""
        return math.lcm(
            *(c.ep // math.gcd(c.ep, c.width * (self.sequences // c.sequences))
              for c in self.configs)
        )  # fmt: skip

    @property
    def rate(self) -> float:
        """Sequences per second of all copies."""
        return self.copies * self.sequences / self.pace


def schedule_options(problem: Problem) -> tuple[ScheduleOption, ...]:
    """Return the schedules to price, those of several unit ranges once per number of them."""
    schedules: list[ScheduleOption] = []
    kinds = problem.space.schedules
    for kind in kinds:
        if schedule_record(kind).several_ranges:
            schedules += [
                ScheduleOption(kind=kind, virtual=v) for v in problem.space.virtual if v > 1
            ]
        else:
            schedules.append(ScheduleOption(kind=kind))
    return tuple(schedules)
