"""Which chip holds which part of a model's training state, as intervals over flat parameters.

Parameters of a unit that are cut alike form a `Part`, laid out on [0, 1). A rank holds a slice of
it (its tensor position, or its experts) and, where the synchronisation rule shards, of that slice
only its ragged share. Shares agree with `cost.holdings`: all holders together hold a sharded state
once. Where holders slice differently, each cell of their common grid is shared out by itself, so
that a share always lies inside its rank's own slice. Everything is arrays over ranks: a plan of
16,384 chips is a few dozen rows of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tutti.cost.memory.rank_state import HolderIndex
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Plan, Stage, Synchronisation, covers
from tutti.schedule.buckets import is_shared

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
ROUNDING = 1e-12  # of a unit's parameters: less than a parameter of any model
ChipNumbers = Callable[[ChipSet], IntArray]  # of each chip; -1 for one that is gone


class Kind(StrEnum):
    """The two kinds of state that shard at different levels."""

    PARAMETERS = "parameters"  # what computes
    OPTIMIZER = "optimizer"  # master copy and moments

    @property
    def shards_from(self) -> int:
        """The shard level from which on it is sharded."""
        return 3 if self is Kind.PARAMETERS else 1


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters of one unit that are cut the same way."""

    pieces: int | None  # into how many tensor parallelism may cut them; None: everybody has all
    experts: int  # of routed experts: how many there are; otherwise 0
    tied: bool  # the table that embedding and head share


def unit_parts(model: ModelSpec, unit: int, tensor_degrees: Iterable[int]) -> dict[Part, int]:
    """Return the parts of a unit with how many parameters each has."""
    common = math.lcm(*tensor_degrees)
    found: dict[Part, int] = {}
    for parameter in model.parameters(unit):
        if parameter.buffer:
            continue
        pieces = parameter.slice_parts if parameter.slice_dim is not None else None
        if pieces is not None and pieces % common == 0:
            pieces = common  # all degrees divide it: cut alike, whatever it is
        shared = parameter.name == "token.weight" and unit == 0 and model.ties_weights
        tied = shared or parameter.tied_to is not None
        part = Part(pieces, parameter.experts, tied)
        # Tied twice (head and prediction heads) is still one table.
        found[part] = parameter.size if tied else found.get(part, 0) + parameter.size
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """What ranks hold of a part: interval m of rank i is lower[i, m] … upper[i, m]."""

    chips: IntArray  # number of each rank's chip
    lower: FloatArray
    upper: FloatArray
    by_expert: bool  # the axis: experts, or else what tensor parallelism cuts

    @property
    def measure(self) -> FloatArray:
        """The fraction of the part that each rank holds."""
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


