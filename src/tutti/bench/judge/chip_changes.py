"""Single changes of who has which chips: idle ones put to use, copies that move, places changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from tutti.hardware.topology import Position
from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.edits import (
    recut,
    sizes_of,
    stage_of_size,
    ways_to_take,
    with_pipeline,
    with_replica,
    with_stage,
    without_shares,
)
from tutti.plan.plan import Pipeline, Plan, Replica, Stage

TENSOR_DEGREES = (1, 2, 4, 8)  # of a pipeline on chips that were idle
SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 16)  # of another pipeline's sequences, for such a pipeline

Changes = Iterator[tuple[str, Plan | None]]


def _idle_by_pool(plan: Plan) -> dict[str, list[Position]]:
    free: dict[str, list[Position]] = {}
    for chip in plan.idle:
        free.setdefault(chip.pool, []).append(chip)
    return free


def _idle_after(plan: Plan, changed: Plan) -> Plan:
    """Return the changed plan, whose idle chips are all of the plan's that it does not use."""
    every = [*plan.idle, *(chip for _, _, stage in plan.stages() for chip in stage.chips)]
    used = {chip for _, _, stage in changed.stages() for chip in stage.chips}
    idle = sorted(chip for chip in every if chip not in used)
    return replace(without_shares(changed), idle=ChipSet.from_ids(idle))


# --- copies ----------------------------------------------------------------------------------


def _copies(plan: Plan, model: ModelSpec) -> Changes:
    """Give a stage a copy more on idle chips, or one fewer; all copies share its work anew."""
    del model
    free = _idle_by_pool(plan)
    for p, s, stage in plan.stages():
        size = plan.pipelines[p].micro_batch
        for r, replica in enumerate(stage.replicas):
            place = f"pipeline {p}, stage {s}, replica {r}"
            idle = free.get(replica.chips.pools[0], [])
            if len(idle) >= replica.width:
                wider = _with_count(replica, 1, idle)
                yield f"one more, {place}", _shared_out(plan, (p, s), stage, r, wider, size)
            fewer = _with_count(replica, -1, []) if replica.count > 1 else None
            if fewer is not None or len(stage.replicas) > 1:
                yield f"one fewer, {place}", _shared_out(plan, (p, s), stage, r, fewer, size)
            if replica.count > 1 and len(stage.replicas) > 1:
                yield f"none, {place}", _shared_out(plan, (p, s), stage, r, None, size)
        for pool, idle in free.items():  # one of another pool, as it can be with these degrees
            one = stage.replicas[0]
            if pool in stage.chips.pools or len(idle) < one.width:
                continue
            new = replace(one, chips=ChipSet.from_ids(idle[: one.width]), count=1)
            beside = replace(stage, replicas=(*stage.replicas, new))
            r = len(stage.replicas)
            what = f"one of {pool}, pipeline {p}, stage {s}"
            yield what, _shared_out(plan, (p, s), beside, r, new, size)


def _with_count(replica: Replica, more: int, idle: list[Position]) -> Replica:
    count = replica.count + more
    chips = ChipSet.from_ids([*replica.chips, *idle][: count * replica.width])
    return replace(replica, count=count, chips=chips)


def _shared_out(
    plan: Plan, place: tuple[int, int], stage: Stage, r: int, replica: Replica | None, size: int
) -> Plan | None:
    """Return the plan with another replica group, or without it, and the same micro-batches."""
    replicas = [x for x in (*stage.replicas[:r], replica, *stage.replicas[r + 1 :]) if x]
    shared = stage_of_size(replace(stage, replicas=tuple(replicas), experts=()), size)
    if shared is None or stage.experts:
        return None
    return _idle_after(plan, with_stage(plan, *place, shared))


def _moved_copies(plan: Plan, model: ModelSpec) -> Changes:
    """Let a stage give a copy's chips to another stage of its pipeline that has such copies."""
    del model
    for p, pipeline in enumerate(plan.pipelines):
        for giving, taking in itertools.permutations(range(len(pipeline.stages)), 2):
            one, other = pipeline.stages[giving], pipeline.stages[taking]
            for (a, giver), (b, taker) in itertools.product(
                enumerate(one.replicas), enumerate(other.replicas)
            ):
                alike = giver.chips.pools == taker.chips.pools and giver.width == taker.width
                if not alike or (giver.count == 1 and len(one.replicas) == 1):
                    continue
                given = list(giver.chips)[-giver.width :]
                less = _with_count(giver, -1, []) if giver.count > 1 else None
                size = pipeline.micro_batch
                changed = _shared_out(plan, (p, giving), one, a, less, size)
                if changed is not None:
                    more = _with_count(taker, 1, given)
                    changed = _shared_out(changed, (p, taking), other, b, more, size)
                what = f"pipeline {p}: a copy from stage {giving} to {taking}"
                yield what, None if changed is None else _idle_after(plan, changed)


