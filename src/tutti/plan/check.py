"""The checker: every inconsistency of a Plan, each in one helpful line.

It answers whether a Plan means something on its model and cluster. Whether it *fits* is the cost
model's question, whether its lists can hang the schedule's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from tutti.errors import InputError, hint
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.models.lengths import length_refusal
from tutti.models.spec import ModelSpec
from tutti.plan.check_serving import check_serving
from tutti.plan.check_sharing import CHECKS_OF_SHARING, Case
from tutti.plan.check_stage import Problem, check_stage
from tutti.plan.chips import ChipSet
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Pipeline, Plan, chunks
from tutti.plan.schedules import kinds_with, schedule_record, warm_up_depth


def check_plan(
    plan: Plan, model: ModelSpec | None = None, cluster: Cluster | None = None
) -> list[Problem]:
    """Return all problems of a plan; model and cluster default to the embedded ones."""
    case = Case(plan, model or embedded_model(plan), cluster or embedded_cluster(plan))
    checks: tuple[Callable[[Case], Iterator[Problem]], ...] = (
        _references,
        _length,
        _wide_units,
        _batches,
        _units,
        _warm_up,
        _canonical,
        _chips,
        _stages,
        check_serving,
        *CHECKS_OF_SHARING,
    )
    return [problem for check in checks for problem in check(case)]


def require_valid(
    plan: Plan, model: ModelSpec | None = None, cluster: Cluster | None = None
) -> None:
    """Raise an InputError that names the first problem and counts the others."""
    problems = check_plan(plan, model, cluster)
    if problems:
        more = f" (and {len(problems) - 1} more; `tutti show` lists them)" if problems[1:] else ""
        raise InputError(f"plan: {problems[0]}{more}")


def embedded_model(plan: Plan) -> ModelSpec:
    """Return the model that the plan carries."""
    if plan.model.spec is None:
        raise InputError(
            f"plan: the model '{plan.model.name}' is not embedded in this plan; make the plan again"
        )
    return plan.model.spec


def embedded_cluster(plan: Plan) -> Cluster:
    """Return the cluster that the plan carries."""
    if plan.cluster.cluster is None:
        raise InputError(
            f"plan: the cluster '{plan.cluster.name}' is not embedded in this plan; make it again"
        )
    return plan.cluster.cluster


class _Same:
    """An object as a key by what it is, not by what it is equal to."""

    def __init__(self, value: ModelSpec | Cluster) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


@functools.lru_cache(maxsize=16)
def _fingerprint(same: _Same) -> str:
    """Return a description's hash; a search asks for the same one thousands of times."""
    value = same.value
    return value.fingerprint if isinstance(value, ModelSpec) else value.fingerprint()


def _references(case: Case) -> Iterator[Problem]:
    plan = case.plan
    for what, said, actual in (
        ("model", plan.model.hash, _fingerprint(_Same(case.model))),
        ("cluster", plan.cluster.hash, _fingerprint(_Same(case.cluster))),
    ):
        if said and said != actual:
            yield Problem(
                "reference", what, f"has the hash {actual}, but the plan was made for {said}"
            )
    pools = [pool.name for pool in case.cluster.pools]
    for profile in plan.profiles:
        if profile.pool not in pools:
            message = f"names pool '{profile.pool}'; {hint(profile.pool, pools)}"
            yield Problem("reference", f"profile '{profile.name}'", message)


def _length(case: Case) -> Iterator[Problem]:
    problem = length_refusal(case.model, case.plan.job.sequence_length)
    if problem:
        yield Problem("length", "job, sequence_length", problem)


def _wide_units(case: Case) -> Iterator[Problem]:
    """Only blocks of a job in 8 bits can be told to stay wide."""
    job, last = case.plan.job, case.model.head_unit - 1
    for start, stop in job.wide_units:
        if job.precision.compute is not Dtype.FP8:
            message = (
                f"the job computes in {job.precision.compute}, no block is narrow: leave it out"
            )
            yield Problem("precision", "job, wide_units", message)
            return
        if not 1 <= start < stop <= last + 1:
            message = f"[{start}, {stop}) are not blocks: {case.model.name} has 1 to {last}"
            yield Problem("precision", "job, wide_units", message)


def _batches(case: Case) -> Iterator[Problem]:
    plan = case.plan
    if not plan.pipelines:
        yield Problem("empty", "plan", "has no pipeline")
        return
    for p, pipeline in enumerate(plan.pipelines):
        if not pipeline.stages:
            yield Problem("empty", f"pipeline {p}", "has no stage")
        for s, stage in enumerate(pipeline.stages):
            total = sum(replica.count * replica.sequences for replica in stage.replicas)
            if stage.replicas and total != pipeline.micro_batch:
                yield Problem(
                    "shares",
                    f"pipeline {p}, stage {s}",
                    f"its replicas take {total} sequences of each micro-batch, "
                    f"which has {pipeline.micro_batch}",
                )
    total = sum(pipeline.sequences for pipeline in plan.pipelines)
    if total != plan.job.global_batch:
        terms = " + ".join(f"{p.micro_batch}·{p.micro_batches}" for p in plan.pipelines)
        yield Problem(
            "batch",
            "job",
            f"global_batch is {plan.job.global_batch}, the pipelines do {terms} = {total}",
        )


# --- units -----------------------------------------------------------------------------------


def _units(case: Case) -> Iterator[Problem]:
    for p, pipeline in enumerate(case.plan.pipelines):
        where = f"pipeline {p}"
        empty = [
            (s, span)
            for s, stage in enumerate(pipeline.stages)
            for span in stage.units or ((0, 0),)
            if span[0] >= span[1]
        ]
        for s, (start, stop) in empty:
            yield Problem("units", f"{where}, stage {s}", f"the unit range {start}-{stop} is empty")
        if empty or not pipeline.stages:
            continue
        yield from _coverage(where, pipeline, case.model.num_units)
        yield from _shape(where, pipeline, case.plan.job.schedule)


