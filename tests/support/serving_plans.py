"""Placements for serving: one pipeline of stages with unlike layers and ranks."""

from __future__ import annotations

from typing import Any

from tests.support.plans import NODES, Allocator
from tutti.models import ModelSpec
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import PRECISIONS, Job
from tutti.plan.plan import Pipeline, Plan, Replica, Stage


def placement(spec: ModelSpec, *stages: tuple[tuple[int, int], int], **replica: Any) -> Plan:
    """Return a plan of stages, each given by its units and its tensor-parallel ranks."""
    chips, pools = Allocator(), list(NODES)
    made = tuple(
        Stage(
            units=(units,),
            replicas=(Replica(chips=chips.take(pools[n % len(pools)], tp), tp=tp, **replica),),
        )
        for n, (units, tp) in enumerate(stages)
    )
    return Plan(
        model=refer_to_model(spec),
        cluster=refer_to_cluster(chips.cluster()),
        job=Job(sequence_length=64, global_batch=1, precision=PRECISIONS["fp32"]),
        pipelines=(Pipeline(micro_batch=1, micro_batches=1, stages=made),),
    )
