"""How many elements of a unit each rank of a stage holds and keeps: `ownership`, counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.models.parameters import Parameter, ParameterClass
from tutti.models.spec import ModelSpec
from tutti.models.tuning import is_narrowed
from tutti.ownership.buckets import Bucket, make_buckets
from tutti.ownership.holders import HolderGroup, IntArray
from tutti.ownership.ownership import Ownership
from tutti.plan.plan import Plan

FloatArray = npt.NDArray[np.float64]
StagePlace = tuple[int, int]  # pipeline, stage


class Elements(NamedTuple):
    """Numbers of elements of one unit and class, by rank of a stage."""

    held: IntArray  # computed with
    trained: IntArray  # of these, with a gradient
    kept: FloatArray  # whose optimizer state lies here: a unit's part of its bucket's
    copied: FloatArray  # of the kept ones, those that the owner of tied weights updates
    narrow: IntArray  # of the held ones, frozen and in few bits


class RankElements:
    """The elements of every rank of a plan, looked up by stage."""

    def __init__(
        self,
        plan: Plan,
        model: ModelSpec,
        buckets: Sequence[Bucket] | None = None,
        known: dict[object, Elements] | None = None,
    ) -> None:
        """`known` are elements of other plans for this model; those found are added to them."""
        self.ownership = Ownership(plan, model)
        self._plan, self._model, self._kinds = plan, model, model.unit_kinds
        every = make_buckets(plan) if buckets is None else buckets
        self._buckets = {unit: b for b in every for unit in range(b.start, b.stop)}
        self._by_unit: dict[tuple[StagePlace, int, ParameterClass], Elements] = {}
        self._found: dict[object, Elements] = {}
        self._lasting = {} if known is None else known
        self._held: dict[object, tuple[IntArray, ...]] = {}

    def bucket(self, unit: int) -> Bucket:
        """Return the bucket that a unit is in."""
        return self._buckets[unit]

    def of(self, place: StagePlace, unit: int, kind: ParameterClass) -> Elements:
        """Return what the ranks of a stage have of a unit's parameters of a class."""
        asked = (place, unit, kind)
        elements = self._by_unit.get(asked)
        if elements is None:
            elements = self._by_unit[asked] = self._of_kind(place, unit, kind)
        return elements

    def _of_kind(self, place: StagePlace, unit: int, kind: ParameterClass) -> Elements:
        """Return the same, made once for units of one kind."""
        bucket = self._buckets[unit]
        units = range(*bucket.span(kind))
        groups = self._groups(bucket, kind)
        kinds = tuple(self._kinds[u] for u in units)
        key = (place, kind, bucket.level(kind), id(groups), self._kinds[unit], kinds)
        if key not in self._found:
            self._found[key] = self._looked_up(place, unit, kind, groups)
        return self._found[key]

    def _looked_up(
        self, place: StagePlace, unit: int, kind: ParameterClass, groups: tuple[HolderGroup, ...]
    ) -> Elements:
        """Return elements as another plan had them, which depend on their holders by value."""
        bucket = self._buckets[unit]
        units = range(*bucket.span(kind))
        copies = any(map(self.ownership.has_copies, units))
        kinds = tuple(self._kinds[u] for u in units)
        stage = self._plan.pipelines[place[0]].stages[place[1]]
        key = (
            place, kind, bucket.level(kind), groups, self._kinds[unit], kinds, stage.num_chips,
            bucket.expert is None, self.ownership.has_copies(0),
            self._plan.tied_owner if copies else None,
        )  # fmt: skip
        if key not in self._lasting:
            self._lasting[key] = self._make(place, unit, kind, groups)
        return self._lasting[key]

    def alike(self, unit: int) -> object:
        """Return a key that units share which travel with units of the same kinds."""
        bucket = self._buckets[unit]
        if bucket.dense_span == bucket.expert_span == (unit, unit + 1):
            return None
        spans = (bucket.dense_span, bucket.expert_span)
        return tuple(tuple(self._kinds[start:stop]) for start, stop in spans)

    def _groups(self, bucket: Bucket, kind: ParameterClass) -> tuple[HolderGroup, ...]:
        rule = bucket.rule(kind)
        return () if rule is None else self.ownership.groups(bucket.start, rule)

    def _make(
        self, place: StagePlace, unit: int, kind: ParameterClass, groups: Sequence[HolderGroup]
    ) -> Elements:
        bucket = self._buckets[unit]
        held, trained, narrow = self._whole(place, unit, kind, groups)
        units = range(*bucket.span(kind))
        whole = not bucket.level(kind) and not any(map(self.ownership.has_copies, units))
        if whole or not trained.any():
            return Elements(held, trained, trained.astype(float), np.zeros(held.size), narrow)
        others = [self._whole(place, u, kind, groups)[1] for u in units]
        kept, copied = self._spans(place, bucket, kind)
        part = trained / np.maximum(1, np.sum(others, axis=0))
        return Elements(held, trained, kept * part, copied * part, narrow)

    def _whole(
        self, place: StagePlace, unit: int, kind: ParameterClass, groups: Sequence[HolderGroup]
    ) -> tuple[IntArray, ...]:
        """Return how many elements each rank computes with, trains, and holds in few bits."""
        key = (place, kind, id(groups), self._kinds[unit])
        if key not in self._held:
            bucket = self._buckets[unit]
            tensors = (p for p in self.ownership.tensors(unit) if bucket.class_of(p) is kind)
            every = [parameter for parameter in tensors if not parameter.buffer]
            trained = [parameter for parameter in every if parameter.trainable]
            here = [group for group in groups if (group.pipeline, group.stage) == place]
            tuning = self._model.tuning
            few = tuning is not None and tuning.base != "wide"
            narrow = [p for p in every if few and is_narrowed(p)]
            lists = (every, trained, narrow)
            self._held[key] = tuple(self._by_rank(place, here, each) for each in lists)
        return self._held[key]

    def _by_rank(
        self, place: StagePlace, groups: Sequence[HolderGroup], parameters: Sequence[Parameter]
    ) -> IntArray:
        """Return the elements of tensors that each rank of a stage's groups holds."""
        if not groups:
            stage = self._plan.pipelines[place[0]].stages[place[1]]
            return np.zeros(stage.num_chips, dtype=np.int64)
        counts = []
        for group in groups:
            slicing = group.slicing
            sizes = [
                sum(slicing.size(parameter, position) for parameter in parameters)
                for position in range(slicing.num_positions)
            ]
            counts.append(np.tile(np.asarray(sizes, dtype=np.int64), group.copies))
        return np.concatenate(counts)

    def _spans(
        self, place: StagePlace, bucket: Bucket, kind: ParameterClass
    ) -> tuple[IntArray, IntArray]:
        """Return how many elements of a bucket each rank keeps, and how many copies are in them."""
        kept = self._by_rank(place, (), ())
        copied = kept.copy()
        first = self.ownership.first_rank(*place)
        for span in self.ownership.kept_spans(bucket, kind, place[0]):
            for ranks, low, high in span.members.intervals(span.size):
                at = ranks - first
                if not 0 <= at[0] < kept.size:
                    continue
                counts = high - low if bucket.level(kind) else span.size
                kept[at] += counts
                if span.copied:
                    copied[at] += counts
        return kept, copied
