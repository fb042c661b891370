"""The part of the static check that looks at what a Plan asks for besides passes and messages.

Every class recomputes, fetches, gathers, reduces and updates exactly what its Plan says, as often
as it says, and whatever brings something is waited for by what uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tutti.models.parameters import ParameterClass
from tutti.ownership.buckets import Bucket, make_buckets, tied_apart
from tutti.plan.plan import Offload, Plan, Replica, Stage, UnitRanges, covers
from tutti.schedule.columns import Columns
from tutti.schedule.instruction import Instruction, Op, Scope, What
from tutti.schedule.listing import listing_of

Duty = tuple[Op, What, Scope, int]  # of one unit

_CLASS = {ParameterClass.DENSE: What.DENSE, ParameterClass.EXPERT: What.EXPERT}
_BRINGS = (Op.GATHER_PARAMETERS, Op.FETCH, Op.RECEIVE)
_COUNTED = (
    Op.RECOMPUTE,
    Op.STEP,
    Op.GATHER_PARAMETERS,
    Op.REDUCE_GRADIENTS,
    Op.FETCH,
    Op.OFFLOAD,
)


@dataclass(frozen=True, slots=True)
class DutyRules:
    """What all classes of a plan are held against."""

    buckets: list[Bucket]
    tied_ends: tuple[int, ...]  # the units of tied weights that lie apart

    @classmethod
    def of(cls, plan: Plan) -> DutyRules:
        """Look the rules of a plan up once."""
        last = max(stop for _, _, stage in plan.stages() for _, stop in stage.units) - 1
        return cls(make_buckets(plan), (0, last) if tied_apart(plan) else ())


def check_duties(
    rules: DutyRules,
    stage: Stage,
    replica: Replica,
    micro_batches: int,
    entries: Sequence[Instruction],
    columns: Columns,
) -> Iterator[str]:
    """Yield what a list leaves out, does too often, or does not wait for."""
    yield from _counts(stage, replica, micro_batches, rules.buckets, entries)
    yield from _closing(rules, stage, entries, columns)
    if columns.is_waited_for():
        return
    waited = {index for entry in entries for index in entry.after}
    for index, entry in enumerate(entries):
        if entry.op in _BRINGS and index not in waited:
            yield f"nothing waits for {entry}"


def _counts(
    stage: Stage,
    replica: Replica,
    micro_batches: int,
    buckets: list[Bucket],
    entries: Sequence[Instruction],
) -> Iterator[str]:
    counts: Counter[Duty] = Counter()
    listing = listing_of(entries)
    times = np.bincount(listing.kinds[1], minlength=len(listing.examples)).tolist()
    for (op, _, start, stop, what, scope, _), count in zip(listing.examples, times, strict=True):
        if op not in _COUNTED or what is What.BATCH:
            continue
        for unit in range(start, stop):
            counts[op, what, scope, unit] += count
    expected = _expected(stage, replica, micro_batches, buckets)
    for duty in sorted(expected.keys() | counts.keys()):
        if expected[duty] != counts[duty]:
            op, what, scope, unit = duty
            kind = f"{op} {what}".strip() + (f" ({scope})" if op is Op.REDUCE_GRADIENTS else "")
            yield f"{kind} of unit {unit} stands {counts[duty]} times, not {expected[duty]}"
            return


def _expected(
    stage: Stage, replica: Replica, micro_batches: int, buckets: list[Bucket]
) -> Counter[Duty]:
    wanted: Counter[Duty] = Counter()
    recompute = (*replica.recompute.full, *replica.recompute.selective)
    for bucket in (b for b in buckets if covers(stage.units, b.start)):
        for unit in range(bucket.start, bucket.stop):
            wanted[Op.STEP, What.NOTHING, Scope.ALL, unit] += 1
            if covers(recompute, unit):
                wanted[Op.RECOMPUTE, What.NOTHING, Scope.ALL, unit] += micro_batches
            for duty, times in _state(bucket, replica.offload, unit, micro_batches):
                wanted[(*duty, unit)] += times
    return wanted


Times = tuple[tuple[Op, What, Scope], int]


def _state(bucket: Bucket, offload: Offload, unit: int, many: int) -> Iterator[Times]:
    """Gathers, reductions and copies of one unit's state."""
    closes = False
    for kind, rule in bucket.rules():
        what, level = _CLASS[kind], rule.shard_level
        inside = Scope.ALL if level == 1 else Scope.PIPELINE
        if level:
            yield (Op.GATHER_PARAMETERS, what, inside), 2 * many if level == 3 else 1
        if level >= 2:
            yield (Op.REDUCE_GRADIENTS, what, Scope.PIPELINE), many
        if level < 2 or bucket.several_pipelines:
            closes = True
            yield (Op.REDUCE_GRADIENTS, what, Scope.ALL), 1

    def on_host(
        ranges: UnitRanges, what: What, fetches: int, stores: int
    ) -> Iterator[tuple[tuple[Op, What, Scope], int]]:
        if covers(ranges, unit):
            yield (Op.FETCH, what, Scope.ALL), fetches
            yield (Op.OFFLOAD, what, Scope.ALL), stores

    yield from on_host(offload.activations, What.ACTIVATIONS, many, many)
    yield from on_host(offload.parameters, What.PARAMETERS, 2 * many, 1)
    yield from on_host(offload.optimizer, What.OPTIMIZER, 1, 1)
    again = int(closes and many > 1)  # the sum so far comes back to be reduced
    yield from on_host(offload.gradients, What.GRADIENTS, 1 + again, many)


def _closing(
    rules: DutyRules, stage: Stage, entries: Sequence[Instruction], columns: Columns
) -> Iterator[str]:
    """Check the order that ends a step: reductions, tied weights, norm, optimizer."""
    norms = columns.where(Op.CLIP_NORM).tolist()
    if len(norms) != 1:
        yield f"ClipNorm stands {len(norms)} times, not once"
        return
    before = set(entries[norms[0]].after)
    tied = any(covers(stage.units, unit) for unit in rules.tied_ends)
    tied_gradients = [
        i for i in columns.where(Op.SYNC_TIED).tolist() if entries[i].what is What.GRADIENTS
    ]
    if len(tied_gradients) != int(tied):
        yield f"SyncTied stands {len(tied_gradients)} times, not {int(tied)}"
    for index in columns.where(Op.REDUCE_GRADIENTS).tolist():
        if index not in before:
            yield f"ClipNorm does not wait for {entries[index]}"
            return
    for index in columns.where(Op.STEP).tolist():
        if norms[0] not in entries[index].after:
            yield f"{entries[index]} does not wait for ClipNorm"
            return
    if any(index not in before for index in tied_gradients):
        yield "ClipNorm does not wait for SyncTied"
