"""Plans for serving, small enough to read: one engine of each kind of pool, or separated roles."""

from __future__ import annotations

from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job
from tutti.plan.plan import Pipeline, Plan, Replica, Stage
from tutti.plan.serving import Engine, Lengths, Limits, Role, Route, Service, Traffic

CHAT = Traffic(
    prompt=Lengths(mean=161, sigma=1.0, longest=1024),
    output=Lengths(mean=200, sigma=0.8, longest=512),
    requests_per_s=8.0,
)
LIMITS = Limits(first_token_s=1.0, per_token_s=0.05)


def engine_pipeline(
    model: ModelSpec,
    chips: str,
    *,
    count: int = 1,
    tp: int = 1,
    slots: int = 64,
    pages: int = 4096,
    role: Role = Role.BOTH,
    share: float = 1.0,
    chunk: int = 2048,
    host_pages: int = 0,
) -> Pipeline:
    """Return `count` equal engines of one stage."""
    replica = Replica(chips=ChipSet.of(chips), count=count, tp=tp, sequences=slots)
    return Pipeline(
        micro_batch=count * slots,
        micro_batches=1,
        stages=(Stage(units=((0, model.num_units),), replicas=(replica,)),),
        engine=Engine(role=role, pages=pages, share=share, chunk=chunk, host_pages=host_pages),
    )


def serving_plan(
    *pipelines: Pipeline,
    model: ModelSpec,
    cluster: Cluster,
    routes: tuple[Route, ...] = (),
    traffic: Traffic = CHAT,
    limits: Limits = LIMITS,
    longest: int = 2048,
) -> Plan:
    """Return a plan that serves with some engines."""
    return Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(cluster),
        job=Job(
            sequence_length=longest,
            global_batch=sum(pipeline.sequences for pipeline in pipelines),
            serving=Service(traffic=traffic, limits=limits),
        ),
        pipelines=pipelines,
        routes=routes,
    )


def mixed_plan() -> Plan:
    """Return engines of two kinds that do both."""
    model, cluster = load_model("qwen3-8b"), Cluster.load("small-mixed")
    return serving_plan(
        engine_pipeline(model, "h100/0/0-1", count=2, share=0.7),
        engine_pipeline(model, "a100/0/0-1", tp=2, slots=32, share=0.3),
        model=model,
        cluster=cluster,
    )


def separated_plan() -> Plan:
    """Return prefill on one kind of chip, decode on another."""
    model, cluster = load_model("qwen3-8b"), Cluster.load("small-mixed")
    return serving_plan(
        engine_pipeline(model, "h100/0/0", role=Role.PREFILL, slots=16),
        engine_pipeline(model, "a100/0/0-1", count=2, role=Role.DECODE, share=0.0),
        model=model,
        cluster=cluster,
        routes=(Route(prefill=0, decode=1),),
    )
