"""Search results made by hand: real plans, really estimated, held against each other."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job
from tutti.plan.plan import Offload, Pipeline, Plan, Recompute, Replica, Stage, Synchronisation
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.search.answer.result import Alone, ProvenPlan, Pruned, SearchResult
from tutti.simulate.estimate import estimate


@dataclass(frozen=True)
class Case:
    """What a page or an explanation is made from."""

    result: SearchResult
    model: ModelSpec
    cluster: Cluster


def settle(plan: Plan, model: ModelSpec, cluster: Cluster, summary: str) -> ProvenPlan:
    return ProvenPlan(plan=plan, estimate=estimate(plan, model, cluster), summary=summary)


def uniform_proven(model: ModelSpec, cluster: Cluster, job: Job, degrees: str) -> ProvenPlan:
    plan = uniform_plan(model, cluster, job, Degrees.parse(degrees))
    return settle(plan, model, cluster, f"uniform {degrees.replace(',', ' ')}")


def mixed_plan(
    model: ModelSpec, cluster: Cluster, job: Job, pipelines: tuple[Pipeline, ...], **rest: object
) -> Plan:
    rule = Synchronisation(units=(0, model.num_units), shard_level=1)
    return Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(cluster),
        job=job,
        pipelines=pipelines,
        synchronisation=(rule,),
        **rest,  # type: ignore[arg-type]
    )


@functools.cache
def small_case() -> Case:
    """Return Llama-2-13B on 8 A800 + 8 V100, cut unevenly, with everything to compare."""
    model, cluster = load_model("llama-2-13b"), Cluster.load("S16")
    job = Job(sequence_length=4096, global_batch=512)
    stages = tuple(
        Stage(
            units=(units,),
            replicas=(
                Replica(
                    chips=ChipSet.of(chips),
                    tp=4,
                    sequence_parallel=True,
                    recompute=Recompute(full=((1, 12),)) if units[0] == 0 else Recompute(),
                ),
            ),
        )
        for units, chips in (
            ((0, 17), "a800/0/0-3"),
            ((17, 33), "a800/0/4-7"),
            ((33, 38), "v100/0/0-3"),
            ((38, 42), "v100/0/4-7"),
        )
    )
    pipeline = Pipeline(micro_batch=1, micro_batches=512, stages=stages)
    best = settle(mixed_plan(model, cluster, job, (pipeline,)), model, cluster, "4 uneven stages")
    uniform = uniform_proven(model, cluster, job, "tp=4,pp=4,sp=1,shard=1")
    rival = uniform_proven(model, cluster, job, "tp=8,pp=2,sp=1,shard=1")
    alone = {}
    for pool, batch, degrees in (("a800", 376, "tp=4,pp=2,sp=1"), ("v100", 136, "tp=8,pp=1,sp=1")):
        part = replace(cluster, pools=(cluster.pool(pool),), fabric=type(cluster.fabric)())
        found = uniform_proven(model, part, replace(job, global_batch=batch), degrees)
        alone[pool] = Alone(pool=pool, global_batch=batch, proven=found, fits=found.estimate.fits)
    result = SearchResult(
        best=best,
        lower_bound_seconds=best.step_seconds * 0.965,
        search_cpu_seconds=0.74,
        runner_up=rival,
        why_runner_up_lost="its all-reduce of tensor slices crosses both groups of V100 links",
        uniform=uniform,
        alone=alone,
        pruned=(
            Pruned(what="orders of pools", by="the compute bound", count=18, bound_seconds=140.0),
            Pruned(what="tensor widths", by="memory", count=7),
        ),
        work={"priced": 4_212, "simulated": 6},
    )
    return Case(result, model, cluster)


@functools.cache
def crowded_case() -> Case:
    """Return a plan whose table of stages has all columns, with long texts in them."""
    model, cluster = load_model("llama-2-13b"), Cluster.load("S16")
    job = Job(sequence_length=4096, global_batch=32)
    bounds = (0, 6, 11, 16, 21, 26, 32, 37, 42)
    stages = []
    for index, units in enumerate(itertools.pairwise(bounds)):
        blocks = range(max(1, units[0]), min(41, units[1]))
        spread = tuple((unit, unit + 1) for unit in blocks[::2])
        pool, first = ("a800", 2 * index) if index < 4 else ("v100", 2 * (index - 4))
        replica = Replica(
            chips=ChipSet.of(f"{pool}/0/{first}-{first + 1}"),
            tp=2,
            sequence_parallel=True,
            recompute=Recompute(full=spread),
            offload=Offload(optimizer=(units,)),
        )
        stages.append(Stage(units=(units,), replicas=(replica,)))
    pipeline = Pipeline(micro_batch=1, micro_batches=32, stages=tuple(stages))
    best = settle(mixed_plan(model, cluster, job, (pipeline,)), model, cluster, "8 stages")
    result = SearchResult(
        best=best, lower_bound_seconds=best.step_seconds * 0.9, search_cpu_seconds=0.2
    )
    return Case(result, model, cluster)


@functools.cache
def pipelines_case() -> Case:
    """Return Llama-3.2-1B on three pools: two pipelines, a mixed stage, chips left out."""
    model, cluster = load_model("llama-3.2-1b"), Cluster.load("small-mixed")
    job = Job(sequence_length=4096, global_batch=64)
    fast = Stage(
        units=((0, 18),),
        replicas=(
            Replica(chips=ChipSet.of("h100/0/0-7"), count=4, tp=2, sequences=2),
            Replica(chips=ChipSet.of("a100/0/0-3"), count=2, tp=2, sequences=1),
        ),
    )
    slow = tuple(
        Stage(units=(units,), replicas=(Replica(chips=ChipSet.of(chips), count=2, tp=2, cp=2),))
        for units, chips in (((0, 9), "a100/1/0-7"), ((9, 18), "p800/0/0-7"))
    )
    pipelines = (
        Pipeline(micro_batch=10, micro_batches=6, stages=(fast,)),
        Pipeline(micro_batch=2, micro_batches=2, stages=slow),
    )
    plan = mixed_plan(
        model, cluster, job, pipelines, tied_owner=0,
        idle=ChipSet.of("a100/0/4-6"), spare=ChipSet.of("a100/0/7"),
    )  # fmt: skip
    best = settle(plan, model, cluster, "2 pipelines")
    result = SearchResult(
        best=best,
        lower_bound_seconds=best.step_seconds,
        search_cpu_seconds=0.2,
        uniform_missing="no degree divides 8, 16 and 8 chips and keeps each replica in one pool",
        alone_missing={"p800": "the search was asked to skip it"},
        interrupted=True,
    )
    return Case(result, model, cluster)


@functools.cache
def large_case() -> Case:
    """Return a GPT of 10¹² parameters on 16,384 chips of three kinds in 64 stages."""
    model, cluster = load_model("gpt-1t"), Cluster.load("H16384")
    job = Job(sequence_length=2048, global_batch=16384)
    best = uniform_proven(model, cluster, job, "tp=8,pp=64,sp=1,shard=1,recompute=full")
    result = SearchResult(
        best=best,
        lower_bound_seconds=best.step_seconds * 0.9,
        search_cpu_seconds=48.0,
        uniform=best,
        alone_missing={pool.name: "not part of this test" for pool in cluster.pools},
    )
    return Case(result, model, cluster)
