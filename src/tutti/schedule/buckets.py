"""Which units synchronise together: the same buckets on every rank that holds them.

Pipelines may cut the model at different places; a bucket never crosses a cut of any of them, so
that all its holders hold all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.models.parameters import ParameterClass
from tutti.plan.plan import Plan, Stage, Synchronisation, covers


@dataclass(frozen=True, slots=True)
class Bucket:
    """Units whose gradients are reduced, and whose parameters are gathered, in one piece."""

    start: int
    stop: int
    dense: Synchronisation
    expert: Synchronisation | None  # None: experts, if any, are synchronised with the rest
    reduce_dense: bool  # False where a single chip holds each parameter
    reduce_expert: bool
    several_pipelines: bool  # levels 2 and 3 shard inside a pipeline and join at the end

    def rules(self) -> list[tuple[ParameterClass, Synchronisation]]:
        """Return the rules that cost something, by parameter class."""
        found = [(ParameterClass.DENSE, self.dense)] if self.reduce_dense else []
        if self.expert is not None and self.reduce_expert:
            found.append((ParameterClass.EXPERT, self.expert))
        return found


def make_buckets(plan: Plan) -> list[Bucket]:
    """Cut all units into buckets, by rising unit."""
    cuts = {cut for _, _, stage in plan.stages() for span in stage.units for cut in span}
    cuts |= {cut for rule in plan.synchronisation for cut in rule.units}
    cuts |= _offload_cuts(plan)
    first, last = 0, max(stop for _, _, stage in plan.stages() for _, stop in stage.units)
    bounds = sorted({first, last} | {cut for cut in cuts if first < cut < last})
    buckets: list[Bucket] = []
    for low, high in itertools.pairwise(bounds):
        size = plan.synchronisation_of(low).bucket
        buckets += [
            _make_bucket(plan, start, min(start + size, high)) for start in range(low, high, size)
        ]
    return buckets


def _offload_cuts(plan: Plan) -> set[int]:
    """State that some holder keeps on its host must not share a bucket with state that stays."""
    return {
        cut
        for _, _, stage in plan.stages()
        for replica in stage.replicas
        for ranges in (
            replica.offload.parameters,
            replica.offload.gradients,
            replica.offload.optimizer,
        )
        for span in ranges
        for cut in span
    }


def is_shared(holders: Sequence[Stage], kind: ParameterClass) -> bool:
    """Tell whether several chips hold the same parameters, given the stages that hold them."""
    if kind is ParameterClass.EXPERT:
        return sum(group.count for stage in holders for group in stage.experts) > 1
    replicas = [replica for stage in holders for replica in stage.replicas]
    copies = sum(replica.count * replica.cp for replica in replicas)
    return copies > 1 or any(replica.sequence_parallel for replica in replicas)


def _make_bucket(plan: Plan, start: int, stop: int) -> Bucket:
    holders = [stage for _, _, stage in plan.holders(start)]
    has_groups = any(stage.experts for stage in holders)
    return Bucket(
        start=start,
        stop=stop,
        dense=plan.synchronisation_of(start),
        expert=plan.synchronisation_of(start, ParameterClass.EXPERT) if has_groups else None,
        reduce_dense=is_shared(holders, ParameterClass.DENSE),
        reduce_expert=is_shared(holders, ParameterClass.EXPERT),
        several_pipelines=len(plan.pipelines) > 1,
    )


def tied_apart(plan: Plan) -> bool:
    """Tell whether some rank holds only one of the two tied weights."""
    if plan.tied_owner is None:
        return False
    last = max(stop for _, _, stage in plan.stages() for _, stop in stage.units) - 1
    return any(covers(stage.units, 0) != covers(stage.units, last) for _, _, stage in plan.stages())
