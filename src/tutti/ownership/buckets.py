"""Which units synchronise together: the same buckets on every rank that holds them.

Pipelines may cut the model at different places; a bucket never crosses a cut of any of them, so
that all its holders hold all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tutti.models.parameters import Parameter, ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.plan import Plan, Stage, Synchronisation, covers

Span = tuple[int, int]  # half-open units


@dataclass(frozen=True, slots=True)
class Bucket:
    """Units that are updated in one piece.

    Their gradients are reduced, and their parameters gathered, in one piece too, per parameter
    class; where the rules of the classes say different sizes, with their neighbours' (the spans).
    """

    start: int
    stop: int
    dense: Synchronisation
    dense_span: Span
    expert: Synchronisation | None  # None: experts, if any, are synchronised with the rest
    expert_span: Span
    reduce_dense: bool  # False where nobody else has a part of the gradients
    reduce_expert: bool
    several_pipelines: bool  # levels 2 and 3 shard inside a pipeline and join at the end

    def span(self, kind: ParameterClass) -> Span:
        """Return the units that travel together with these."""
        return self.dense_span if kind is ParameterClass.DENSE else self.expert_span

    def is_first(self, kind: ParameterClass) -> bool:
        """Tell whether forward enters, and backward leaves, what travels together here."""
        return self.start == self.span(kind)[0]

    def is_last(self, kind: ParameterClass) -> bool:
        """Tell whether backward enters what travels together here."""
        return self.stop == self.span(kind)[1]

    def rule(self, kind: ParameterClass) -> Synchronisation | None:
        """Return the rule of a class; None: nothing travels as it."""
        return self.dense if kind is ParameterClass.DENSE else self.expert

    def class_of(self, parameter: Parameter) -> ParameterClass:
        """Return with which class a parameter travels; experts that are whole, with the rest."""
        return ParameterClass.DENSE if self.expert is None else parameter.group

    def level(self, kind: ParameterClass) -> int:
        """Return the shard level of a class; 0 where nobody else has a part of its gradients."""
        return next((rule.shard_level for own, rule in self.rules() if own is kind), 0)

    def rules(self) -> list[tuple[ParameterClass, Synchronisation]]:
        """Return the rules that cost something, by parameter class."""
        rules = [(ParameterClass.DENSE, self.dense)] if self.reduce_dense else []
        if self.expert is not None and self.reduce_expert:
            rules.append((ParameterClass.EXPERT, self.expert))
        return rules


def make_buckets(plan: Plan) -> list[Bucket]:
    """Cut all units into buckets, by rising unit."""
    cuts = {cut for _, _, stage in plan.stages() for span in stage.units for cut in span}
    cuts |= {cut for rule in plan.synchronisation for cut in rule.units}
    hosts = _offload_cuts(plan)
    cuts |= hosts
    first, last = 0, max(stop for _, _, stage in plan.stages() for _, stop in stage.units)
    bounds = sorted({first, last} | {cut for cut in cuts if first < cut < last})
    return [
        bucket
        for low, high in itertools.pairwise(bounds)
        for bucket in _between(plan, low, high, joins=not hosts)
    ]


def _between(plan: Plan, low: int, high: int, *, joins: bool) -> Iterator[Bucket]:
    """Cut the units between two cuts by the sizes of both classes' rules.

    State on the host comes and goes by bucket; then (not `joins`) every piece travels alone.
    """
    sizes = [plan.synchronisation_of(low).bucket]
    if any(stage.experts for _, _, stage in plan.holders(low)):
        sizes.append(plan.synchronisation_of(low, ParameterClass.EXPERT).bucket)
    cuts = sorted({cut for size in sizes for cut in range(low, high, size)} | {high})
    for start, stop in itertools.pairwise(cuts):
        spans = [(start, stop)] * 2
        if joins:
            firsts = [start - (start - low) % size for size in sizes]
            both = zip(firsts, sizes, strict=True)
            spans = [(first, min(first + size, high)) for first, size in both]
        yield _make_bucket(plan, start, stop, spans[0], spans[-1])


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


def is_shared(
    holders: Sequence[Stage], kind: ParameterClass, units: Iterable[int], model: ModelSpec | None
) -> bool:
    """Tell whether gradients of some units are to be added up over several chips.

    `holders` are the stages that hold the units. Copies of a replica add all of them up;
    tensor-parallel ranks those of tensors that they hold alike and of whose gradients each has a
    part. Of a plan that does not embed its model, any tensor may be one.
    """
    if kind is ParameterClass.EXPERT:
        return sum(group.count for stage in holders for group in stage.experts) > 1
    if sum(r.count * r.cp for stage in holders for r in stage.replicas) > 1:
        return True
    ways = {
        (replica.tp, replica.sequence_parallel, bool(stage.experts))
        for stage in holders
        for replica in stage.replicas
        if replica.tp > 1
    }
    if model is None:
        return bool(ways)
    return any(has_partial(model, unit, *way) for way in ways for unit in units)


def has_partial(
    model: ModelSpec, unit: int, tp: int, sequence_parallel: bool, spread: bool
) -> bool:
    """Tell whether tensor-parallel ranks add up gradients of a unit's dense parameters."""
    return any(
        p.is_partial(tp=tp, sequence_parallel=sequence_parallel, spread=spread)
        for p in model.parameters(unit)
        if p.trainable and not (spread and p.experts)
    )


def _make_bucket(plan: Plan, start: int, stop: int, dense: Span, expert: Span) -> Bucket:
    holders = [stage for _, _, stage in plan.holders(start)]
    has_groups = any(stage.experts for stage in holders)
    return Bucket(
        start=start,
        stop=stop,
        dense=plan.synchronisation_of(start),
        dense_span=dense,
        expert=plan.synchronisation_of(start, ParameterClass.EXPERT) if has_groups else None,
        expert_span=expert,
        reduce_dense=is_shared(holders, ParameterClass.DENSE, range(*dense), plan.model.spec),
        reduce_expert=is_shared(holders, ParameterClass.EXPERT, range(*expert), plan.model.spec),
        several_pipelines=len(plan.pipelines) > 1,
    )


def tied_apart(plan: Plan) -> bool:
    """Tell whether some rank holds only one of the two tied weights."""
    if plan.tied_owner is None:
        return False
    last = max(stop for _, _, stage in plan.stages() for _, stop in stage.units) - 1
    return any(covers(stage.units, 0) != covers(stage.units, last) for _, _, stage in plan.stages())
