"""Edits of a Plan that leave everything else as it stands: other units, replicas, rules.

A stage that is given other units treats new blocks as it treats the nearest block that it had; what
it no longer holds is forgotten. Nothing here asks whether a plan is valid or good.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.plan import (
    ExpertGroup,
    Offload,
    Order,
    Pipeline,
    Plan,
    Recompute,
    Replica,
    Stage,
    UnitRanges,
    chunks,
    covers,
)

MOST_DIGITS = 4  # of relative times


def with_pipeline(plan: Plan, index: int, pipeline: Pipeline) -> Plan:
    """Return the plan with another pipeline at a place."""
    pipelines = list(plan.pipelines)
    pipelines[index] = pipeline
    return replace(plan, pipelines=tuple(pipelines))


def with_stage(plan: Plan, p: int, s: int, stage: Stage) -> Plan:
    """Return the plan with another stage at a place."""
    stages = list(plan.pipelines[p].stages)
    stages[s] = stage
    return with_pipeline(plan, p, replace(plan.pipelines[p], stages=tuple(stages)))


def with_replica(plan: Plan, place: tuple[int, int, int], replica: Replica) -> Plan:
    """Return the plan with another replica group at a place."""
    p, s, r = place
    stage = plan.pipelines[p].stages[s]
    replicas = list(stage.replicas)
    replicas[r] = replica
    return with_stage(plan, p, s, replace(stage, replicas=tuple(replicas)))


def each_replica(stage: Stage, change: Callable[[Replica], Replica]) -> Stage:
    """Return the stage with every replica group changed."""
    return replace(stage, replicas=tuple(change(replica) for replica in stage.replicas))


def ranges_of(units: Iterable[int], inside: UnitRanges) -> UnitRanges:
    """Return units as ranges that stay within some others."""
    wanted = sorted(set(units))
    ranges: list[tuple[int, int]] = []
    for start, stop in sorted(inside):
        for unit in (u for u in wanted if start <= u < stop):
            if ranges and ranges[-1][1] == unit and ranges[-1][0] >= start:
                ranges[-1] = (ranges[-1][0], unit + 1)
            else:
                ranges.append((unit, unit + 1))
    return tuple(ranges)


def units_of(ranges: UnitRanges) -> list[int]:
    """Return all units of some ranges."""
    return [unit for start, stop in ranges for unit in range(start, stop)]


def _carried(named: UnitRanges, old: UnitRanges, new: UnitRanges, model: ModelSpec) -> UnitRanges:
    """Return what a list of units becomes when the stage holds others."""
    if not named:
        return ()
    blocks = [unit for unit in units_of(old) if 1 <= unit <= model.num_layers]
    kept: list[int] = []
    for unit in units_of(new):
        if covers(old, unit):
            nearest = unit
        elif blocks and 1 <= unit <= model.num_layers:
            nearest = min(blocks, key=lambda known: abs(known - unit))
        else:
            continue
        if covers(named, nearest):
            kept.append(unit)
    return ranges_of(kept, new)


def with_units(stage: Stage, units: UnitRanges, model: ModelSpec, ep: int) -> Stage:
    """Return the stage with other units; `ep` chips share experts where it has some."""

    def change(replica: Replica) -> Replica:
        def carry(named: UnitRanges) -> UnitRanges:
            return _carried(named, stage.units, units, model)

        recompute, offload = replica.recompute, replica.offload
        return replace(
            replica,
            recompute=Recompute(full=carry(recompute.full), selective=carry(recompute.selective)),
            offload=Offload(
                optimizer=carry(offload.optimizer),
                parameters=carry(offload.parameters),
                gradients=carry(offload.gradients),
                activations=carry(offload.activations),
            ),
        )

    held = sum(stop - start for start, stop in units)
    changed = replace(each_replica(stage, change), units=units)
    changed = replace(changed, order=_scaled(stage.order, held / max(1, stage.num_units)))
    spread = any(
        model.block(unit).moe is not None
        for unit in units_of(units)
        if 1 <= unit <= model.num_layers
    )
    if not spread or ep == 1:
        return replace(changed, experts=())
    if stage.experts:
        return changed
    return replace(changed, experts=(ExpertGroup(chips=ep, count=max(1, stage.num_chips // ep)),))


def _scaled(order: Order, factor: float) -> Order:
    """Return the times of a stage that has more or fewer units."""

    def scaled(value: float) -> float:
        return float(f"{max(value * factor, 1e-6):.{MOST_DIGITS}g}")

    return replace(
        order,
        forward=scaled(order.forward),
        backward_input=scaled(order.backward_input),
        backward_weight=scaled(order.backward_weight),
    )


def expert_width(plan: Plan) -> int:
    """Return over how many chips experts are spread; 1 where they are not."""
    return next((stage.experts[0].chips for _, _, stage in plan.stages() if stage.experts), 1)


def recut(
    plan: Plan,
    p: int,
    sizes: Sequence[int],
    model: ModelSpec,
    stages: Sequence[Stage] | None = None,
) -> Plan | None:
    """Return the plan with the ranges of one pipeline, along its path, of other sizes.

    `stages` are those of the pipeline in another order. None where a range would be empty.
    """
    if min(sizes) < 1:
        return None
    pipeline = plan.pipelines[p]
    given = pipeline.stages if stages is None else tuple(stages)
    bounds = [0, *itertools.accumulate(sizes)]
    own: list[list[tuple[int, int]]] = [[] for _ in given]
    for index, span in enumerate(itertools.pairwise(bounds)):
        own[index % len(given)].append(span)
    ep = expert_width(plan)
    cut = tuple(
        with_units(stage, tuple(spans), model, ep) for stage, spans in zip(given, own, strict=True)
    )
    return with_pipeline(plan, p, replace(pipeline, stages=cut))


def sizes_of(pipeline: Pipeline) -> list[int]:
    """Return how many units the ranges of a pipeline have, along its path."""
    return [chunk.stop - chunk.start for chunk in chunks(pipeline)]


def resized(pipeline: Pipeline, factor: int, *, larger: bool) -> Pipeline | None:
    """Return the pipeline with micro-batches `factor` times as large, or as small; None: no way."""
    shares = [r.sequences for stage in pipeline.stages for r in stage.replicas]
    divided = [pipeline.micro_batches] if larger else shares
    if any(count % factor for count in divided):
        return None

    def scaled(replica: Replica) -> Replica:
        sequences = replica.sequences
        return replace(replica, sequences=sequences * factor if larger else sequences // factor)

    size, count = pipeline.micro_batch, pipeline.micro_batches
    return replace(
        pipeline,
        micro_batch=size * factor if larger else size // factor,
        micro_batches=count // factor if larger else count * factor,
        stages=tuple(each_replica(stage, scaled) for stage in pipeline.stages),
    )


def stage_of_size(stage: Stage, size: int) -> Stage | None:
    """Return the stage with `size` sequences a micro-batch; None: fewer than copies.

    Replica groups take it in proportion; one whose copies cannot take equally much becomes two.
    """
    total = sum(replica.count * replica.sequences for replica in stage.replicas)
    shares = [replica.sequences * size / total for replica in stage.replicas]
    whole = [max(1, math.floor(share + 1e-9)) for share in shares]
    left = size - sum(r.count * n for r, n in zip(stage.replicas, whole, strict=True))
    if left < 0:
        return None
    more = [0] * len(whole)  # copies of a group that take one sequence more
    order = sorted(range(len(whole)), key=lambda i: (whole[i] - shares[i], i))
    while left:
        for i in order:
            more[i] = min(left, stage.replicas[i].count)
            left -= more[i]
            if more[i] == stage.replicas[i].count:
                whole[i] += 1
                more[i] = 0
            if not left:
                break
    replicas: list[Replica] = []
    for replica, sequences, few in zip(stage.replicas, whole, more, strict=True):
        for part in copies_divided(replica, few, sequences + 1, sequences):
            last = replicas[-1] if replicas else part
            joined = ChipSet.join((last.chips, part.chips))
            alike = replace(part, chips=last.chips, count=last.count) == last
            if last is not part and alike and len(joined.pools) == 1:
                replicas[-1] = replace(part, chips=joined, count=last.count + part.count)
            else:
                replicas.append(part)
    return replace(stage, replicas=tuple(replicas))


def copies_divided(replica: Replica, few: int, more: int, less: int) -> Iterator[Replica]:
    """Yield a group whose first few copies take more sequences than the others."""
    cut = few * replica.width
    if few:
        chips = replica.chips.cut(0, cut)
        yield replace(replica, count=few, sequences=more, chips=chips)
    chips = replica.chips.cut(cut, replica.num_chips)
    yield replace(replica, count=replica.count - few, sequences=less, chips=chips)


def pipeline_of_size(pipeline: Pipeline, size: int, count: int) -> Pipeline | None:
    """Return the pipeline with other micro-batches; None where a stage has too many copies."""
    stages = [stage_of_size(stage, size) for stage in pipeline.stages]
    if size < 1 or count < 1 or None in stages:
        return None
    taken = tuple(stage for stage in stages if stage is not None)
    return replace(pipeline, micro_batch=size, micro_batches=count, stages=taken)


def ways_to_take(pipeline: Pipeline, sequences: int, most: int = 2) -> Iterator[Pipeline]:
    """Yield the pipeline with so many sequences: by the sizes that come nearest to its own."""
    if sequences < 1:
        return
    now = math.log(pipeline.micro_batch)
    known = 0
    for size in sorted(divisors(sequences), key=lambda n: (abs(math.log(n) - now), n)):
        changed = pipeline_of_size(pipeline, size, sequences // size)
        if changed is not None:
            yield changed
            known += 1
        if known == most:
            return


def divisors(number: int) -> list[int]:
    """Return all divisors of a number."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def without_shares(plan: Plan) -> Plan:
    """Return the plan whose shards are equal: replica groups have other numbers now."""
    rules = tuple(replace(rule, shares=()) for rule in plan.synchronisation)
    return replace(plan, synchronisation=rules)
