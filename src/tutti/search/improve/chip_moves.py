"""Moves of a local search over Plans: who has which chips, copy by copy; pipelines that come or go.

What a move takes from the batch another pipeline or copy does instead, in micro-batches of sizes
that suit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from tutti.hardware.topology import Position
from tutti.plan.chips import ChipSet
from tutti.plan.edits import (
    copies_divided,
    pipeline_of_size,
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
from tutti.search.improve.plan_moves import Here, Moves

HANDED = (1 / 2, 1 / 4, 1 / 8, 1 / 16)  # of a pipeline's sequences, to one on idle chips
TENSOR_DEGREES = (1, 2, 4, 8)  # of such a pipeline


def _idle_chips(plan: Plan) -> dict[str, list[Position]]:
    idle: dict[str, list[Position]] = {}
    for chip in plan.idle:
        idle.setdefault(chip.pool, []).append(chip)
    return idle


def _rest_idle(before: Plan, plan: Plan) -> Plan:
    """Return a changed plan whose idle chips are all that it has no work for any more."""
    used = {chip for _, _, stage in plan.stages() for chip in stage.chips}
    had = itertools.chain(before.idle, *(stage.chips for _, _, stage in before.stages()))
    left = sorted(chip for chip in had if chip not in used)
    return replace(without_shares(plan), idle=ChipSet.from_ids(left))


# --- copies of a stage -----------------------------------------------------------------------


def stage_copy_moves(here: Here) -> Moves:
    """Give a stage a copy more on idle chips, or one fewer; its copies share the work anew."""
    plan, idle = here.plan, _idle_chips(here.plan)
    for p, s, stage in plan.stages():
        if stage.experts:
            continue
        for replicas in _other_copies(stage, idle):
            yield _shared_anew(plan, (p, s), replicas)


def _other_copies(stage: Stage, idle: dict[str, list[Position]]) -> Iterator[list[Replica]]:
    replicas = list(stage.replicas)
    for r, replica in enumerate(replicas):
        before, behind = replicas[:r], replicas[r + 1 :]
        free = idle.get(replica.chips.pools[0], [])
        if len(free) >= replica.width:
            yield [*before, _of_count(replica, replica.count + 1, free), *behind]
        if replica.count > 1:
            yield [*before, _of_count(replica, replica.count - 1), *behind]
        if len(replicas) > 1:
            yield [*before, *behind]
    like = replicas[0]
    for pool, free in idle.items():
        if pool not in stage.chips.pools and len(free) >= like.width:
            yield [*replicas, replace(like, chips=ChipSet.from_ids(free[: like.width]), count=1)]


def _of_count(replica: Replica, count: int, free: Sequence[Position] = ()) -> Replica:
    chips = itertools.islice(itertools.chain(replica.chips, free), count * replica.width)
    return replace(replica, count=count, chips=ChipSet.from_ids(list(chips)))


def _shared_anew(plan: Plan, place: tuple[int, int], replicas: Iterable[Replica]) -> Plan | None:
    """Return the plan with other copies of a stage, which share its micro-batches."""
    p, s = place
    stage = replace(plan.pipelines[p].stages[s], replicas=tuple(replicas))
    shared = stage_of_size(stage, plan.pipelines[p].micro_batch)
    return None if shared is None else _rest_idle(plan, with_stage(plan, p, s, shared))


def handed_copy_moves(here: Here) -> Moves:
    """Hand a copy's chips from a stage to another of its pipeline that has such copies."""
    plan = here.plan
    for p, pipeline in enumerate(plan.pipelines):
        groups = [
            (s, r, replica)
            for s, stage in enumerate(pipeline.stages)
            if not stage.experts
            for r, replica in enumerate(stage.replicas)
        ]
        for (s, r, giver), (t, q, taker) in itertools.permutations(groups, 2):
            alike = giver.chips.pools == taker.chips.pools and giver.width == taker.width
            rest = list(pipeline.stages[s].replicas)
            if s == t or not alike or giver.count + len(rest) == 2:
                continue
            rest[r : r + 1] = [_of_count(giver, giver.count - 1)] if giver.count > 1 else []
            more = list(pipeline.stages[t].replicas)
            more[q] = _of_count(taker, taker.count + 1, list(giver.chips)[-giver.width :])
            stages = list(pipeline.stages)
            for at, replicas in ((s, rest), (t, more)):
                stage = replace(stages[at], replicas=tuple(replicas))
                shared = stage_of_size(stage, pipeline.micro_batch)
                if shared is None:
                    break
                stages[at] = shared
            else:
                changed = with_pipeline(plan, p, replace(pipeline, stages=tuple(stages)))
                yield _rest_idle(plan, changed)


def dealt_moves(here: Here) -> Moves:
    """Deal the chips of a replica group out, so that its copies lie across what they lay along."""
    for p, s, stage in here.plan.stages():
        for r, replica in enumerate(stage.replicas):
            width, count, chips = replica.width, replica.count, list(replica.chips)
            if width > 1 and count > 1:
                dealt = [
                    chips[at] for first in range(count) for at in range(first, len(chips), count)
                ]
                moved = replace(replica, chips=ChipSet.from_ids(dealt))
                yield with_replica(here.plan, (p, s, r), moved)


# --- stages and pipelines --------------------------------------------------------------------


