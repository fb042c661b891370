"""Which chip holds which part of a model's training state, as intervals over each tensor.

`schedule.ownership` says who holds and keeps which elements; here they are laid on one axis per
tensor, [0, 1): its experts or what tensor parallelism cuts, and inside of a part that nobody cuts,
its elements. Everything is arrays over ranks: a plan of 16,384 chips is a few dozen rows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tutti.models.parameters import Parameter, ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Plan, covers
from tutti.schedule.elements import RankElements
from tutti.schedule.ownership import Block, Span

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
ROUNDING = 1e-12  # of a tensor: less than a parameter of any model
ChipNumbers = Callable[[ChipSet], IntArray]  # of each chip; -1 for one that is gone


class Kind(StrEnum):
    """The two kinds of state that shard at different levels."""

    PARAMETERS = "parameters"  # what computes
    OPTIMIZER = "optimizer"  # master copy and moments

    @property
    def shards_from(self) -> int:
        """The shard level from which on it is sharded."""
        return 3 if self is Kind.PARAMETERS else 1


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """What ranks hold of a tensor: interval m of rank i is lower[i, m] … upper[i, m]."""

    chips: IntArray  # number of each rank's chip
    lower: FloatArray
    upper: FloatArray
    by_expert: bool  # the axis: experts, or else what tensor parallelism cuts

    @property
    def measure(self) -> FloatArray:
        """The fraction of the tensor that each rank holds."""
        total: FloatArray = (self.upper - self.lower).sum(axis=1)
        return total

    def surviving(self) -> Holding:
        """Return the ranks whose chips are still there."""
        alive = self.chips >= 0
        return Holding(self.chips[alive], self.lower[alive], self.upper[alive], self.by_expert)

    def gaps(self) -> list[tuple[float, float]]:
        """Return the intervals of [0, 1) that no rank holds."""
        lower, upper = self.lower.ravel(), self.upper.ravel()
        order = np.argsort(lower, kind="stable")
        reached = np.concatenate(([0.0], np.maximum.accumulate(upper[order])))
        nexts = np.concatenate((lower[order], [1.0]))
        open_at = np.flatnonzero(nexts - reached > ROUNDING)
        return [(float(reached[i]), float(nexts[i])) for i in open_at]


def joined(first: Holding, second: Holding) -> Holding:
    """Return the ranks of both; one with fewer intervals gets empty ones."""
    width = max(first.lower.shape[1], second.lower.shape[1])

    def wide(array: FloatArray) -> FloatArray:
        return np.pad(array, ((0, 0), (0, width - array.shape[1])))

    return Holding(
        np.concatenate((first.chips, second.chips)),
        np.concatenate((wide(first.lower), wide(second.lower))),
        np.concatenate((wide(first.upper), wide(second.upper))),
        first.by_expert,
    )


class StateLayout:
    """The intervals of every rank of a plan, for one tensor of one unit at a time."""

    def __init__(self, plan: Plan, model: ModelSpec, numbers: ChipNumbers) -> None:
        self.plan = plan
        self.elements = RankElements(plan, model)
        self._chips = np.concatenate([numbers(stage.chips) for _, _, stage in plan.stages()])
        self._stages = [
            (self.elements.ownership.first_rank(p, s), stage) for p, s, stage in plan.stages()
        ]

    def signature(self, unit: int) -> tuple[object, ...]:
        """Return a key that units share whose states are spread alike."""
        bucket, ownership = self.elements.bucket(unit), self.elements.ownership
        rules = [rule for kind in ParameterClass if (rule := bucket.rule(kind)) is not None]
        return (
            tuple(id(ownership.groups(bucket.start, rule)) for rule in rules),
            tuple(bucket.level(kind) for kind in ParameterClass),
            self.elements.alike(unit),
        )

    def holding(
        self, unit: int, parameter: Parameter, kind: Kind, *, without: int | None = None
    ) -> Holding:
        """Return who holds a tensor of a unit; not the stages that also hold unit `without`."""
        bucket = self.elements.bucket(unit)
        group = bucket.class_of(parameter)
        by_expert = group is ParameterClass.EXPERT
        counts = np.zeros(self._chips.size, dtype=np.int64)
        pieces: list[tuple[IntArray, FloatArray, FloatArray]] = []
        sharded = bucket.level(group) >= kind.shards_from
        for span, block, offset in self._blocks(unit, parameter, group):
            if span.copied and kind is Kind.OPTIMIZER:
                continue
            start, stop = _axis(block, parameter)
            for ranks, low, high in span.members.intervals(span.size):
                first, last = np.zeros(ranks.size), np.ones(ranks.size)
                if sharded:
                    first = np.clip((low - offset) / block.size, 0.0, 1.0)
                    last = np.clip((high - offset) / block.size, 0.0, 1.0)
                length = stop - start
                pieces.append((ranks, start + length * first, start + length * last))
                counts[ranks] += 1
        held = counts > 0
        if without is not None:
            for at, stage in self._stages:
                if covers(stage.units, without):
                    held[at : at + stage.num_chips] = False
        return self._put_together(pieces, held, max(1, int(counts.max(initial=0))), by_expert)

    def _put_together(
        self,
        pieces: list[tuple[IntArray, FloatArray, FloatArray]],
        held: npt.NDArray[np.bool_],
        width: int,
        by_expert: bool,
    ) -> Holding:
        lower, upper = np.zeros((held.size, width)), np.zeros((held.size, width))
        column = np.zeros(held.size, dtype=np.int64)
        for ranks, low, high in pieces:
            lower[ranks, column[ranks]] = low
            upper[ranks, column[ranks]] = high
            column[ranks] += 1
        return Holding(self._chips[held], lower[held], upper[held], by_expert)

    def _blocks(
        self, unit: int, parameter: Parameter, group: ParameterClass
    ) -> Iterator[tuple[Span, Block, int]]:
        """Yield the parts of a tensor, each in its span and from which element of it on."""
        ownership, bucket = self.elements.ownership, self.elements.bucket(unit)
        if not parameter.trainable:
            spans = [s for s in ownership.untrained(unit) if s.blocks[0].name == parameter.name]
        elif bucket.level(group) >= 2:
            spans = [s for line in ownership.by_pipeline(bucket, group) for s in line]
        else:
            spans = list(ownership.spans(bucket, group))
        for span in spans:
            offset = 0
            for block in span.blocks:
                if (block.unit, block.name) == (unit, parameter.name):
                    yield span, block, offset
                offset += block.size


def _axis(block: Block, parameter: Parameter) -> tuple[float, float]:
    """Return where a block lies on its tensor's axis: by experts, inside of them by slices."""
    start, stop = 0.0, 1.0
    for (low, high), size in zip(block.intervals, parameter.shape, strict=True):
        if high - low < size:
            length = stop - start
            start, stop = start + length * low / size, start + length * high / size
    return start, stop