# --- idle chips ------------------------------------------------------------------------------


def _more_stages(plan: Plan, model: ModelSpec) -> Changes:
    """Let idle chips take half of a stage's units, as a stage before it or after it."""
    free = _idle_by_pool(plan)
    for p, pipeline in enumerate(plan.pipelines):
        count, sizes = len(pipeline.stages), sizes_of(pipeline)
        if len(sizes) > count:
            continue
        for (s, stage), (pool, idle) in itertools.product(enumerate(pipeline.stages), free.items()):
            chips = stage.num_chips
            if len(stage.replicas) > 1 or stage.experts or len(idle) < chips or sizes[s] < 2:
                continue
            new = replace(stage.replicas[0], chips=ChipSet.from_ids(idle[:chips]))
            beside = replace(stage, replicas=(new,), order=replace(stage.order, warm_up=None))
            half = sizes[s] // 2
            moved = [*sizes[:s], sizes[s] - half, half, *sizes[s + 1 :]]
            for at in (s, s + 1):
                stages = [*pipeline.stages[:at], beside, *pipeline.stages[at:]]
                stages = [replace(x, order=replace(x.order, warm_up=None)) for x in stages]
                longer = with_pipeline(plan, p, replace(pipeline, stages=tuple(stages)))
                cut = recut(longer, p, moved, model, stages)
                what = f"pipeline {p}: a stage on {pool} at {at}"
                yield what, None if cut is None else _idle_after(plan, cut)


def _idle_pipelines(plan: Plan, model: ModelSpec) -> Changes:
    """Let idle chips of a pool be a pipeline of one stage, with a few micro-batches of another."""
    if any(stage.experts for _, _, stage in plan.stages()):
        return
    units, length = ((0, model.num_units),), plan.job.sequence_length
    for pool, idle in _idle_by_pool(plan).items():
        for tp in TENSOR_DEGREES:
            count = len(idle) // tp
            if not count:
                continue
            copies = Replica(
                chips=ChipSet.from_ids(idle[: count * tp]), count=count, tp=tp,
                sequence_parallel=tp > 1 and length % tp == 0,
            )  # fmt: skip
            stages = (Stage(units=units, replicas=(copies,)),)
            one = Pipeline(micro_batch=count, micro_batches=1, stages=stages)
            for (q, other), share in itertools.product(enumerate(plan.pipelines), SHARES):
                handed = round(share * other.sequences)
                wide = replace(one, micro_batch=count * other.stages[0].replicas[0].sequences)
                for less in ways_to_take(other, other.sequences - handed, 1):
                    changed = with_pipeline(plan, q, less)
                    for added in ways_to_take(_of_size(wide), handed):
                        more = replace(changed, pipelines=(*changed.pipelines, added))
                        what = f"{added.micro_batches} × {added.micro_batch} on {pool}, tp {tp}"
                        yield what, _idle_after(plan, more)


def _of_size(pipeline: Pipeline) -> Pipeline:
    """Return a pipeline of one stage whose replicas share its micro-batch."""
    shared = stage_of_size(pipeline.stages[0], pipeline.micro_batch)
    return pipeline if shared is None else replace(pipeline, stages=(shared,))


# --- places ----------------------------------------------------------------------------------


def _places(plan: Plan, model: ModelSpec) -> Changes:
    """Let two replica groups of a pool change places, and lay a group out in another order."""
    del model
    groups = [
        ((p, s, r), replica)
        for p, s, stage in plan.stages()
        for r, replica in enumerate(stage.replicas)
    ]
    for (at, one), (to, other) in itertools.combinations(groups, 2):
        if one.chips.pools == other.chips.pools:
            chips = [*one.chips, *other.chips]
            cut = other.num_chips
            first = ChipSet.from_ids(chips[-one.num_chips :])
            second = ChipSet.from_ids(chips[:cut])
            changed = with_replica(plan, at, replace(one, chips=first))
            changed = with_replica(changed, to, replace(other, chips=second))
            yield f"{at} and {to} change places", changed
        elif one.num_chips == other.num_chips and one.width == other.width:
            changed = with_replica(plan, at, replace(one, chips=other.chips))
            changed = with_replica(changed, to, replace(other, chips=one.chips))
            yield f"{at} and {to} change pools", changed
    for at, replica in groups:
        chips, width, count = list(replica.chips), replica.width, replica.count
        if width > 1 and count > 1:
            dealt = [chips[i + count * j] for i in range(count) for j in range(width)]
            yield (
                f"{at} dealt out",
                with_replica(plan, at, replace(replica, chips=ChipSet.from_ids(dealt))),
            )


CHIP_CHANGES: dict[str, Callable[[Plan, ModelSpec], Changes]] = {
    "copies": _copies,
    "moved copies": _moved_copies,
    "more stages": _more_stages,
    "idle pipelines": _idle_pipelines,
    "places": _places,
}
