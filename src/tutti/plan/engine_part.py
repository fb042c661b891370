"""One engine of a Plan that serves, as a Plan of its own: one copy of its stages, ranks from 0."""

from __future__ import annotations

from dataclasses import replace

from tutti.errors import InputError
from tutti.plan.chips import NO_CHIPS
from tutti.plan.plan import Plan, Stage


def num_engines(plan: Plan) -> int:
    """Return how many engines a plan has, equal ones counted each."""
    return sum(pipeline.copies for pipeline in plan.pipelines)


def pipeline_of(plan: Plan, engine: int) -> tuple[int, int]:
    """Return an engine's pipeline, and which of its equal copies it is."""
    left = engine
    for number, pipeline in enumerate(plan.pipelines):
        if left < pipeline.copies:
            return number, left
        left -= pipeline.copies
    raise InputError(f"plan: has {num_engines(plan)} engines; there is no engine {engine}")


def engine_part(plan: Plan, engine: int) -> Plan:
    """Return the plan of one engine alone."""
    number, copy = pipeline_of(plan, engine)
    pipeline = plan.pipelines[number]
    own = replace(
        pipeline,
        micro_batch=pipeline.micro_batch // pipeline.copies,
        stages=tuple(_one(stage, copy) for stage in pipeline.stages),
    )
    return replace(plan, pipelines=(own,), routes=(), idle=NO_CHIPS, spare=NO_CHIPS)


def _one(stage: Stage, copy: int) -> Stage:
    (replica,) = stage.replicas
    chips = replica.chips.cut(copy * replica.width, (copy + 1) * replica.width)
    return replace(stage, replicas=(replace(replica, chips=chips, count=1),))
