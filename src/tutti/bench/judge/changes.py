"""Single changes of a Plan: every field that it has, one at a time.

Written apart from the planner, to judge it: nothing of `tutti.search` is used. Changes are neither
valid nor good by themselves; the checker and the simulator say so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from tutti.bench.judge.replica_changes import REPLICA_CHANGES
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.edits import (
    expert_width,
    recut,
    resized,
    sizes_of,
    with_pipeline,
    with_stage,
)
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import ExpertGroup, Pipeline, Plan, Synchronisation
from tutti.plan.schedules import schedule_record, warm_up_depth

FAR = 3  # ranges over which a unit is handed on
FARTHEST = 24  # ranges, up to which a unit is handed on between any two
JUMPS = (1, 2, 4)  # units that are handed over at once
RANGES = (1, 2, 3, 4, 6)  # per stage, where a schedule takes several
BUCKETS = (1, 2, 4, 8, 1024)


class Change(NamedTuple):
    """A plan that differs from another in one thing."""

    kind: str
    what: str
    plan: Plan


Changes = Iterator[tuple[str, Plan | None]]


def single_changes(plan: Plan, model: ModelSpec) -> Iterator[Change]:
    """Yield all single changes of a plan, valid or not."""
    for kind, make in (*_CHANGES.items(), *REPLICA_CHANGES.items()):
        for what, changed in make(plan, model):
            if changed is not None and changed != plan:
                yield Change(kind, what, changed)


# --- units -----------------------------------------------------------------------------------


def _units(plan: Plan, model: ModelSpec) -> Changes:
    """Hand units from one range to another; those between them move along."""
    for p, pipeline in enumerate(plan.pipelines):
        sizes = sizes_of(pipeline)
        far = len(sizes) if len(sizes) <= FARTHEST else FAR
        for giving, taking in itertools.permutations(range(len(sizes)), 2):
            if abs(giving - taking) > far:
                continue
            for jump in JUMPS if abs(giving - taking) == 1 else JUMPS[:1]:
                moved = list(sizes)
                moved[giving] -= jump
                moved[taking] += jump
                yield (
                    f"pipeline {p}: {jump} from {giving} to {taking}",
                    recut(plan, p, moved, model),
                )


def _order_of_stages(plan: Plan, model: ModelSpec) -> Changes:
    """Let two stages change places, each with its chips and its number of units."""
    for p, pipeline in enumerate(plan.pipelines):
        count = len(pipeline.stages)
        sizes = sizes_of(pipeline)
        orders: list[tuple[str, list[int]]] = []
        for first, second in itertools.combinations(range(count), 2):
            places = list(range(count))
            places[first], places[second] = second, first
            orders.append((f"stages {first} and {second}", places))
        if count > 2:
            orders.append(("the other way round", list(reversed(range(count)))))
            orders += [(f"turned by {n}", [(n + i) % count for i in range(count)]) for n in (1, -1)]
        for what, places in orders:
            stages = [pipeline.stages[place] for place in places]
            rounds = range(0, len(sizes), count)
            moved = [sizes[base + place] for base in rounds for place in places]
            depths = [stage.order.warm_up for stage in pipeline.stages]
            kept = [
                replace(stage, order=replace(stage.order, warm_up=depth))
                for stage, depth in zip(stages, depths, strict=True)
            ]
            yield f"pipeline {p}: {what}", recut(plan, p, moved, model, kept)


def _fewer_stages(plan: Plan, model: ModelSpec) -> Changes:
    """Leave a stage out: a neighbour takes its units, its chips have nothing to do."""
    for p, pipeline in enumerate(plan.pipelines):
        count, sizes = len(pipeline.stages), sizes_of(pipeline)
        if count == 1 or len(sizes) > count:
            continue
        for gone in range(count):
            for taking in {max(0, gone - 1), min(count - 1, gone + 1)} - {gone}:
                moved = list(sizes)
                moved[taking] += moved[gone]
                del moved[gone]
                stages = [s for i, s in enumerate(pipeline.stages) if i != gone]
                fewer = with_pipeline(plan, p, replace(pipeline, stages=tuple(stages)))
                idle = plan.idle.join((plan.idle, pipeline.stages[gone].chips))
                changed = recut(replace(fewer, idle=idle), p, moved, model, stages)
                yield f"pipeline {p}: without stage {gone}", changed


# --- passes ----------------------------------------------------------------------------------


def _schedule(plan: Plan, model: ModelSpec) -> Changes:
    """Try other kinds of schedules, and other numbers of ranges per stage."""
    for kind in ScheduleKind:
        several = schedule_record(kind).several_ranges
        for ranges in RANGES if several else (1,):
            changed: Plan | None = replace(plan, job=replace(plan.job, schedule=kind))
            for p, pipeline in enumerate(plan.pipelines):
                alone = len(pipeline.stages) == 1
                sizes = _ranged(pipeline, 1 if alone else ranges, model.num_units)
                plain = [
                    replace(stage, order=replace(stage.order, warm_up=None))
                    for stage in pipeline.stages
                ]
                if changed is not None:
                    cut = None if sizes is None else recut(changed, p, sizes, model, plain)
                    changed = cut
            yield f"{kind}, {ranges} ranges", changed


def _ranged(pipeline: Pipeline, ranges: int, num_units: int) -> list[int] | None:
    """Return sizes of so many ranges per stage, each stage with as many units as before."""
    count = len(pipeline.stages)
    ends = [(s == 0) + (s == count - 1) for s in range(count)]
    blocks = [stage.num_units - end for stage, end in zip(pipeline.stages, ends, strict=True)]
    if count > 1 and min(blocks) < ranges:
        return None
    sizes = [
        blocks[s] * (turn + 1) // ranges - blocks[s] * turn // ranges
        for turn in range(ranges)
        for s in range(count)
    ]
    sizes[0] += 1
    sizes[-1] += 1
    return sizes if sum(sizes) == num_units else None


def _warm_up(plan: Plan, model: ModelSpec) -> Changes:
    """Let stages run further ahead or less far: all of a pipeline, or one."""
    del model
    kind = plan.job.schedule
    if not schedule_record(kind).sets_warm_up:
        return
    for p, pipeline in enumerate(plan.pipelines):
        count = len(pipeline.stages)
        if count == 1:
            continue
        depths = [warm_up_depth(pipeline, s, kind) for s in range(count)]
        usual: list[int | None] = [None] * count
        tried: dict[str, list[int | None]] = {"as usual": usual}
        for factor in (0.5, 1.5, 2, 3, 4):
            tried[f"× {factor}"] = [max(1, round(factor * d)) for d in depths]
        for more in (-1, 1, 2, 4):
            tried[f"{more:+}"] = [max(1, d + more) for d in depths]
        for s in range(count):
            for more in (-1, 1):
                one: list[int | None] = list(depths)
                one[s] = max(1, depths[s] + more)
                tried[f"stage {s} {more:+}"] = one
        for s in range(1, count):  # a slow link before stage s: all before it run further ahead
            for factor in (1, 2):
                step = max(1, factor * (depths[s - 1] - depths[s]))
                tried[f"before {s} +{step}"] = [d + step * (i < s) for i, d in enumerate(depths)]
        for what, wanted in tried.items():
            stages = tuple(
                replace(stage, order=replace(stage.order, warm_up=depth))
                for stage, depth in zip(pipeline.stages, wanted, strict=True)
            )
            yield f"pipeline {p}: {what}", with_pipeline(plan, p, replace(pipeline, stages=stages))


# --- the batch -------------------------------------------------------------------------------


def _micro_batch(plan: Plan, model: ModelSpec) -> Changes:
    """Make micro-batches larger or smaller, of one pipeline or of all."""
    del model
    for factor in (2, 3):
        for larger in (True, False):
            everywhere: Plan | None = plan
            for p, pipeline in enumerate(plan.pipelines):
                changed = resized(pipeline, factor, larger=larger)
                what = f"pipeline {p}: {'×' if larger else '÷'} {factor}"
                if changed is None:
                    everywhere = None
                    continue
                yield what, with_pipeline(plan, p, changed)
                if everywhere is not None:
                    everywhere = with_pipeline(everywhere, p, changed)
            if len(plan.pipelines) > 1:
                yield f"all pipelines: {'×' if larger else '÷'} {factor}", everywhere


def _micro_batches(plan: Plan, model: ModelSpec) -> Changes:
    """Let one pipeline take micro-batches of another."""
    del model
    for giving, taking in itertools.permutations(range(len(plan.pipelines)), 2):
        one, other = plan.pipelines[giving], plan.pipelines[taking]
        common = math.lcm(one.micro_batch, other.micro_batch)
        for times in (1, 2, 4):
            less = one.micro_batches - times * common // one.micro_batch
            more = other.micro_batches + times * common // other.micro_batch
            if less < 1:
                break
            changed = with_pipeline(plan, giving, replace(one, micro_batches=less))
            changed = with_pipeline(changed, taking, replace(other, micro_batches=more))
            yield f"{times * common} sequences from {giving} to {taking}", changed


# --- states ----------------------------------------------------------------------------------


def _rules(plan: Plan, model: ModelSpec, **values: object) -> dict[object, Synchronisation]:
    """Return one rule per class of parameters, for all units."""
    spread = expert_width(plan) > 1
    kinds = tuple(ParameterClass) if spread else (ParameterClass.DENSE,)
    whole = (0, model.num_units)
    return {
        kind: replace(plan.synchronisation_of(1, kind), units=whole, shares=(), **values)  # type: ignore[arg-type]
        for kind in kinds
    }


def _sharding(plan: Plan, model: ModelSpec) -> Changes:
    """Try other shard levels, buckets and overlap: of all parameters, one class, the ends."""
    tried: list[tuple[str, dict[str, object]]] = []
    tried += [(f"level {level}", {"shard_level": level}) for level in range(4)]
    tried += [(f"bucket {bucket}", {"bucket": bucket}) for bucket in BUCKETS]
    tried += [(f"overlap {on}", {"overlap": on}) for on in (False, True)]
    now = _rules(plan, model)
    for what, values in tried:
        rules = _rules(plan, model, **values)
        yield what, replace(plan, synchronisation=tuple(rules.values()))
        if len(rules) > 1:
            for kind in rules:
                one = now | {kind: rules[kind]}
                yield f"{kind} {what}", replace(plan, synchronisation=tuple(one.values()))
        if "shard_level" in values:
            yield from _sharded_ends(plan, model, now, what, values)


def _sharded_ends(
    plan: Plan,
    model: ModelSpec,
    now: dict[object, Synchronisation],
    what: str,
    values: dict[str, object],
) -> Changes:
    dense, *others = now.values()
    units = model.num_units
    for name, end in (("embedding", (0, 1)), ("head", (units - 1, units))):
        rest = (1, units) if end[0] == 0 else (0, units - 1)
        apart = (
            replace(dense, units=end, **values),  # type: ignore[arg-type]
            replace(dense, units=rest),
            *others,
        )
        yield f"{name} {what}", replace(plan, synchronisation=apart)


def _tied_owner(plan: Plan, model: ModelSpec) -> Changes:
    if plan.tied_owner is not None:
        other = model.head_unit if plan.tied_owner == 0 else 0
        yield f"unit {other}", replace(plan, tied_owner=other)


def _experts(plan: Plan, model: ModelSpec) -> Changes:
    """Spread experts over more chips or fewer."""
    ep = expert_width(plan)
    if not model.num_experts:
        return
    for wanted in {max(1, ep // 2), 2 * ep, 1} - {ep}:
        changed = plan
        for p, s, stage in plan.stages():
            held = replace(stage, experts=())
            has = any(
                model.block(unit).moe is not None
                for start, stop in stage.units
                for unit in range(max(1, start), min(stop, model.num_layers + 1))
            )
            if wanted > 1 and has:
                groups = (ExpertGroup(chips=wanted, count=max(1, stage.num_chips // wanted)),)
                held = replace(stage, experts=groups)
            changed = with_stage(changed, p, s, held)
        rules = tuple(_rules(changed, model).values()) if plan.synchronisation else ()
        yield f"over {wanted} chips", replace(changed, synchronisation=rules)


_CHANGES: dict[str, Callable[[Plan, ModelSpec], Changes]] = {
    "units": _units,
    "order of stages": _order_of_stages,
    "fewer stages": _fewer_stages,
    "schedule": _schedule,
    "warm-up": _warm_up,
    "micro-batch": _micro_batch,
    "micro-batches": _micro_batches,
    "sharding": _sharding,
    "tied owner": _tied_owner,
    "experts": _experts,
}
