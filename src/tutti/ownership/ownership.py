"""Who holds which part of which parameter, and which elements of it each holder keeps.

The one answer to this question: prices, re-planning, the engine and checkpoints read it here.

Ranks may slice a tensor differently (other tensor-parallel degrees, other experts). Cutting it
wherever any of them cuts gives cells that their holders hold alike. Cells of a bucket with the same
holders form a `Span`: one flat vector, reduced in one collective. Where the Plan shards, each
holder keeps an interval of it: a copy of a replica has the weight that the Plan gives it (without
one, its number of chips: all ranks keep equally much), and the ranks of a copy that hold the same
cell divide that evenly.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tutti.models.parameters import Interval, Parameter, ParameterClass
from tutti.models.spec import ModelSpec
from tutti.ownership.buckets import Bucket, tied_apart
from tutti.ownership.holders import Cell, HolderGroup, Holders, Slicing, cells
from tutti.plan.plan import Plan, RankMap, Stage, Synchronisation


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a logical tensor, as intervals of its dimensions."""

    unit: int
    name: str  # without the unit
    intervals: tuple[Interval, ...]
    decays: bool = field(default=True, compare=False)  # whether weight decay is meant for it

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extent."""
        return tuple(stop - start for start, stop in self.intervals)

    @property
    def size(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Span:
    """Blocks with the same holders, as one flat vector."""

    members: Holders
    adding: Holders  # those whose gradients are parts of the sum; the others have copies
    blocks: tuple[Block, ...]
    copied: bool = False  # from the owner of tied weights, who updates them

    @functools.cached_property
    def size(self) -> int:
        """How many numbers."""
        return sum(block.size for block in self.blocks)

    @functools.cached_property
    def holders(self) -> tuple[int, ...]:
        """Its ranks, rising."""
        return self.members.ranks()

    @functools.cached_property
    def bounds(self) -> tuple[int, ...]:
        """Holder i keeps the elements from bounds[i] to bounds[i + 1]."""
        return self.members.bounds(self.size)

    def own(self, rank: int) -> slice:
        """Return the elements that a holder keeps."""
        bounds = self.members.own(rank, self.size)
        assert bounds is not None, f"rank {rank} holds nothing of the span"
        return slice(*bounds)

    def is_held_by(self, rank: int) -> bool:
        """Tell whether a rank is a holder."""
        return any(run.find(rank) is not None for run in self.members.runs)

    def is_added_by(self, rank: int) -> bool:
        """Tell whether a rank's gradient is a part of the sum."""
        return any(run.find(rank) is not None for run in self.adding.runs)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many elements each holder keeps."""
        return tuple(high - low for low, high in itertools.pairwise(self.bounds))


class Ownership:
    """Who holds what under a Plan; everything is looked up once."""

    def __init__(self, plan: Plan, model: ModelSpec) -> None:
        self.plan, self.model = plan, model
        self._map = RankMap(plan)
        self._apart = tied_apart(plan)
        self._groups: dict[object, tuple[HolderGroup, ...]] = {}
        self._spans: dict[object, tuple[Span, ...]] = {}

    # --- tensors ---------------------------------------------------------------------------

    def tensors(self, unit: int) -> Iterator[Parameter]:
        """Yield the tensors of a unit that are parameters of their own.

        The second of tied ones is not, unless some stage holds only one of them.
        """
        return (p for p in self.model.parameters(unit) if self._apart or p.tied_to is None)

    def has_copies(self, unit: int) -> bool:
        """Tell whether a unit has a tied tensor whose owner is another one."""
        return self._apart and unit in (0, self.model.head_unit)

    def is_copied(self, unit: int, parameter: Parameter) -> bool:
        """Tell whether a tied tensor's owner is another unit, which updates it."""
        if not self._apart:
            return False
        ends = tied_ends(self.model)
        owner = next(end for end in ends if end[0] == self.plan.tied_owner)
        return (unit, parameter.name) in ends and (unit, parameter.name) != owner

    def first_rank(self, pipeline: int, stage: int) -> int:
        """Return the rank of a stage's first chip."""
        return self._map.first_rank(pipeline, stage)

    # --- holders ---------------------------------------------------------------------------

    def groups(self, unit: int, rule: Synchronisation) -> tuple[HolderGroup, ...]:
        """Return who holds the parameters of a unit that a rule speaks of, in rank order."""
        holders = tuple(self.plan.holders(unit))
        key = (tuple((p, s) for p, s, _ in holders), rule.parameter_class, rule.shares)
        if key not in self._groups:
            self._groups[key] = tuple(
                group for p, s, stage in holders for group in self._of_stage(p, s, stage, rule)
            )
        return self._groups[key]

    def _of_stage(
        self, p: int, s: int, stage: Stage, rule: Synchronisation
    ) -> Iterator[HolderGroup]:
        first, number = self._map.first_rank(p, s), self.model.num_experts
        spread = bool(stage.experts) and number > 0
        if spread and rule.parameter_class is ParameterClass.EXPERT:
            for group in stage.experts:
                slicing = Slicing(spread=True, experts=group.per_chip(number))
                yield HolderGroup(p, s, first, group.count, slicing, 1, 1)
                first += group.count * group.chips
            return
        given = {
            (share.pipeline, share.stage, share.replica): share.weight for share in rule.shares
        }
        dense = rule.parameter_class is ParameterClass.DENSE
        for r, replica in enumerate(stage.replicas):
            weight = given.get((p, s, r), 0) if given else replica.width if dense else 1
            sequence_parallel = replica.sequence_parallel and replica.tp > 1
            slicing = Slicing(replica.tp, sequence_parallel, spread)
            copies = replica.count * replica.cp
            yield HolderGroup(p, s, first, copies, slicing, weight, replica.cp)
            first += replica.num_chips

    # --- spans -----------------------------------------------------------------------------

    def spans(
        self, bucket: Bucket, kind: ParameterClass, pipeline: int | None = None
    ) -> tuple[Span, ...]:
        """Return the spans of a bucket's parameters of one class.

        With `pipeline`, only its own holders count: levels 2 and 3 shard inside a pipeline.
        """
        start, stop = bucket.span(kind)
        key = (start, stop, kind, pipeline)
        if key not in self._spans:
            self._spans[key] = tuple(self._make_spans(bucket, kind, pipeline))
        return self._spans[key]

    def kept_spans(self, bucket: Bucket, kind: ParameterClass, pipeline: int) -> tuple[Span, ...]:
        """Return the spans that ranks of a pipeline keep intervals of, as the level says."""
        return self.spans(bucket, kind, pipeline if bucket.level(kind) >= 2 else None)

    def by_pipeline(self, bucket: Bucket, kind: ParameterClass) -> list[tuple[Span, ...]]:
        """Return the spans of each pipeline by itself: their shards overlap."""
        return [self.spans(bucket, kind, p) for p in range(len(self.plan.pipelines))]

    def _make_spans(
        self, bucket: Bucket, kind: ParameterClass, pipeline: int | None
    ) -> Iterator[Span]:
        rule = bucket.rule(kind)
        assert rule is not None, "a bucket without expert groups has no expert rule"
        units = range(*bucket.span(kind))
        tensors = [(unit, p) for unit in units for p in self.trained(unit, kind, bucket)]
        return self._joined(tensors, self.groups(units.start, rule), pipeline)

    def untrained(self, unit: int) -> Iterator[Span]:
        """Yield the parts of a unit's tensors that no optimizer moves, a block each.

        A router's correction, and what the job has frozen.
        """
        spread = any(stage.experts for _, _, stage in self.plan.holders(unit))
        for parameter in self.tensors(unit):
            if not parameter.trainable:
                kind = parameter.group if spread else ParameterClass.DENSE
                groups = self.groups(unit, self.plan.synchronisation_of(unit, kind))
                for span in self._joined([(unit, parameter)], groups, None):
                    yield from (replace(span, blocks=(block,)) for block in span.blocks)

    def _joined(
        self,
        tensors: Iterable[tuple[int, Parameter]],
        every: Sequence[HolderGroup],
        pipeline: int | None,
    ) -> Iterator[Span]:
        """Join the cells of some tensors that the same ranks (of a pipeline) hold."""
        groups = [group for group in every if pipeline in (None, group.pipeline)]
        slicings = tuple(dict.fromkeys(group.slicing for group in every))
        number = {slicing: k for k, slicing in enumerate(slicings)}
        places = [number[group.slicing] for group in groups]
        grouped: dict[object, tuple[Cell, bool, list[Block]]] = {}
        for unit, parameter in tensors:
            copied = self.is_copied(unit, parameter)
            for cell in cells(parameter, slicings):
                held = tuple(cell.holders[k] for k in places)
                if not any(held):
                    continue
                same = (held, tuple(cell.adders[k] for k in places), copied)
                block = Block(unit, parameter.name, cell.intervals, parameter.decays)
                grouped.setdefault(same, (cell, copied, []))[2].append(block)
        for cell, copied, blocks in grouped.values():
            holders, adders = (
                Holders.of(groups, [at[k] for k in places]) for at in (cell.holders, cell.adders)
            )
            yield Span(holders, adders, tuple(blocks), copied)

    def trained(self, unit: int, kind: ParameterClass, bucket: Bucket) -> Iterator[Parameter]:
        """Yield the tensors of a unit that travel with a class; experts with the rest if whole."""
        for parameter in self.tensors(unit):
            if parameter.trainable and bucket.class_of(parameter) is kind:
                yield parameter


Name = tuple[int, str]  # unit and name in it


@functools.lru_cache(maxsize=256)
def tied_ends(model: ModelSpec) -> tuple[Name, ...]:
    """Return all ends of the tied embedding, the embedding's own first."""
    ends: list[Name] = [(0, "token.weight")]
    if model.head.tied:
        ends.append((model.head_unit, "logits.weight"))
    if model.prediction_heads:
        ends.append((model.head_unit, "prediction.token.weight"))
    return tuple(ends)
