"""Moves of a local search over Plans: what concerns pipelines, rules and the whole plan.

A move is a plan that differs in one field, or in fields that only make sense together. Moves come
in kinds; the most likely ones of a kind come first. Whether a plan is valid, fits and is in the
space is asked later.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tutti.hardware.chip import Dtype
from tutti.models.parameters import ParameterClass
from tutti.plan.edits import (
    expert_width,
    ranges_of,
    recut,
    resized,
    sizes_of,
    units_of,
    with_pipeline,
    with_stage,
)
from tutti.plan.plan import ExpertGroup, Pipeline, Plan, Synchronisation
from tutti.plan.schedules import schedule_record, warm_up_depth
from tutti.search.improve.stage_loads import Loads
from tutti.search.question.space import Problem
from tutti.search.thresholds import THRESHOLDS

BUCKETS = (2, 4, 8, 1024)  # units that travel together; the last: all of a range
DEEPER = (2.0, 1.5, 3.0, 4.0, 0.5)  # times the warm-up depths


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """Where a local search stands."""

    problem: Problem
    plan: Plan
    loads: Loads  # what its stages compute, by the last simulation


Moves = Iterator[Plan | None]


def unit_moves(here: Here) -> Moves:
    """Hand units from a range to another, from slow stages to fast ones first."""
    model, plan = here.problem.model, here.plan
    if not here.problem.space.uneven_units:
        return
    handovers = [
        move for p, pipeline in enumerate(plan.pipelines) for move in _handovers(here, p, pipeline)
    ]
    handovers.sort(key=operator.itemgetter(0))
    for _, p, giving, taking, jump in handovers:
        moved = list(sizes_of(plan.pipelines[p]))
        moved[giving] -= jump
        moved[taking] += jump
        yield recut(plan, p, moved, model)


# What comes first, then: pipeline, giving range, taking range, units.
_Handover = tuple[tuple[int, bool, float], int, int, int, int]


def _handovers(here: Here, p: int, pipeline: Pipeline) -> Iterator[_Handover]:
    """Yield which units a pipeline may hand over; a unit between two stages comes before more.

    Between two stages with several ranges many pairs do nearly the same: one by one. What only
    makes the busiest stage busier comes after all others of its turn, and may still help: who is
    busy is not all that a step waits for.
    """
    sizes, count = sizes_of(pipeline), len(pipeline.stages)
    near = len(sizes) if len(sizes) <= THRESHOLDS.short_path else THRESHOLDS.far_ranges
    pairs = [
        (a, b)
        for a, b in itertools.permutations(range(len(sizes)), 2)
        if abs(a - b) <= near and sizes[a] > 1
    ]
    turns: Counter[tuple[int, int]] = Counter()
    for a, b in sorted(pairs, key=lambda pair: (abs(pair[0] - pair[1]), pair)):
        stages = (a % count, b % count)
        unlikely = not here.loads.may_pay(p, *stages, here.plan)
        promise = here.loads.promise(p, *stages)
        for jump in (1, 2, 4) if abs(a - b) == 1 else (1,):
            yield (turns[stages] + (jump > 1), unlikely, promise), p, a, b, jump
        turns[stages] += 1


def _depths(here: Here) -> Iterator[tuple[int, list[int]]]:
    """Yield the pipelines whose warm-up a plan may set, with the depths of their stages."""
    kind = here.plan.job.schedule
    if schedule_record(kind).sets_warm_up:
        for p, pipeline in enumerate(here.plan.pipelines):
            count = len(pipeline.stages)
            if count > 1:
                yield p, [warm_up_depth(pipeline, s, kind) for s in range(count)]


def warm_up_moves(here: Here) -> Moves:
    """Run further ahead where messages take long, or less far where memory is short."""
    for p, depths in _depths(here):
        yield _with_depths(here.plan, p, [None] * len(depths))
        for factor in DEEPER:
            yield _with_depths(here.plan, p, [max(1, round(factor * d)) for d in depths])
        for more in (1, 2, 4, -1):
            yield _with_depths(here.plan, p, [max(1, d + more) for d in depths])
        if len(depths) > THRESHOLDS.few_stages:
            continue
        for s in range(1, len(depths)):
            yield _with_depths(here.plan, p, [d + (i < s) for i, d in enumerate(depths)])


def stage_warm_up_moves(here: Here) -> Moves:
    """Run further ahead before one link, or on one stage."""
    for p, depths in _depths(here):
        for s in range(1, len(depths)):
            for step in (1, 2, 4):
                yield _with_depths(here.plan, p, [d + step * (i < s) for i, d in enumerate(depths)])
        for s in range(len(depths)):
            for more in (-1, 1):
                one = [max(1, d + more * (i == s)) for i, d in enumerate(depths)]
                yield _with_depths(here.plan, p, one)


def _with_depths(plan: Plan, p: int, depths: Sequence[int | None]) -> Plan:
    pipeline = plan.pipelines[p]
    stages = tuple(
        replace(stage, order=replace(stage.order, warm_up=depth))
        for stage, depth in zip(pipeline.stages, depths, strict=True)
    )
    return with_pipeline(plan, p, replace(pipeline, stages=stages))


def schedule_moves(here: Here) -> Moves:
    """Try other schedules, and other numbers of ranges per stage."""
    plan, model = here.plan, here.problem.model
    if all(len(pipeline.stages) == 1 for pipeline in plan.pipelines):
        return
    for kind in here.problem.space.schedules:
        several = schedule_record(kind).several_ranges
        for ranges in (1, *here.problem.space.virtual[1:]) if several else (1,):
            changed: Plan | None = replace(plan, job=replace(plan.job, schedule=kind))
            for p, pipeline in enumerate(plan.pipelines):
                sizes = _ranged(pipeline, ranges)
                if changed is None or sizes is None:
                    changed = None
                    break
                plain = [
                    replace(stage, order=replace(stage.order, warm_up=None))
                    for stage in pipeline.stages
                ]
                changed = recut(changed, p, sizes, model, plain)
            yield changed


def _ranged(pipeline: Pipeline, ranges: int) -> list[int] | None:
    """Return sizes of so many ranges per stage: each stage's blocks shared out evenly."""
    count = len(pipeline.stages)
    ranges = 1 if count == 1 else ranges
    blocks = [stage.num_units for stage in pipeline.stages]
    blocks[0] -= 1
    blocks[-1] -= 1
    if min(blocks) < ranges - (count == 1):
        return None
    sizes = [b * (i + 1) // ranges - b * i // ranges for i in range(ranges) for b in blocks]
    sizes[0] += 1
    sizes[-1] += 1
    return sizes


def wide_block_moves(here: Here) -> Moves:
    """Let blocks of an 8-bit job multiply in 16 bits, or in 8: all of them, or a stage's.

    Small products gain less from 8 bits than rounding their operands costs.
    """
    plan, blocks = here.plan, ((1, here.problem.model.head_unit),)
    if plan.job.precision.compute is not Dtype.FP8:
        return
    wide = set(units_of(plan.job.wide_units))
    every = set(units_of(blocks))
    own = [every & set(units_of(stage.units)) for _, _, stage in plan.stages()]
    for units in (every, set(), *(wide ^ some for some in own), *(wide | some for some in own)):
        changed = replace(plan.job, wide_units=ranges_of(units, blocks))
        if changed != plan.job:
            yield replace(plan, job=changed)


def micro_batch_moves(here: Here) -> Moves:
    """Make micro-batches larger or smaller: of all pipelines, or of one."""
    plan = here.plan
    for factor, larger in itertools.product((2, 3, 5), (True, False)):
        changed = [resized(pipeline, factor, larger=larger) for pipeline in plan.pipelines]
        if len(changed) > 1 and None not in changed:
            yield replace(plan, pipelines=tuple(p for p in changed if p is not None))
        for p, pipeline in enumerate(changed):
            if pipeline is not None:
                yield with_pipeline(plan, p, pipeline)


def share_moves(here: Here) -> Moves:
    """Let one pipeline take micro-batches of another, and one replica sequences of another."""
    plan = here.plan
    for giving, taking in itertools.permutations(range(len(plan.pipelines)), 2):
        one, other = plan.pipelines[giving], plan.pipelines[taking]
        together = math.lcm(one.micro_batch, other.micro_batch)
        for times in (1, 2, 4):
            less = one.micro_batches - times * together // one.micro_batch
            if less >= 1:
                more = other.micro_batches + times * together // other.micro_batch
                moved = with_pipeline(plan, giving, replace(one, micro_batches=less))
                yield with_pipeline(moved, taking, replace(other, micro_batches=more))
    for p, s, stage in plan.stages():
        for a, b in itertools.permutations(range(len(stage.replicas)), 2):
            giver, taker = stage.replicas[a], stage.replicas[b]
            together = math.lcm(giver.count, taker.count)
            left = giver.sequences - together // giver.count
            if left >= 1:
                replicas = list(stage.replicas)
                replicas[a] = replace(giver, sequences=left)
                replicas[b] = replace(taker, sequences=taker.sequences + together // taker.count)
                yield with_stage(plan, p, s, replace(stage, replicas=tuple(replicas)))


def order_moves(here: Here) -> Moves:
    """Let stages change places, each with its chips and its number of units."""
    plan = here.plan
    for p, pipeline in enumerate(plan.pipelines):
        count, sizes = len(pipeline.stages), sizes_of(pipeline)
        places: list[list[int]] = []
        unlikely: list[list[int]] = []
        for a, b in itertools.combinations(range(count), 2):
            other = list(range(count))
            other[a], other[b] = b, a
            apart = pipeline.stages[a].chips.pools != pipeline.stages[b].chips.pools
            (places if apart or b == a + 1 else unlikely).append(other)
        if count > 2:
            places.append(list(reversed(range(count))))
            places += [[(n + i) % count for i in range(count)] for n in (1, -1)]
        for order in (*places, *unlikely):
            depths = [stage.order.warm_up for stage in pipeline.stages]
            stages = [
                replace(pipeline.stages[i], order=replace(pipeline.stages[i].order, warm_up=depth))
                for i, depth in zip(order, depths, strict=True)
            ]
            moved = [sizes[base + i] for base in range(0, len(sizes), count) for i in order]
            yield recut(plan, p, moved, here.problem.model, stages)


def fewer_stage_moves(here: Here) -> Moves:
    """Leave a stage out; a neighbour takes its units."""
    plan = here.plan
    for p, pipeline in enumerate(plan.pipelines):
        count, sizes = len(pipeline.stages), sizes_of(pipeline)
        if count == 1 or len(sizes) > count:
            continue
        for gone, taking in itertools.permutations(range(count), 2):
            if abs(gone - taking) > 1:
                continue
            moved = [n + sizes[gone] * (i == taking) for i, n in enumerate(sizes) if i != gone]
            stages = [stage for i, stage in enumerate(pipeline.stages) if i != gone]
            idle = plan.idle.join((plan.idle, pipeline.stages[gone].chips))
            fewer = with_pipeline(plan, p, replace(pipeline, stages=tuple(stages)))
            yield recut(replace(fewer, idle=idle), p, moved, here.problem.model, stages)


# --- states ----------------------------------------------------------------------------------


def rules_of(here: Here, **values: object) -> list[Synchronisation]:
    """Return one rule per class of parameters, for all units, with other values where given."""
    spread = expert_width(here.plan) > 1
    kinds = tuple(ParameterClass) if spread else (ParameterClass.DENSE,)
    return [
        replace(
            here.plan.synchronisation_of(1, kind),
            units=(0, here.problem.model.num_units),
            shares=(),
            **values,  # type: ignore[arg-type]
        )
        for kind in kinds
    ]


def shard_level_moves(here: Here) -> Moves:
    """Try other shard levels."""
    for level in here.problem.space.shard:
        yield replace(here.plan, synchronisation=tuple(rules_of(here, shard_level=level)))


def sharding_moves(here: Here) -> Moves:
    """Try other buckets and overlap; levels of one class, of embedding and head alone."""
    now, units = rules_of(here), here.problem.model.num_units
    tried: list[dict[str, object]] = [{"bucket": bucket} for bucket in (1, *BUCKETS)]
    tried += [{"overlap": on} for on in (True, False)]
    for values in tried:
        yield replace(here.plan, synchronisation=tuple(rules_of(here, **values)))
    if len(now) > 1:
        tried += [{"shard_level": level} for level in here.problem.space.shard]
        for values in tried:
            changed = rules_of(here, **values)
            yield replace(here.plan, synchronisation=(changed[0], *now[1:]))
            yield replace(here.plan, synchronisation=(now[0], *changed[1:]))
    for level in here.problem.space.shard:
        for end, rest in (((0, 1), (1, units)), ((units - 1, units), (0, units - 1))):
            apart = replace(now[0], units=end, shard_level=level)
            rules = (apart, replace(now[0], units=rest), *now[1:])
            yield replace(here.plan, synchronisation=rules)


def owner_moves(here: Here) -> Moves:
    """Let the other end own a tied table."""
    if here.plan.tied_owner is not None:
        other = here.problem.model.head_unit if here.plan.tied_owner == 0 else 0
        yield replace(here.plan, tied_owner=other)


def expert_moves(here: Here) -> Moves:
    """Spread experts over more chips, or fewer."""
    model, plan, ep = here.problem.model, here.plan, expert_width(here.plan)
    if not model.num_experts:
        return
    for wanted in sorted({1, max(1, ep // 2), 2 * ep} - {ep}):
        if wanted not in here.problem.expert_degrees():
            continue
        changed = plan
        for p, s, stage in plan.stages():
            has = any(
                model.block(unit).moe is not None
                for start, stop in stage.units
                for unit in range(max(1, start), min(stop, model.num_layers + 1))
            )
            groups = (ExpertGroup(chips=wanted, count=max(1, stage.num_chips // wanted)),)
            spread = groups if has and wanted > 1 else ()
            changed = with_stage(changed, p, s, replace(stage, experts=spread))
        dense = [r for r in plan.synchronisation if r.parameter_class is ParameterClass.DENSE]
        if dense and wanted > 1:
            both = [replace(rule, parameter_class=ParameterClass.EXPERT) for rule in dense]
            dense += both
        yield replace(changed, synchronisation=tuple(dense))


PLAN_MOVES: dict[str, Callable[[Here], Moves]] = {
    "tied owner": owner_moves,
    "shard level": shard_level_moves,
    "sharding": sharding_moves,
    "warm-up": warm_up_moves,
    "warm-up of stages": stage_warm_up_moves,
    "micro-batch": micro_batch_moves,
    "shares": share_moves,
    "schedule": schedule_moves,
    "experts": expert_moves,
    "units": unit_moves,
    "order": order_moves,
    "fewer stages": fewer_stage_moves,
    "wide blocks": wide_block_moves,
}
