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

from tutti.bench.judge.batch_changes import BATCH_CHANGES
from tutti.bench.judge.chip_changes import CHIP_CHANGES
from tutti.bench.judge.replica_changes import REPLICA_CHANGES
from tutti.bench.judge.state_changes import STATE_CHANGES
from tutti.hardware.chip import Dtype
from tutti.models.spec import ModelSpec
from tutti.plan.edits import (
    ranges_of,
    recut,
    resized,
    sizes_of,
    units_of,
    with_pipeline,
    with_stage,
)
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Pipeline, Plan
from tutti.plan.schedules import schedule_record, warm_up_depth

FAR = 3  # ranges over which a unit is handed on
FARTHEST = 24  # ranges, up to which a unit is handed on between any two
JUMPS = (1, 2, 4)  # units that are handed over at once
RANGES = (1, 2, 3, 4, 6)  # per stage, where a schedule takes several
PASSES = ("forward", "backward_input", "backward_weight")


class Change(NamedTuple):
    """A plan that differs from another in one thing."""

    kind: str
    what: str
    plan: Plan


Changes = Iterator[tuple[str, Plan | None]]


def single_changes(plan: Plan, model: ModelSpec) -> Iterator[Change]:
    """Yield all single changes of a plan, valid or not."""
    for kind, make in _ALL.items():
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


def _order_times(plan: Plan, model: ModelSpec) -> Changes:
    """Tell a schedule that puts weight passes off other relative times of a stage."""
    del model
    if not schedule_record(plan.job.schedule).delays_weights:
        return
    for p, s, stage in plan.stages():
        if len(plan.pipelines[p].stages) == 1:
            continue
        for name, factor in itertools.product(PASSES, (0.5, 2.0)):
            time = factor * getattr(stage.order, name)
            order = replace(stage.order, **{name: time})
            what = f"pipeline {p}, stage {s}: {name} × {factor}"
            yield what, with_stage(plan, p, s, replace(stage, order=order))


def _wide_blocks(plan: Plan, model: ModelSpec) -> Changes:
    """Let blocks of an 8-bit job multiply in 16 bits, or in 8: all, or those of one stage."""
    if plan.job.precision.compute is not Dtype.FP8:
        return
    blocks = ((1, model.head_unit),)
    every, wide = set(units_of(blocks)), set(units_of(plan.job.wide_units))
    own = [(f"stage {p}, {s}", every & set(units_of(st.units))) for p, s, st in plan.stages()]
    tried = [("all", every), ("none", set()), *((name, wide ^ held) for name, held in own)]
    for what, units in tried:
        job = replace(plan.job, wide_units=ranges_of(units, blocks))
        yield what, replace(plan, job=job)


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


_CHANGES: dict[str, Callable[[Plan, ModelSpec], Changes]] = {
    "units": _units,
    "order of stages": _order_of_stages,
    "fewer stages": _fewer_stages,
    "schedule": _schedule,
    "warm-up": _warm_up,
    "micro-batch": _micro_batch,
    "micro-batches": _micro_batches,
    "order times": _order_times,
    "wide blocks": _wide_blocks,
}
_ALL = _CHANGES | REPLICA_CHANGES | BATCH_CHANGES | CHIP_CHANGES | STATE_CHANGES
