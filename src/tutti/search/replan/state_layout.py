"""Which chip holds which part of a model's training state, as boxes of each tensor.

`ownership` says who holds and keeps which elements; here every part is a box in the unit
cube of its tensor's dimensions: what experts and tensor parallelism cut, and inside of a block the
rows that a shard has of it (a row that two share is cut, as if it had no columns). Everything is
arrays over ranks: a plan of 16,384 chips is a few dozen rows of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tutti.models.parameters import Parameter, ParameterClass
from tutti.models.spec import ModelSpec
from tutti.ownership.elements import RankElements
from tutti.ownership.ownership import Block, Span
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Plan

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
ROUNDING = 1e-12  # of a tensor: less than a parameter of any model
ChipNumbers = Callable[[ChipSet], IntArray]  # of each chip; -1 for one that is gone


class Kind(StrEnum):
    """What is kept of a tensor."""

    PARAMETERS = "parameters"  # of one that is not trained: what computes
    WEIGHTS = "weights"  # of a trained one: the master copy, or what computes; tied copies too
    OPTIMIZER = "optimizer"  # what only a weight's owner has: its master copy and moments

    @property
    def shards_from(self) -> int:
        """The shard level from which on it is sharded."""
        return 3 if self is Kind.PARAMETERS else 1


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """What ranks hold of a tensor: box m of rank i is lower[i, m] … upper[i, m], by dimension."""

    chips: IntArray  # number of each rank's chip
    lower: FloatArray
    upper: FloatArray

    @property
    def measure(self) -> FloatArray:
        """The fraction of the tensor that each rank holds."""
        total: FloatArray = (self.upper - self.lower).prod(axis=2).sum(axis=1)
        return total

    def surviving(self) -> Holding:
        """Return the ranks whose chips are still there."""
        alive = self.chips >= 0
        return Holding(self.chips[alive], self.lower[alive], self.upper[alive])

    @property
    def is_whole(self) -> bool:
        """Whether the ranks together hold all of the tensor."""
        dims = self.lower.shape[2]
        everything = Holding(np.zeros(1, np.int64), np.zeros((1, 1, dims)), np.ones((1, 1, dims)))
        return bool(self.lacks(everything)[0] <= ROUNDING)

    def lacks(self, wanted: Holding) -> FloatArray:
        """Return the fraction of the tensor that each of some ranks wants and nobody here holds."""
        lower, upper = self._boxes()
        dims = lower.shape[1]
        every = (lower, upper, wanted.lower.reshape(-1, dims), wanted.upper.reshape(-1, dims))
        edges = [_distinct(np.concatenate([each[:, d] for each in every])) for d in range(dims)]
        missing = _cells(edges) * ~_covered(edges, lower, upper)
        # the sum of all cells before each corner, so that a box is a sum over its corners
        before = np.pad(missing, [(1, 0)] * dims)
        for d in range(dims):
            before = np.cumsum(before, axis=d)
        held: FloatArray = np.zeros(wanted.lower.shape[:2])
        for sign, at in _corners(edges, wanted.lower, wanted.upper):
            held += sign * before[at]
        total: FloatArray = np.maximum(held, 0.0).sum(axis=1)
        return total

    def _boxes(self) -> tuple[FloatArray, FloatArray]:
        """Return the boxes that are not empty, each once."""
        dims = self.lower.shape[2]
        lower, upper = self.lower.reshape(-1, dims), self.upper.reshape(-1, dims)
        full = (upper - lower > ROUNDING).all(axis=1)
        both = np.unique(np.concatenate((lower[full], upper[full]), axis=1), axis=0)
        return both[:, :dims], both[:, dims:]


def _distinct(values: FloatArray) -> FloatArray:
    """Return the different ones of some edges, with those of the whole."""
    ordered = np.unique(np.concatenate((values, [0.0, 1.0])))
    edges: FloatArray = ordered[np.concatenate(([True], np.diff(ordered) > ROUNDING))]
    edges[-1] = 1.0
    return edges


def _cells(edges: list[FloatArray]) -> FloatArray:
    """Return the size of every cell between edges."""
    size: FloatArray = np.ones(())
    for each in edges:
        size = np.multiply.outer(size, np.diff(each))
    return size


def _corners(
    edges: list[FloatArray], lower: FloatArray, upper: FloatArray
) -> Iterator[tuple[int, tuple[IntArray, ...]]]:
    """Yield every corner of boxes, by index among the edges, with its sign in a sum over them."""
    dims = len(edges)
    low = [np.searchsorted(edges[d], lower[..., d] - ROUNDING) for d in range(dims)]
    high = [np.searchsorted(edges[d], upper[..., d] - ROUNDING) for d in range(dims)]
    for ends in itertools.product((False, True), repeat=dims):
        at = tuple(high[d] if end else low[d] for d, end in enumerate(ends))
        yield (-1) ** (dims - sum(ends)), at


def _covered(
    edges: list[FloatArray], lower: FloatArray, upper: FloatArray
) -> npt.NDArray[np.bool_]:
    """Tell of every cell whether some box covers it."""
    count = np.zeros([each.size for each in edges], dtype=np.int64)
    dims = len(edges)
    for sign, at in _corners(edges, lower, upper):
        np.add.at(count, at, sign * (-1) ** dims)
    for d in range(dims):
        count = np.cumsum(count, axis=d)
    covered: npt.NDArray[np.bool_] = count[tuple(slice(0, -1) for _ in edges)] > 0
    return covered


def joined(first: Holding, second: Holding) -> Holding:
    """Return the ranks of both; one with fewer boxes gets empty ones."""
    width = max(first.lower.shape[1], second.lower.shape[1])

    def wide(array: FloatArray) -> FloatArray:
        return np.pad(array, ((0, 0), (0, width - array.shape[1]), (0, 0)))

    return Holding(
        np.concatenate((first.chips, second.chips)),
        np.concatenate((wide(first.lower), wide(second.lower))),
        np.concatenate((wide(first.upper), wide(second.upper))),
    )


class StateLayout:
    """The boxes of every rank of a plan, for one tensor of one unit at a time."""

    def __init__(self, plan: Plan, model: ModelSpec, numbers: ChipNumbers) -> None:
        self.plan = plan
        self.elements = RankElements(plan, model)
        self._chips = np.concatenate([numbers(stage.chips) for _, _, stage in plan.stages()])

    def signature(self, unit: int) -> tuple[object, ...]:
        """Return a key that units share whose states are spread alike."""
        bucket, ownership = self.elements.bucket(unit), self.elements.ownership
        rules = [rule for kind in ParameterClass if (rule := bucket.rule(kind)) is not None]
        return (
            tuple(id(ownership.groups(bucket.start, rule)) for rule in rules),
            tuple(bucket.level(kind) for kind in ParameterClass),
            self.elements.alike(unit),
            # where in its bucket: shards are cut from the bucket as a whole
            tuple(unit - bucket.span(kind)[0] for kind in ParameterClass if bucket.level(kind)),
        )

    def holding(self, unit: int, parameter: Parameter, kind: Kind) -> Holding:
        """Return who holds a tensor of a unit."""
        bucket = self.elements.bucket(unit)
        group = bucket.class_of(parameter)
        counts = np.zeros(self._chips.size, dtype=np.int64)
        pieces: list[tuple[IntArray, FloatArray, FloatArray]] = []
        sharded = bucket.level(group) >= kind.shards_from
        for span, block, offset in self._blocks(unit, parameter, group):
            if span.copied and kind is Kind.OPTIMIZER:
                continue
            start, stop, leading = _box(block, parameter)
            for ranks, low, high in span.members.intervals(span.size):
                lower, upper = np.tile(start, (ranks.size, 1)), np.tile(stop, (ranks.size, 1))
                if sharded:
                    first = np.clip((low - offset) / block.size, 0.0, 1.0)
                    last = np.clip((high - offset) / block.size, 0.0, 1.0)
                    length = stop[leading] - start[leading]
                    lower[:, leading] = start[leading] + length * first
                    upper[:, leading] = start[leading] + length * last
                pieces.append((ranks, lower, upper))
                counts[ranks] += 1
        held = counts > 0
        shape = (max(1, int(counts.max(initial=0))), max(1, len(parameter.shape)))
        return self._put_together(pieces, held, shape)

    def _put_together(
        self,
        pieces: list[tuple[IntArray, FloatArray, FloatArray]],
        held: npt.NDArray[np.bool_],
        shape: tuple[int, int],
    ) -> Holding:
        lower, upper = np.zeros((held.size, *shape)), np.zeros((held.size, *shape))
        column = np.zeros(held.size, dtype=np.int64)
        for ranks, low, high in pieces:
            lower[ranks, column[ranks]] = low
            upper[ranks, column[ranks]] = high
            column[ranks] += 1
        return Holding(self._chips[held], lower[held], upper[held])

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


def _box(block: Block, parameter: Parameter) -> tuple[FloatArray, FloatArray, int]:
    """Return where a block lies in its tensor, and the dimension along which its numbers run."""
    if not parameter.shape:
        return np.zeros(1), np.ones(1), 0
    size = np.asarray(parameter.shape, dtype=np.float64)
    ends = np.asarray(block.intervals, dtype=np.float64)
    leading = next((d for d, extent in enumerate(block.shape) if extent > 1), 0)
    return ends[:, 0] / size, ends[:, 1] / size, leading
