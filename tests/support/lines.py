"""Small pipelines of one chip per stage, and the uniform plans around them."""

from __future__ import annotations

from tests.support.plans import Allocator, small_model
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.plan import Order, Pipeline, Plan, Replica, Stage
from tutti.plan.uniform import Degrees, even_cuts, uniform_plan


def line(
    num_stages: int, micro_batches: int, rounds: int = 1, orders: list[Order] | None = None
) -> Pipeline:
    """Return equal stages of one unit range each per round."""
    cuts = even_cuts(num_stages * rounds, num_stages * rounds)
    chips = Allocator()
    return Pipeline(
        micro_batch=1,
        micro_batches=micro_batches,
        stages=tuple(
            Stage(
                units=tuple(cuts[s::num_stages]),
                replicas=(Replica(chips=chips.take("fast", 1)),),
                order=orders[s] if orders else Order(),
            )
            for s in range(num_stages)
        ),
    )


def uniform(num_stages: int, micro_batches: int, kind: ScheduleKind, **degrees) -> Plan:
    """Return a uniform plan with one chip per stage."""
    model = small_model(num_stages * degrees.get("vpp", 1))
    document = {
        "name": "line",
        "pools": [{"name": "fast", "chip": "A800", "nodes": -(-num_stages // 8)}],
    }
    cluster = Cluster.from_document(document, Place("line"))
    job = Job(sequence_length=64, global_batch=micro_batches, schedule=kind)
    return uniform_plan(model, cluster, job, Degrees(pp=num_stages, dp=1, **degrees))