def _coverage(where: str, pipeline: Pipeline, num_units: int) -> Iterator[Problem]:
    reached = 0
    for start, stop, stage in chunks(pipeline):
        if start > reached:
            yield Problem("units", where, f"no stage holds units {reached}-{start - 1}")
        elif start < reached:
            again = f"units {start}-{min(reached, stop) - 1} again; a unit belongs to one stage"
            yield Problem("units", f"{where}, stage {stage}", f"holds {again}")
        reached = max(reached, stop)
    if reached < num_units:
        yield Problem("units", where, f"no stage holds units {reached}-{num_units - 1}")
    elif reached > num_units:
        message = f"holds units up to {reached - 1}; the model has units 0-{num_units - 1}"
        yield Problem("units", where, message)


def _shape(where: str, pipeline: Pipeline, kind: ScheduleKind) -> Iterator[Problem]:
    """Check that the chunks lie on the stages the way the schedule visits them."""
    visits = [chunk.stage for chunk in chunks(pipeline)]
    num_stages = len(pipeline.stages)
    if not schedule_record(kind).several_ranges:
        if visits != list(range(num_stages)):
            able = "' or '".join(kinds_with(lambda record: record.several_ranges))
            yield Problem(
                "interleave",
                where,
                f"schedule '{kind}' wants one unit range per stage, in the order of the stages; "
                f"use '{able}' for several",
            )
        return
    rounds, rest = divmod(len(visits), num_stages)
    if rest or visits != list(range(num_stages)) * rounds:
        yield Problem(
            "interleave",
            where,
            f"schedule '{kind}' visits the stages in turn: every stage needs equally many "
            "unit ranges, rising in the order of the stages",
        )


def _warm_up(case: Case) -> Iterator[Problem]:
    kind = case.plan.job.schedule
    record = schedule_record(kind)
    for p, pipeline in enumerate(case.plan.pipelines):
        if not record.sets_warm_up and any(stage.order.warm_up for stage in pipeline.stages):
            message = f"warm_up is fixed by schedule '{kind}'; leave it out"
            yield Problem("warm_up", f"pipeline {p}", message)
        if record.delays_weights or not record.sets_warm_up:
            continue
        depths = [warm_up_depth(pipeline, s, kind) for s in range(len(pipeline.stages))]
        for s, (before, after) in enumerate(itertools.pairwise(depths)):
            if after > before:
                yield Problem(
                    "warm_up",
                    f"pipeline {p}, stage {s + 1}",
                    f"warm-up {after} is deeper than the {before} of the stage before it; "
                    "it would wait for ever",
                )


def _canonical(case: Case) -> Iterator[Problem]:
    """Check that what could be replicas is.

    Levels 2 and 3 shard inside a pipeline: pipelines of one cut and count may be apart there.
    """
    if any(rule.shard_level >= 2 for rule in case.plan.synchronisation):
        return
    seen: dict[object, int] = {}
    for p, pipeline in enumerate(case.plan.pipelines):
        cut = tuple(stage.units for stage in pipeline.stages)
        key: tuple[object, ...] = (cut, pipeline.micro_batches)
        if pipeline.engine is not None:  # equal engines are copies of one
            chips = [(r.tp, r.chips.pools) for stage in pipeline.stages for r in stage.replicas]
            slots = pipeline.slots if cut else 0
            key = (*key, slots, replace(pipeline.engine, share=0.0), tuple(chips))
        if key in seen:
            message = f"has the cut and the counts of pipeline {seen[key]}; make them replicas"
            yield Problem("canonical", f"pipeline {p}", message)
        seen.setdefault(key, p)


# --- chips -----------------------------------------------------------------------------------


def _chips(case: Case) -> Iterator[Problem]:
    used: dict[Position, str] = {}
    for where, chips in _chip_sets(case.plan):
        unknown = _unknown_chip(chips, case.cluster)
        if unknown is not None:
            yield Problem("chip", where, unknown)
            continue
        for chip in chips:
            other = used.setdefault(chip, where)
            if other is not where:
                message = f"chip {chip} is used already by {other}"
                yield Problem("chip_twice", where, message)
                break
        if len(set(chips)) != len(chips):
            yield Problem("chip_twice", where, f"'{chips}' names a chip twice")


def _chip_sets(plan: Plan) -> Iterator[tuple[str, ChipSet]]:
    for p, s, stage in plan.stages():
        for r, replica in enumerate(stage.replicas):
            yield f"pipeline {p}, stage {s}, replica {r}", replica.chips
    yield "idle", plan.idle
    yield "spare", plan.spare


def _unknown_chip(chips: ChipSet, cluster: Cluster) -> str | None:
    pools = {pool.name: pool for pool in cluster.pools}
    for r in chips.ranges:
        if r.pool not in pools:
            return f"chips '{r}': no pool '{r.pool}'; {hint(r.pool, pools)}"
        nodes, slots = pools[r.pool].nodes, pools[r.pool].node.num_chips
        if r.last_node >= nodes or r.last_slot >= slots:
            return f"chips '{r}': pool '{r.pool}' has nodes 0-{nodes - 1} with slots 0-{slots - 1}"
    return None


def _stages(case: Case) -> Iterator[Problem]:
    for p, s, stage in case.plan.stages():
        where = f"pipeline {p}, stage {s}"
        yield from check_stage(where, stage, case.plan.job, case.model, case.cluster)