def more_stage_moves(here: Here) -> Moves:
    """Let idle chips take half of a stage's units, as a stage before it or behind it."""
    plan, idle = here.plan, _idle_chips(here.plan)
    for p, pipeline in enumerate(plan.pipelines):
        sizes = sizes_of(pipeline)
        if len(sizes) > len(pipeline.stages):
            continue
        for (s, stage), free in itertools.product(enumerate(pipeline.stages), idle.values()):
            like, half = stage.replicas[0], sizes[s] // 2
            if len(stage.replicas) > 1 or stage.experts or len(free) < like.num_chips or not half:
                continue
            new = replace(like, chips=ChipSet.from_ids(free[: like.num_chips]))
            for at in (s, s + 1):
                stages = list(pipeline.stages)
                stages.insert(at, replace(stage, replicas=(new,)))
                plain = [replace(x, order=replace(x.order, warm_up=None)) for x in stages]
                longer = with_pipeline(plan, p, replace(pipeline, stages=tuple(plain)))
                cut = [*sizes[:s], sizes[s] - half, half, *sizes[s + 1 :]]
                changed = recut(longer, p, cut, here.problem.model, plain)
                yield None if changed is None else _rest_idle(plan, changed)


def idle_pipeline_moves(here: Here) -> Moves:
    """Let idle chips of a pool be a pipeline of one stage, with a part of another's sequences."""
    plan, length = here.plan, here.plan.job.sequence_length
    units = ((0, here.problem.model.num_units),)
    if any(stage.experts for _, _, stage in plan.stages()):
        return
    for free, tp in itertools.product(_idle_chips(plan).values(), TENSOR_DEGREES):
        count = len(free) // tp
        if not count:
            continue
        copies = Replica(
            chips=ChipSet.from_ids(free[: count * tp]), count=count, tp=tp,
            sequence_parallel=tp > 1 and length % tp == 0,
        )  # fmt: skip
        stage = Stage(units=units, replicas=(copies,))
        for (q, other), part in itertools.product(enumerate(plan.pipelines), HANDED):
            handed = round(part * other.sequences)
            wide = count * other.stages[0].replicas[0].sequences
            made = pipeline_of_size(
                Pipeline(micro_batch=count, micro_batches=1, stages=(stage,)), wide, 1
            )
            if made is None:
                continue
            for less in ways_to_take(other, other.sequences - handed, 1):
                for more in ways_to_take(made, handed):
                    fewer = with_pipeline(plan, q, less)
                    changed = replace(fewer, pipelines=(*fewer.pipelines, more))
                    yield _rest_idle(plan, changed)


def left_out_moves(here: Here) -> Moves:
    """Leave a pipeline out; another takes what it had of the batch."""
    plan = here.plan
    for p, q in itertools.permutations(range(len(plan.pipelines)), 2):
        gone, kept = plan.pipelines[p], plan.pipelines[q]
        for taking in ways_to_take(kept, kept.sequences + gone.sequences):
            changed = with_pipeline(plan, q, taking)
            others = tuple(x for i, x in enumerate(changed.pipelines) if i != p)
            yield _rest_idle(plan, replace(changed, pipelines=others))


def apart_moves(here: Here) -> Moves:
    """Make two pipelines of one: half of all its copies each, or one replica group by itself."""
    plan = without_shares(here.plan)
    for p, pipeline in enumerate(plan.pipelines):
        if any(stage.experts for stage in pipeline.stages):
            continue
        for one, other in _two_of(pipeline):
            size = one.micro_batch
            for more in dict.fromkeys((0, size, -size, other.micro_batch)):
                shares = (one.sequences + more, other.sequences - more)
                for first in ways_to_take(one, shares[0]):
                    for second in ways_to_take(other, shares[1]):
                        changed = with_pipeline(plan, p, first)
                        yield replace(changed, pipelines=(*changed.pipelines, second))


def _two_of(pipeline: Pipeline) -> Iterator[tuple[Pipeline, Pipeline]]:
    """Yield the ways to cut a pipeline in two that take equally much on all stages."""
    stages = pipeline.stages
    if all(r.count % 2 == 0 for stage in stages for r in stage.replicas):
        halves = [
            [list(copies_divided(r, r.count // 2, r.sequences, r.sequences)) for r in s.replicas]
            for s in stages
        ]
        parts = [[[pair[i] for pair in own] for own in halves] for i in (0, 1)]
        yield _with_copies(pipeline, parts[0]), _with_copies(pipeline, parts[1])
    groups = len(stages[0].replicas)
    if groups == 1 or any(len(stage.replicas) != groups for stage in stages):
        return
    for r in range(groups):
        own = [[stage.replicas[r]] for stage in stages]
        if len({_taken_by(replicas) for replicas in own}) == 1:
            rest = [[*stage.replicas[:r], *stage.replicas[r + 1 :]] for stage in stages]
            yield _with_copies(pipeline, own), _with_copies(pipeline, rest)


def _taken_by(replicas: Sequence[Replica]) -> int:
    return sum(replica.count * replica.sequences for replica in replicas)


def _with_copies(pipeline: Pipeline, copies: Sequence[Sequence[Replica]]) -> Pipeline:
    pairs = zip(pipeline.stages, copies, strict=True)
    stages = tuple(replace(stage, replicas=tuple(own)) for stage, own in pairs)
    return replace(pipeline, micro_batch=_taken_by(copies[0]), stages=stages)


CHIP_MOVES: dict[str, Callable[[Here], Moves]] = {
    "copies of stages": stage_copy_moves,
    "handed copies": handed_copy_moves,
    "dealt out": dealt_moves,
    "more stages": more_stage_moves,
    "idle pipelines": idle_pipeline_moves,
    "left out": left_out_moves,
    "apart": apart_moves,
}
