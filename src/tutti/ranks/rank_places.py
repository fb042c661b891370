"""Where each rank sits: its place in the Plan and the ranks it works with. Pure, without torch.

A seat is everything that `nn` needs to know to slice a stage for a rank, for this rank and for any
other: who holds what is computed alike by all, so that nobody has to be asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tutti.models.spec import ModelSpec
from tutti.ownership.ownership import Ownership
from tutti.plan.plan import Plan, RankMap, RankPlace, Replica, Stage
from tutti.schedule.instruction import Lane
from tutti.schedule.schedule import Schedule

if TYPE_CHECKING:
    from tutti.simulate.estimate import Estimate


@dataclass(frozen=True, slots=True)
class Members:
    """Ranks that do one thing together, and which of them this one is."""

    ranks: tuple[int, ...]
    rank: int  # the place of this one among them

    @property
    def size(self) -> int:
        """How many."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank of a Plan."""

    rank: int
    place: RankPlace
    stage: Stage
    replica: Replica
    tensor: Members
    context: Members
    experts: Members
    expert_counts: tuple[int, ...]  # empty: every rank has all experts, sliced by tensor ranks

    @property
    def sequence_parallel(self) -> bool:
        """Whether tensor ranks share out the tokens between sliced layers."""
        return self.replica.sequence_parallel and self.replica.tp > 1

    @property
    def units(self) -> tuple[int, ...]:
        """The units that the rank holds, rising."""
        ranges = sorted(self.stage.units)
        return tuple(itertools.chain.from_iterable(range(*span) for span in ranges))

    @property
    def first_sequence(self) -> int:
        """The first of its sequences in each micro-batch."""
        replicas = self.stage.replicas
        before = sum(r.count * r.sequences for r in replicas[: self.place.replica])
        return before + self.place.copy * self.replica.sequences


class Seats:
    """All seats of a Plan, made when asked for."""

    def __init__(self, plan: Plan, spec: ModelSpec) -> None:
        self.plan, self.spec = plan, spec
        self.map = RankMap(plan)
        self.ownership = Ownership(plan, spec)
        self._made: dict[int, Seat] = {}

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.map.num_ranks

    def __getitem__(self, rank: int) -> Seat:
        if rank not in self._made:
            self._made[rank] = self._make(rank)
        return self._made[rank]

    def of_stage(self, pipeline: int, stage: int) -> Iterator[Seat]:
        """Yield the seats of one stage, in rank order."""
        first = self.map.first_rank(pipeline, stage)
        size = self.plan.pipelines[pipeline].stages[stage].num_chips
        return (self[rank] for rank in range(first, first + size))

    def holding(self, unit: int) -> Iterator[Seat]:
        """Yield the seats, in all pipelines, that hold a unit."""
        for p, s, _ in self.plan.holders(unit):
            yield from self.of_stage(p, s)

    def _make(self, rank: int) -> Seat:
        place = self.map.place(rank)
        stage = self.plan.pipelines[place.pipeline].stages[place.stage]
        replica = stage.replicas[place.replica]
        base = rank - place.tp - place.cp * replica.tp  # the first rank of this copy
        experts, counts = self._experts(rank, place, stage)
        return Seat(
            rank=rank,
            place=place,
            stage=stage,
            replica=replica,
            tensor=Members(
                tuple(base + place.cp * replica.tp + t for t in range(replica.tp)), place.tp
            ),
            context=Members(
                tuple(base + c * replica.tp + place.tp for c in range(replica.cp)), place.cp
            ),
            experts=experts,
            expert_counts=counts,
        )

    def _experts(
        self, rank: int, place: RankPlace, stage: Stage
    ) -> tuple[Members, tuple[int, ...]]:
        if not stage.experts or not self.spec.num_experts:
            return Members((rank,), 0), ()
        first = self.map.first_rank(place.pipeline, place.stage)
        start = first
        for group in stage.experts:
            span = group.chips * group.count
            if rank < start + span:
                own = start + (rank - start) // group.chips * group.chips
                ranks = tuple(range(own, own + group.chips))
                return Members(ranks, rank - own), group.per_chip(self.spec.num_experts)
            start += span
        return Members((rank,), 0), ()


def class_of(schedule: Schedule, seat: Seat) -> int:
    """Return to which of a schedule's classes of equal ranks a seat belongs."""
    return class_at(schedule, seat.place)


def class_at(schedule: Schedule, place: RankPlace) -> int:
    """Return to which of a schedule's classes of equal ranks a place belongs."""
    wanted = (place.pipeline, place.stage, place.replica)
    return next(
        i for i, c in enumerate(schedule.classes) if (c.pipeline, c.stage, c.replica) == wanted
    )


def compute_seconds(seats: Seats, estimate: Estimate) -> list[float]:
    """Return the seconds that each rank of a plan should compute in a step."""
    classes = []
    for rank_class, costs in zip(
        estimate.schedule.classes, estimate.priced.costs.classes, strict=True
    ):
        pairs = zip(rank_class.instructions, costs.seconds.tolist(), strict=True)
        classes.append(sum(s for entry, s in pairs if entry.lane is Lane.COMPUTE))
    places = (seats.map.place(rank) for rank in range(seats.num_ranks))
    return [classes[class_at(estimate.schedule, place)] for place in places]