@dataclass(frozen=True, slots=True, eq=False)
class _Ranks:
    """The ranks of one stage, in rank order."""

    chips: IntArray
    replica: IntArray
    copy: IntArray
    context: FloatArray  # position in context parallelism, and its degree
    context_degree: FloatArray
    tensor: IntArray
    tensor_degree: IntArray

    @classmethod
    def of(cls, stage: Stage, numbers: ChipNumbers) -> _Ranks:
        rows: list[tuple[npt.NDArray[np.generic], ...]] = []
        for index, replica in enumerate(stage.replicas):
            at = np.arange(replica.num_chips)
            inner = at % replica.width
            rows.append(
                (
                    numbers(replica.chips),
                    np.full(at.size, index),
                    at // replica.width,
                    (inner // replica.tp).astype(np.float64),
                    np.full(at.size, float(replica.cp)),
                    inner % replica.tp,
                    np.full(at.size, replica.tp),
                )
            )
        return cls(*(np.concatenate(column) for column in zip(*rows, strict=True)))


class StateLayout:
    """The intervals of every rank of a plan, for one part of one unit at a time."""

    def __init__(self, plan: Plan, numbers: ChipNumbers) -> None:
        self.plan = plan
        self.index = HolderIndex(plan)
        self._ranks = {(p, s): _Ranks.of(stage, numbers) for p, s, stage in plan.stages()}

    @property
    def tensor_degrees(self) -> set[int]:
        """All degrees of tensor parallelism in the plan."""
        return {r.tp for _, _, stage in self.plan.stages() for r in stage.replicas}

    def signature(self, unit: int) -> tuple[object, ...]:
        """Return a key that units share whose states are spread alike."""
        rules = (self.plan.synchronisation_of(unit, kind) for kind in ParameterClass)
        shard = tuple((rule.shard_level, rule.shares) for rule in rules)
        return (id(self.index.of(unit)), shard)

    def holding(self, unit: int, part: Part, kind: Kind, *, without: int | None = None) -> Holding:
        """Return who holds a part of a unit; not the stages that also hold unit `without`."""
        holders = self.index.of(unit)
        spread = part.experts > 0 and any(stage.experts for _, _, stage in holders)
        group = ParameterClass.EXPERT if spread else ParameterClass.DENSE
        rule = self.plan.synchronisation_of(unit, group)
        slices = {
            (p, s): _expert_slices(stage, part.experts)
            if spread
            else _tensor_slices(self._ranks[p, s], part.pieces)
            for p, s, stage in holders
        }
        found: Holding | None = None
        for p, s, stage in holders:
            if without is not None and covers(stage.units, without):
                continue
            sharing = [h for h in holders if rule.shard_level < 2 or h[0] == p]
            lower, upper = slices[p, s]
            if self._level(unit, stage, rule, holders) >= kind.shards_from:
                share = self._shares(rule, sharing, (p, s))
                edges = np.unique(np.concatenate([x for h in sharing for x in slices[h[:2]]]))
                lower, upper = _cells(lower, upper, share, edges)
            else:
                lower, upper = lower[:, None], upper[:, None]
            here = Holding(self._ranks[p, s].chips, lower, upper, spread)
            found = here if found is None else joined(found, here)
        empty = np.zeros((0, 1))
        return found or Holding(np.zeros(0, dtype=np.int64), empty, empty, spread)

    def _level(
        self,
        unit: int,
        stage: Stage,
        rule: Synchronisation,
        holders: tuple[tuple[int, int, Stage], ...],
    ) -> int:
        """Return the level that takes effect: 0 where nobody else holds the same parameters."""
        kind = rule.parameter_class
        if rule.shard_level >= 2 and _copies(stage, kind) < 2:
            return 0
        stages, model = [s for _, _, s in holders], self.plan.model.spec
        return rule.shard_level if is_shared(stages, kind, (unit,), model) else 0

    def _shares(
        self,
        rule: Synchronisation,
        sharing: list[tuple[int, int, Stage]],
        own: tuple[int, int],
    ) -> tuple[FloatArray, FloatArray]:
        """Return each rank's share of its slice, as an interval of [0, 1)."""
        if rule.parameter_class is ParameterClass.EXPERT:
            return _expert_shares(sharing, own)
        given = {(s.pipeline, s.stage, s.replica): float(s.weight) for s in rule.shares}
        total, starts, widths = 0.0, [], []
        for p, s, stage in sharing:
            for r, replica in enumerate(stage.replicas):
                weight = given.get((p, s, r), 0.0) if given else float(replica.width)
                if (p, s) == own:
                    starts.append(total)
                    widths.append(weight)
                total += weight * replica.count
        ranks = self._ranks[own]
        width = np.asarray(widths)[ranks.replica]
        start = np.asarray(starts)[ranks.replica] + width * ranks.copy
        low = (start + width * (ranks.context / ranks.context_degree)) / total
        high = (start + width * ((ranks.context + 1) / ranks.context_degree)) / total
        return low, high


def _copies(stage: Stage, kind: ParameterClass) -> int:
    if kind is ParameterClass.EXPERT:
        return sum(group.count for group in stage.experts)
    return sum(replica.count * replica.cp for replica in stage.replicas)


def _tensor_slices(ranks: _Ranks, pieces: int | None) -> tuple[FloatArray, FloatArray]:
    """Cut whole pieces; with fewer pieces than ranks, neighbours hold the same one."""
    if pieces is None:
        return np.zeros(ranks.tensor.size), np.ones(ranks.tensor.size)
    degree = ranks.tensor_degree
    each = -(-pieces // degree)
    first = np.where(degree > pieces, ranks.tensor * pieces // degree, ranks.tensor * each)
    last = np.where(degree > pieces, first + 1, first + each)
    return np.minimum(first, pieces) / pieces, np.minimum(last, pieces) / pieces


def _expert_slices(stage: Stage, experts: int) -> tuple[FloatArray, FloatArray]:
    first: list[int] = []
    last: list[int] = []
    for group in stage.experts:
        counts = group.experts or (experts // group.chips,) * group.chips
        bounds = [0, *np.cumsum(counts).tolist()]
        first += bounds[:-1] * group.count
        last += bounds[1:] * group.count
    return np.asarray(first) / experts, np.asarray(last) / experts


def _expert_shares(
    sharing: list[tuple[int, int, Stage]], own: tuple[int, int]
) -> tuple[FloatArray, FloatArray]:
    total = sum(group.count for _, _, stage in sharing for group in stage.experts)
    number, found = 0, []
    for p, s, stage in sharing:
        for group in stage.experts:
            if (p, s) == own:
                found.append(np.repeat(np.arange(number, number + group.count), group.chips))
            number += group.count
    at = np.concatenate(found)
    return at / total, (at + 1) / total


def _cells(
    lower: FloatArray, upper: FloatArray, share: tuple[FloatArray, FloatArray], edges: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return a rank's share of each cell of the grid that lies inside its slice."""
    first, last = np.searchsorted(edges, lower), np.searchsorted(edges, upper)
    most = max(1, int((last - first).max()))
    lows, highs = [], []
    for offset in range(most):
        cell = np.minimum(first + offset, len(edges) - 2)
        inside = first + offset < last
        low, width = edges[cell], edges[cell + 1] - edges[cell]
        lows.append(np.where(inside, low + width * share[0], 0.0))
        highs.append(np.where(inside, low + width * share[1], 0.0))
    return np.stack(lows, axis=1), np.stack(highs, axis=1)
