"""Plans that exporters are tried on: ten models × degrees, and ways to change a small one."""

from __future__ import annotations

from dataclasses import replace

from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.check import check_plan, embedded_model
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.plan import Plan, Stage
from tutti.plan.uniform import Degrees, uniform_plan

MODELS = (
    "llama-2-13b",
    "llama-3.1-70b",
    "gpt-3-175b",
    "qwen2.5-7b",
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "deepseek-v3",
    "mistral-7b",
    "glm-4.5-air",
    "smollm2-1.7b",
)
DEGREES = (
    "tp=1,pp=1,shard=1",
    "tp=2,pp=1,cp=2,sp=1,shard=3",
    "tp=4,pp=2,sp=1,shard=1,recompute=full",
    "tp=8,pp=4,sp=1,recompute=selective",
    "tp=2,pp=8,cp=2,sp=1,mbs=2",
)
EXPERT_DEGREES = ("tp=1,pp=4,ep=8,shard=1", "tp=4,pp=2,ep=8,sp=1,recompute=full")


def a800(nodes: int = 8) -> Cluster:
    pools = [{"name": "a800", "node": "HGX-A800", "nodes": nodes}]
    return Cluster.from_document({"name": "even", "pools": pools}, Place("even"))


def mixed() -> Cluster:
    pools = [
        {"name": "a800", "node": "HGX-A800", "nodes": 2},
        {"name": "p800", "node": "OAM-8xP800", "nodes": 2},
    ]
    return Cluster.from_document({"name": "mixed", "pools": pools}, Place("mixed"))


def uniform(name: str, text: str, *, cluster: Cluster | None = None, **job: object) -> Plan:
    model, degrees = load_model(name), Degrees.parse(text)
    cluster = cluster or a800()
    kind = ScheduleKind.INTERLEAVED if degrees.vpp > 1 else ScheduleKind.ONE_F_ONE_B
    given = {"sequence_length": 2048, "global_batch": 512, "schedule": kind, **job}
    return uniform_plan(model, cluster, Job(**given), degrees)  # type: ignore[arg-type]


def cases() -> list[tuple[str, str]]:
    """Every model with every strategy that suits it."""
    found = []
    for name in MODELS:
        model = load_model(name)
        degrees = DEGREES + (EXPERT_DEGREES if model.num_experts else ())
        for text in degrees:
            tp = Degrees.parse(text).tp
            if model.tensor_parallel_problem(tp) is None and model.num_layers >= 8:
                found.append((name, text))
    return found


def with_stage(plan: Plan, index: int, stage: Stage) -> Plan:
    """Return the plan with one stage replaced."""
    pipeline = plan.pipelines[0]
    stages = (*pipeline.stages[:index], stage, *pipeline.stages[index + 1 :])
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def with_replicas(plan: Plan, index: int | None = None, **changes: object) -> Plan:
    """Return the plan with fields of all replicas of one stage (or all) changed."""
    for number, stage in enumerate(plan.pipelines[0].stages):
        if index in (None, number):
            replicas = tuple(replace(replica, **changes) for replica in stage.replicas)  # type: ignore[arg-type]
            plan = with_stage(plan, number, replace(stage, replicas=replicas))
    return plan


def with_cuts(plan: Plan, *layers: int) -> Plan:
    """Return the plan with its blocks cut into so many per stage; dense ones have no experts."""
    model, bounds = embedded_model(plan), [1]
    for count in layers:
        bounds.append(bounds[-1] + count)
    bounds[0], bounds[-1] = 0, bounds[-1] + 1
    for index, stage in enumerate(plan.pipelines[0].stages):
        units = range(bounds[index], bounds[index + 1])
        blocks = (unit for unit in units if 1 <= unit <= model.num_layers)
        experts = stage.experts if any(model.block(unit).moe for unit in blocks) else ()
        changed = replace(stage, units=((units.start, units.stop),), experts=experts)
        plan = with_stage(plan, index, changed)
    assert check_plan(plan) == []
    return plan
