"""Moves of a local search over Plans: any size of micro-batch, chips that change places, shards.

Sizes that share a batch out evenly need not divide it: what one pipeline leaves another takes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tutti.models.parameters import ParameterClass
from tutti.plan.chips import ChipSet
from tutti.plan.edits import (
    divisors,
    pipeline_of_size,
    recut,
    sizes_of,
    ways_to_take,
    with_pipeline,
    with_replica,
    with_stage,
    without_shares,
)
from tutti.plan.plan import Pipeline, Plan, Share, Stage
from tutti.plan.schedules import schedule_record
from tutti.search.improve.plan_moves import Here, Moves

STEPS = (1, -1, 2, -2)  # sequences of a micro-batch
FACTORS = (4 / 3, 3 / 4, 3 / 2, 2 / 3)  # of its size, beside those that divide it
HANDED = (1, 2, 3, 4, 6, 8)  # sequences from one pipeline to another
WEIGHTS = (0, 1, 4)  # of a pool in a shard, beside 2 of the others
PASSES = ("backward_input", "backward_weight", "forward")


def size_moves(here: Here) -> Moves:
    """Give a pipeline micro-batches of any size near its own; another takes what is left."""
    plan = here.plan
    plain = without_shares(plan)
    for p, pipeline in enumerate(plan.pipelines):
        size, total = pipeline.micro_batch, pipeline.sequences
        near = [size + step for step in STEPS] + [round(size * factor) for factor in FACTORS]
        near += sorted(divisors(total), key=lambda n: (abs(math.log(n / size)), n))[1:7]
        for wanted in dict.fromkeys(n for n in near if 1 <= n <= total and n != size):
            for count in dict.fromkeys((total // wanted, -(-total // wanted))):
                changed = pipeline_of_size(pipeline, wanted, count)
                if changed is None:
                    continue
                moved, rest = with_pipeline(plain, p, changed), total - wanted * count
                if not rest:
                    yield moved
                    continue
                for q, other in enumerate(plan.pipelines):
                    if q != p:
                        for taking in ways_to_take(other, other.sequences + rest, 1):
                            yield with_pipeline(moved, q, taking)


def sequence_moves(here: Here) -> Moves:
    """Hand any number of sequences from one pipeline to another, each with a size that suits."""
    plan = here.plan
    plain = without_shares(plan)
    pairs = itertools.permutations(range(len(plan.pipelines)), 2)
    for handed, (giving, taking) in itertools.product(HANDED, list(pairs)):
        one, other = plan.pipelines[giving], plan.pipelines[taking]
        for less in ways_to_take(one, one.sequences - handed):
            for more in ways_to_take(other, other.sequences + handed):
                yield with_pipeline(with_pipeline(plain, giving, less), taking, more)


def join_moves(here: Here) -> Moves:
    """Make two pipelines of equally many stages one, with the replicas of both."""
    plan, model = without_shares(here.plan), here.problem.model
    for p, q in itertools.permutations(range(len(plan.pipelines)), 2):
        gone, kept = plan.pipelines[p], plan.pipelines[q]
        if len(gone.stages) != len(kept.stages) or any(s.experts for s in gone.stages):
            continue
        alike = recut(plan, p, sizes_of(kept), model)
        if alike is None:
            continue
        pairs = zip(kept.stages, alike.pipelines[p].stages, strict=True)
        stages = [replace(a, replicas=(*a.replicas, *b.replicas)) for a, b in pairs]
        size = kept.micro_batch + gone.micro_batch
        joined = replace(kept, micro_batch=size, stages=tuple(stages))
        for whole in ways_to_take(joined, gone.sequences + kept.sequences):
            moved = with_pipeline(plan, q, whole)
            others = tuple(x for i, x in enumerate(moved.pipelines) if i != p)
            yield replace(moved, pipelines=others)


def copy_moves(here: Here) -> Moves:
    """Give a pipeline copies more on idle chips, or fewer; each has as much to do, or they share.

    What it then takes more of the batch another pipeline gives.
    """
    plan = without_shares(here.plan)
    for p, pipeline in enumerate(plan.pipelines):
        stages = pipeline.stages
        if any(len(stage.replicas) > 1 or stage.experts for stage in stages):
            continue
        for more in _copies_more(here, p):
            changed = _with_copies(plan, p, more)
            if changed is None:
                continue
            taken, share = changed.pipelines[p], more / stages[0].num_replicas
            yield from _taking(changed, p, pipeline, taken, 0)
            for q, other in enumerate(plan.pipelines):
                if q != p:
                    handed = round(share * pipeline.sequences)
                    for less in ways_to_take(other, other.sequences - handed, 1):
                        moved = with_pipeline(changed, q, less)
                        yield from _taking(moved, p, pipeline, taken, handed)


def _copies_more(here: Here, p: int) -> list[int]:
    """Return how many copies more or fewer a pipeline may have: all of the idle chips first."""
    replicas = [stage.replicas[0] for stage in here.plan.pipelines[p].stages]
    idle, wanted = Counter(chip.pool for chip in here.plan.idle), Counter[str]()
    for replica in replicas:
        wanted[replica.chips.pools[0]] += replica.width
    most = min(idle[pool] // width for pool, width in wanted.items())
    fewest = min(replica.count for replica in replicas) - 1
    return [n for n in dict.fromkeys((most, most // 2, 1)) if 0 < n <= most] + [-1] * (fewest > 0)


def _with_copies(plan: Plan, p: int, more: int) -> Plan | None:
    """Return the plan whose pipeline has other numbers of copies; its batch is not right yet."""
    free = list(plan.idle)
    stages: list[Stage] = []
    for stage in plan.pipelines[p].stages:
        replica = stage.replicas[0]
        pool, count = replica.chips.pools[0], replica.count + more
        added = [chip for chip in free if chip.pool == pool][: max(0, more) * replica.width]
        chips = [*replica.chips, *added][: count * replica.width]
        free = [chip for chip in (*free, *replica.chips) if chip not in set(chips)]
        taken = replace(replica, count=count, chips=ChipSet.from_ids(chips))
        stages.append(replace(stage, replicas=(taken,)))
    sizes = {stage.num_replicas * stage.replicas[0].sequences for stage in stages}
    if len(sizes) > 1:
        return None
    changed = replace(plan.pipelines[p], micro_batch=sizes.pop(), stages=tuple(stages))
    return replace(with_pipeline(plan, p, changed), idle=ChipSet.from_ids(sorted(set(free))))


def _taking(plan: Plan, p: int, before: Pipeline, taken: Pipeline, more: int) -> Moves:
    for whole in ways_to_take(taken, before.sequences + more):
        yield with_pipeline(plan, p, whole)


def place_moves(here: Here) -> Moves:
    """Let two replica groups change their chips: of one pool, or equally many of another."""
    plan = here.plan
    groups = [
        ((p, s, r), replica)
        for p, s, stage in plan.stages()
        for r, replica in enumerate(stage.replicas)
    ]
    for (at, one), (to, other) in itertools.combinations(groups, 2):
        alike = one.chips.pools == other.chips.pools
        if at[:2] == to[:2] or not (alike or one.num_chips == other.num_chips):
            continue
        chips = [*other.chips, *one.chips]
        first = ChipSet.from_ids(chips[: one.num_chips])
        second = ChipSet.from_ids(chips[one.num_chips :])
        changed = with_replica(plan, at, replace(one, chips=first))
        yield with_replica(changed, to, replace(other, chips=second))


def shard_share_moves(here: Here) -> Moves:
    """Let the chips of one pool hold more of every shard than the others, less, or nothing."""
    plan, units = here.plan, here.problem.model.num_units
    dense = replace(plan.synchronisation_of(1, ParameterClass.DENSE), units=(0, units), shares=())
    kept = [r for r in plan.synchronisation if r.parameter_class is not ParameterClass.DENSE]
    places = [
        ((p, s, r), replica.chips.pools[0])
        for p, s, stage in plan.stages()
        for r, replica in enumerate(stage.replicas)
    ]
    pools = sorted({pool for _, pool in places})
    if dense.shard_level == 0 or len(pools) == 1:
        return
    for weight, pool in itertools.product(WEIGHTS, pools):
        shares = tuple(
            Share(pipeline=p, stage=s, replica=r, weight=weight if own == pool else 2)
            for (p, s, r), own in places
        )
        yield replace(plan, synchronisation=(replace(dense, shares=shares), *kept))


def order_time_moves(here: Here) -> Moves:
    """Tell a schedule that puts weight passes off other relative times of a stage."""
    plan = here.plan
    if not schedule_record(plan.job.schedule).delays_weights:
        return
    for name, factor in itertools.product(PASSES, (0.5, 2.0)):
        for p, s, stage in plan.stages():
            if len(plan.pipelines[p].stages) > 1:
                time = factor * getattr(stage.order, name)
                order = replace(stage.order, **{name: time})
                yield with_stage(plan, p, s, replace(stage, order=order))


BATCH_MOVES: dict[str, Callable[[Here], Moves]] = {
    "sizes": size_moves,
    "sequences": sequence_moves,
    "joined": join_moves,
    "copies": copy_moves,
    "places": place_moves,
    "shard shares": shard_share_moves,
    "order times": order_time_moves,
}
