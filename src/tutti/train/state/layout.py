"""Who holds which part of which parameter, and so whose gradients are added up. Pure.

Ranks may slice a tensor differently (other tensor-parallel degrees, other experts). Cutting it
wherever any of them cuts gives `Block`s that their holders hold alike. Blocks of a bucket with the
same holders form a `Span`: one flat vector, reduced in one collective and sharded over its
holders in the proportions that the Plan gives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from tutti.models.parameters import Parameter, ParameterClass
from tutti.models.spec import ModelSpec
from tutti.nn.parallel.groups import ParallelContext
from tutti.nn.storage import is_partial, slice_of
from tutti.plan.plan import Synchronisation
from tutti.ranks.rank_places import Seat, Seats
from tutti.schedule.buckets import Bucket

Interval = tuple[int, int]


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


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks with the same holders, as one flat vector."""

    holders: tuple[int, ...]  # ranks, rising
    adders: tuple[int, ...]  # those whose gradients are parts of the sum; the others have copies
    blocks: tuple[Block, ...]
    bounds: tuple[int, ...]  # holder i keeps the elements from bounds[i] to bounds[i + 1]

    @property
    def size(self) -> int:
        """How many numbers."""
        return self.bounds[-1]

    def own(self, rank: int) -> slice:
        """Return the elements that a holder keeps."""
        i = self.holders.index(rank)
        return slice(self.bounds[i], self.bounds[i + 1])

    @property
    def counts(self) -> tuple[int, ...]:
        """How many elements each holder keeps."""
        return tuple(high - low for low, high in itertools.pairwise(self.bounds))


@dataclass(frozen=True, slots=True)
class TensorRule:
    """A logical tensor of a unit; its parameter says how it is sliced, and what adds up."""

    unit: int
    parameter: Parameter


def tensor_rules(spec: ModelSpec, unit: int) -> list[TensorRule]:
    """Return the tensors of a unit; tied ones too."""
    return [TensorRule(unit, parameter) for parameter in spec.parameters(unit)]


def shard_bounds(size: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Cut `size` elements in proportion to the weights; equally where all are zero."""
    total = sum(weights)
    if not total:
        weights, total = [1] * len(weights), len(weights)
    return tuple(size * reached // total for reached in itertools.accumulate(weights, initial=0))


def weight_of(seat: Seat, rule: Synchronisation) -> int:
    """Return the weight with which a holder takes part in ragged shards."""
    if not rule.shares:
        return 1
    place = (seat.place.pipeline, seat.place.stage, seat.place.replica)
    for share in rule.shares:
        if (share.pipeline, share.stage, share.replica) == place:
            return share.weight
    return 0


def adds(rule: TensorRule, seat: Seat) -> bool:
    """Tell whether a holder's gradient is a part of the sum, not a copy of a neighbour's."""
    if seat.tensor.size == 1 or is_partial(rule.parameter, cast(ParallelContext, seat)):
        return True
    return rule.parameter.slice_dim is not None or seat.tensor.rank == 0


def blocks_of(
    rule: TensorRule, seats: Iterable[Seat], pipeline: int | None = None
) -> Iterator[tuple[Block, tuple[Seat, ...]]]:
    """Cut a tensor wherever a holder cuts it; yield each part with its holders (in a pipeline)."""
    held = [(seat, slice_of(rule.parameter, cast(ParallelContext, seat))) for seat in seats]
    cuts = [
        sorted({edge for _, slices in held for edge in (slices[d].start, slices[d].stop)})
        for d in range(len(rule.parameter.shape))
    ]
    for cell in itertools.product(*(itertools.pairwise(edges) for edges in cuts)):
        holders = tuple(
            seat
            for seat, slices in held
            if pipeline in (None, seat.place.pipeline)
            and all(
                own.start <= low and high <= own.stop
                for own, (low, high) in zip(slices, cell, strict=True)
            )
        )
        if holders:
            parameter = rule.parameter
            yield Block(rule.unit, parameter.name, tuple(cell), parameter.decays), holders


def bucket_spans(
    seats: Seats,
    bucket: Bucket,
    kind: ParameterClass,
    rules: Mapping[int, Sequence[TensorRule]],
    *,
    pipeline: int | None = None,
) -> tuple[Span, ...]:
    """Return the spans of a bucket's parameters of one class.

    `rules` are those of the bucket's units. With `pipeline`, only its own holders count: shard
    levels 2 and 3 shard inside a pipeline.
    """
    synchronisation = bucket.dense if kind is ParameterClass.DENSE else bucket.expert
    assert synchronisation is not None, "a bucket without expert groups has no expert rule"
    start, stop = bucket.span(kind)
    grouped: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Block]] = {}
    for unit in range(start, stop):
        holding = list(seats.holding(unit))
        for rule in rules[unit]:
            if of_class(rule.parameter, bucket) is not kind or not rule.parameter.trainable:
                continue
            for block, holders in blocks_of(rule, holding, pipeline):
                adders = tuple(seat.rank for seat in holders if adds(rule, seat))
                key = (tuple(seat.rank for seat in holders), adders)
                grouped.setdefault(key, []).append(block)
    return tuple(
        Span(
            holders,
            adders,
            tuple(blocks),
            shard_bounds(
                sum(block.size for block in blocks),
                [weight_of(seats[rank], synchronisation) for rank in holders],
            ),
        )
        for (holders, adders), blocks in grouped.items()
    )


def of_class(parameter: Parameter, bucket: Bucket) -> ParameterClass:
    """Return with which class a parameter travels: experts with the rest where they are whole."""
    return ParameterClass.DENSE if bucket.expert is None else parameter.group
