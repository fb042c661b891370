"""Single changes of how the batch is cut: any size of micro-batch, whole pipelines more or fewer.

A size need not divide the batch: what is left goes to another pipeline.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.edits import (
    copies_divided,
    divisors,
    pipeline_of_size,
    recut,
    sizes_of,
    ways_to_take,
    with_pipeline,
    without_shares,
)
from tutti.plan.plan import Pipeline, Plan, Replica

FACTORS = (1 / 3, 1 / 2, 2 / 3, 3 / 4, 4 / 3, 3 / 2, 2, 3)
STEPS = (-2, -1, 1, 2)
HANDED = (1, 2, 3, 4, 6, 8)  # sequences from one pipeline to another

Changes = Iterator[tuple[str, Plan | None]]


def _sizes(plan: Plan, model: ModelSpec) -> Changes:
    """Give a pipeline micro-batches of any size; another takes what is left, or gives it."""
    del model
    for p, pipeline in enumerate(plan.pipelines):
        size, total = pipeline.micro_batch, pipeline.sequences
        near = {size + step for step in STEPS} | {round(size * f) for f in FACTORS}
        near |= set(divisors(total))
        for wanted in sorted(near - {size}):
            if not 1 <= wanted <= total:
                continue
            for count in {total // wanted, -(-total // wanted)}:
                changed = pipeline_of_size(pipeline, wanted, count)
                if changed is None:
                    continue
                what = f"pipeline {p}: {count} × {wanted}"
                base = with_pipeline(without_shares(plan), p, changed)
                if wanted * count == total:
                    yield what, base
                else:
                    yield from _left_to_others(base, p, total - wanted * count, what)


def _left_to_others(plan: Plan, p: int, rest: int, what: str) -> Changes:
    for q, other in enumerate(plan.pipelines):
        if q == p:
            continue
        for taking in ways_to_take(other, other.sequences + rest):
            yield (
                f"{what}, pipeline {q}: {taking.micro_batches} × {taking.micro_batch}",
                with_pipeline(plan, q, taking),
            )


def _sequences(plan: Plan, model: ModelSpec) -> Changes:
    """Hand any number of sequences from one pipeline to another; both find sizes for theirs."""
    del model
    pairs = itertools.permutations(range(len(plan.pipelines)), 2)
    for (giving, taking), handed in itertools.product(pairs, HANDED):
        one, other = plan.pipelines[giving], plan.pipelines[taking]
        for less in ways_to_take(one, one.sequences - handed):
            for more in ways_to_take(other, other.sequences + handed):
                changed = with_pipeline(without_shares(plan), giving, less)
                yield (
                    f"{handed} from {giving} to {taking}: {less.micro_batch} and "
                    f"{more.micro_batch}",
                    with_pipeline(changed, taking, more),
                )


# --- whole pipelines -------------------------------------------------------------------------


def _fewer_pipelines(plan: Plan, model: ModelSpec) -> Changes:
    """Leave a pipeline out, or join two into one with the replicas of both."""
    plain = without_shares(plan)
    for p, q in itertools.permutations(range(len(plan.pipelines)), 2):
        gone, kept = plan.pipelines[p], plan.pipelines[q]
        for taking in ways_to_take(kept, gone.sequences + kept.sequences):
            chips = ChipSet.join(stage.chips for stage in gone.stages)
            rest = with_pipeline(plain, q, taking)
            idle = ChipSet.from_ids(sorted([*plan.idle, *chips]))
            yield f"without pipeline {p}, {q} takes its share", _leave_out(rest, p, idle)
        if len(gone.stages) != len(kept.stages) or any(s.experts for s in gone.stages):
            continue
        alike = recut(plan, p, sizes_of(kept), model)
        if alike is None:
            continue
        joined = _joined(kept, alike.pipelines[p])
        for whole in ways_to_take(joined, gone.sequences + kept.sequences):
            rest = with_pipeline(plain, q, whole)
            yield f"pipelines {q} and {p} as one", _leave_out(rest, p, plan.idle)


def _leave_out(plan: Plan, p: int, idle: ChipSet) -> Plan:
    pipelines = tuple(pipeline for i, pipeline in enumerate(plan.pipelines) if i != p)
    return replace(plan, pipelines=pipelines, idle=idle)


def _joined(one: Pipeline, other: Pipeline) -> Pipeline:
    stages = tuple(
        replace(stage, replicas=(*stage.replicas, *beside.replicas))
        for stage, beside in zip(one.stages, other.stages, strict=True)
    )
    return replace(one, micro_batch=one.micro_batch + other.micro_batch, stages=stages)


def _more_pipelines(plan: Plan, model: ModelSpec) -> Changes:
    """Let half of a pipeline's copies, or one of its replica groups, be a pipeline of its own."""
    del model
    plain = without_shares(plan)
    for p, pipeline in enumerate(plan.pipelines):
        if any(stage.experts for stage in pipeline.stages):
            continue
        for what, parts in _parts(pipeline):
            first, second = parts
            for moved in sorted({0, first.micro_batch, -first.micro_batch, second.micro_batch}):
                shares = (first.sequences + moved, second.sequences - moved)
                ways = [list(ways_to_take(x, n)) for x, n in zip(parts, shares, strict=True)]
                for one, other in itertools.product(*ways):
                    changed = with_pipeline(plain, p, one)
                    pipelines = (*changed.pipelines, other)
                    yield (
                        f"pipeline {p}: {what}, {one.micro_batches} × {one.micro_batch} and "
                        f"{other.micro_batches} × {other.micro_batch}",
                        replace(changed, pipelines=pipelines),
                    )


def _parts(pipeline: Pipeline) -> Iterator[tuple[str, tuple[Pipeline, Pipeline]]]:
    """Yield the ways to cut a pipeline into two that take equally large parts on all stages."""
    stages = pipeline.stages
    if all(r.count % 2 == 0 for stage in stages for r in stage.replicas):
        halves = [[_halves(replica) for replica in stage.replicas] for stage in stages]
        both = [[[pair[i] for pair in own] for own in halves] for i in (0, 1)]
        yield "halves", (_with_replicas(pipeline, both[0]), _with_replicas(pipeline, both[1]))
    groups = min(len(stage.replicas) for stage in stages)
    if groups > 1 and all(len(stage.replicas) == groups for stage in stages):
        for r in range(groups):
            own = [[stage.replicas[r]] for stage in stages]
            rest = [[x for i, x in enumerate(stage.replicas) if i != r] for stage in stages]
            if len({_sequences_of(replicas) for replicas in own}) == 1:
                parts = (_with_replicas(pipeline, own), _with_replicas(pipeline, rest))
                yield f"replicas {r} apart", parts


def _halves(replica: Replica) -> tuple[Replica, Replica]:
    first, second = copies_divided(
        replica, replica.count // 2, replica.sequences, replica.sequences
    )
    return first, second


def _sequences_of(replicas: Sequence[Replica]) -> int:
    return sum(replica.count * replica.sequences for replica in replicas)


def _with_replicas(pipeline: Pipeline, replicas: Sequence[Sequence[Replica]]) -> Pipeline:
    stages = tuple(
        replace(stage, replicas=tuple(own))
        for stage, own in zip(pipeline.stages, replicas, strict=True)
    )
    return replace(pipeline, micro_batch=_sequences_of(replicas[0]), stages=stages)


BATCH_CHANGES: dict[str, Callable[[Plan, ModelSpec], Changes]] = {
    "micro-batch sizes": _sizes,
    "sequences": _sequences,
    "fewer pipelines": _fewer_pipelines,
    "more pipelines": _more_pipelines,
}
