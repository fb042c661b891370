"""Prices of classes of ranks that another plan had already: plans of a search differ in little.

What a class of ranks costs depends on its own stage, on the stages that hold the same units, on its
neighbours' replicas and on little else. A key holds all of that by value, so that a step has the
same price with a memo and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tutti.cost.memory.instruction_memory import StaticBytes
from tutti.cost.network.reach import group_limits
from tutti.cost.network.recorded_programs import Asked
from tutti.cost.plan.class_prices import ClassPricer
from tutti.cost.plan.simulator_inputs import ClassCosts
from tutti.cost.plan.step_context import StepContext
from tutti.cost.plan.step_memo import StepMemo, sequences_of
from tutti.plan.plan import Stage, chunks, covers
from tutti.schedule.schedule import RankClass


class PricedClass(NamedTuple):
    """What one class of ranks costs, and the collectives that it asked for."""

    costs: ClassCosts
    static: StaticBytes
    asked: tuple[Asked, ...]


Pricing = Callable[[ClassPricer, RankClass], PricedClass]


@dataclass(slots=True)
class _Known:
    """One class of ranks, with its figures by instruction list."""

    pricer: ClassPricer
    figures: dict[int, tuple[object, PricedClass]] = field(default_factory=dict)


class ClassMemo:
    """Classes of ranks that were priced before, for one model, cluster and sources."""

    MOST = 1_500_000  # instructions and chips of all that is kept

    def __init__(self) -> None:
        self._known: dict[object, _Known] = {}
        self.steps = StepMemo()
        self._size = 0

    def priced(
        self,
        rank_class: RankClass,
        shared: StepContext,
        pricer: Callable[[], ClassPricer],
        price: Pricing,
    ) -> PricedClass:
        """Return what a class costs: as known, else by a `price` that shares what is known."""
        key = class_key(rank_class, shared)
        known = self._known.get(key)
        if known is None:
            self._make_room(shared.plan.num_ranks)
            known = self._known[key] = _Known(pricer())
        instructions = rank_class.instructions
        entry = known.figures.get(id(instructions))
        if entry is None:
            entry = (instructions, price(known.pricer, rank_class))
            known.figures[id(instructions)] = entry
            self._size += len(instructions)
        return entry[1]

    def _make_room(self, more: int) -> None:
        self._size += more
        if self._size > self.MOST:
            self._known.clear()
            self.steps.clear()
            self._size = more


def class_key(rank_class: RankClass, shared: StepContext) -> object:
    """Return all that the price of a class's instructions depends on, but the instructions."""
    plan, place = shared.plan, (rank_class.pipeline, rank_class.stage, rank_class.replica)
    pipeline = plan.pipelines[rank_class.pipeline]
    stage = pipeline.stages[rank_class.stage]
    everything = None
    if group_limits(shared.cluster) is not None:  # all that crosses the tiers shares them
        everything = tuple(
            (other.units, shared.placed(other), sequences_of(other))
            for _, _, other in plan.stages()
        )
    return (
        place,
        min(2, pipeline.micro_batches),
        shared.job,
        (stage.units, stage.replicas, stage.experts),
        tuple(_holders(stage, shared)),
        tuple(_neighbours(rank_class, shared)),
        tuple(b for b in shared.schedule.buckets if covers(stage.units, b.start)),
        _tied(stage, shared, rank_class.pipeline),
        plan.num_ranks,
        shared.host.sharing,
        everything,
    )


def _holders(stage: Stage, shared: StepContext) -> Iterator[object]:
    """Yield who holds the units of a stage, each time that it changes."""
    last = None
    for unit in (u for start, stop in stage.units for u in range(start, stop)):
        holders = shared.index.of(unit)
        if holders is not last:
            last = holders
            yield unit, tuple((p, s, shared.placed(held)) for p, s, held in holders)


def _neighbours(rank_class: RankClass, shared: StepContext) -> Iterator[object]:
    """Yield what lies before and behind each unit range of a class."""
    pipeline = shared.plan.pipelines[rank_class.pipeline]
    path = chunks(pipeline)
    for index, chunk in enumerate(path):
        if chunk.stage == rank_class.stage:
            for other in (index - 1, index + 1):
                if 0 <= other < len(path):
                    beside = pipeline.stages[path[other].stage]
                    yield shared.placed(beside), sequences_of(beside)
                else:
                    yield None


def _tied(stage: Stage, shared: StepContext, pipeline: int) -> object:
    """Return who holds the ends of a tied table; None where a stage has nothing of it."""
    head = shared.model.head_unit
    if not (covers(stage.units, 0) or covers(stage.units, head)):
        return None
    ends = tuple(
        (s, held.replicas[0].chips)
        for end in (0, head)
        for p, s, held in shared.index.of(end)
        if p == pipeline
    )
    return (shared.plan.tied_owner, shared.elements.ownership.has_copies(0), ends)
