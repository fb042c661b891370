"""The part of the checker that looks at serving: engines, their shares, roles and routes."""

from __future__ import annotations

from collections.abc import Iterator

from tutti.plan.check_sharing import Case
from tutti.plan.check_stage import Problem
from tutti.plan.plan import Offload, Pipeline, Recompute, Replica
from tutti.plan.serving import Engine, Role, Service

TOLERANCE = 1e-3  # of shares that are to make up a whole


def check_serving(case: Case) -> Iterator[Problem]:
    """Yield what is wrong of a plan as a deployment; of one for training, that it is none."""
    plan, service = case.plan, case.plan.job.serving
    if service is None:
        for p, pipeline in enumerate(plan.pipelines):
            if pipeline.engine is not None:
                message = "has an engine, but the job does not serve; give the job 'serving'"
                yield Problem("engine", f"pipeline {p}", message)
        if plan.routes:
            yield Problem("routes", "routes", "are given, but the job does not serve")
        return
    yield from _service(case, service)
    for p, pipeline in enumerate(plan.pipelines):
        yield from _engine(f"pipeline {p}", pipeline, plan.job.sequence_length)
    if plan.synchronisation:
        message = "is given, but nothing is trained; leave it out"
        yield Problem("synchronisation", "synchronisation", message)
    if all(pipeline.engine is not None for pipeline in plan.pipelines):
        yield from _shares(case)
        yield from _routes(case)


def _service(case: Case, service: Service) -> Iterator[Problem]:
    longest, length = service.traffic.longest, case.plan.job.sequence_length
    if longest > length:
        message = (
            f"requests have up to {service.traffic.prompt.longest:,} + "
            f"{service.traffic.output.longest:,} tokens; sequence_length is {length:,}"
        )
        yield Problem("length", "job, serving", message)
    if service.traffic.shared_prefix >= service.traffic.prompt.longest:
        message = (
            f"shared_prefix is {service.traffic.shared_prefix:,} tokens; prompts have at most "
            f"{service.traffic.prompt.longest:,}"
        )
        yield Problem("length", "job, serving", message)


def _engine(where: str, pipeline: Pipeline, length: int) -> Iterator[Problem]:
    engine = pipeline.engine
    if engine is None:
        yield Problem("engine", where, "has no 'engine', which a job that serves needs")
        return
    counts = {stage.num_replicas for stage in pipeline.stages}
    if len(counts) > 1 or any(len(stage.replicas) != 1 for stage in pipeline.stages):
        message = (
            "an engine has one replica of each stage; equal engines are written as its 'count', "
            "which is the same in all stages"
        )
        yield Problem("engine", where, message)
        return
    for s, stage in enumerate(pipeline.stages):
        problem = _training_only(stage.replicas[0])
        if problem is not None:
            yield Problem("engine", f"{where}, stage {s}", f"{problem} is for training; drop it")
    held = engine.pages // pipeline.micro_batches * engine.page_size
    if held < length:
        message = (
            f"{engine.pages:,} pages of {engine.page_size} for {pipeline.micro_batches} steps "
            f"under way hold {held:,} tokens each; one sequence may have {length:,}"
        )
        yield Problem("pages", where, message)
    if engine.role is Role.DECODE and engine.share:
        message = "share is for engines that requests come to; of decode engines the routes say it"
        yield Problem("shares", where, message)


def _training_only(replica: Replica) -> str | None:
    if replica.cp > 1:
        return f"cp {replica.cp}"
    if replica.sequence_parallel or replica.tp_overlap_chunks > 1:
        return "sequence_parallel or tp_overlap_chunks"
    if replica.recompute != Recompute():
        return "recompute"
    return "offload" if replica.offload != Offload() else None


def _engines(case: Case) -> list[Engine]:
    return [pipeline.engine for pipeline in case.plan.pipelines if pipeline.engine is not None]


def _shares(case: Case) -> Iterator[Problem]:
    total = sum(engine.share for engine in _engines(case) if engine.role is not Role.DECODE)
    if abs(total - 1.0) > TOLERANCE:
        message = f"the engines that requests come to take {total:.4g} of them; must be 1"
        yield Problem("shares", "pipelines", message)


def _routes(case: Case) -> Iterator[Problem]:
    engines = _engines(case)
    out, fed = [0.0] * len(engines), [False] * len(engines)
    for index, route in enumerate(case.plan.routes):
        where = f"routes[{index}]"
        for name, number, role in (
            ("prefill", route.prefill, Role.PREFILL),
            ("decode", route.decode, Role.DECODE),
        ):
            if number >= len(engines):
                message = f"{name} is {number}; there are pipelines 0-{len(engines) - 1}"
                yield Problem("routes", where, message)
                return
            if engines[number].role is not role:
                message = f"{name} is pipeline {number}, whose role is '{engines[number].role}'"
                yield Problem("routes", where, message)
                return
        out[route.prefill] += route.share
        fed[route.decode] = True
    for p, engine in enumerate(engines):
        if engine.role is Role.PREFILL and abs(out[p] - 1.0) > TOLERANCE:
            message = f"its routes carry {out[p]:.4g} of what it began; must be 1"
            yield Problem("routes", f"pipeline {p}", message)
        if engine.role is Role.DECODE and not fed[p]:
            yield Problem("routes", f"pipeline {p}", "no route leads to it")
