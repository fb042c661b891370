"""Host memory shared by forwarding and offload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.job import Job
from tutti.plan.plan import Offload, Plan
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.schedule.instruction import Op
from tutti.simulate.estimate import Estimate, estimate


def two_pools(memory_bandwidth: float) -> Cluster:
    """One node of each kind; their link goes through the hosts' memory."""
    document = {
        "name": "two",
        "pools": [
            {"name": "a", "node": "HGX-A800", "nodes": 1},
            {"name": "b", "node": "OAM-8xP800", "nodes": 1},
        ],
        "fabric": {"links": [{"pools": ["a", "b"], "kind": "host_forwarded"}]},
    }
    found = Cluster.from_document(document, Place("two"))
    pools = tuple(
        replace(
            pool,
            node=replace(
                pool.node, host=replace(pool.node.host, memory_bandwidth=memory_bandwidth)
            ),
        )
        for pool in found.pools
    )
    return replace(found, pools=pools)


def plan_on(cluster: Cluster, *, forwards: bool, offload: Offload) -> Plan:
    """Two stages of four chips: on both pools, or on one."""
    model = load_model("llama-2-7b")
    job = Job(sequence_length=2048, global_batch=16)
    plan = uniform_plan(model, cluster, job, Degrees(tp=8, pp=2, dp=1))
    stages = []
    for stage in plan.pipelines[0].stages:
        group = replace(stage.replicas[0], offload=offload if stage.units[0][0] == 0 else Offload())
        stages.append(replace(stage, replicas=(group,)))
    if not forwards:
        units = (*stages[0].units, *stages[1].units)
        whole = replace(stages[0], units=((units[0][0], units[-1][1]),))
        return replace(
            plan,
            pipelines=(replace(plan.pipelines[0], stages=(whole,)),),
            idle=stages[1].replicas[0].chips,
        )
    return replace(plan, pipelines=(replace(plan.pipelines[0], stages=tuple(stages)),))


ACTIVATIONS = Offload(activations=((1, 9),))


def seconds(memory_bandwidth: float, *, forwards: bool, offload: Offload) -> float:
    cluster = two_pools(memory_bandwidth)
    plan = plan_on(cluster, forwards=forwards, offload=offload)
    return estimate(plan, None, cluster).step_seconds


@pytest.mark.parametrize(
    ("forwards", "offload", "slower"),
    [
        (False, Offload(), False),
        (True, Offload(), False),
        (False, ACTIVATIONS, False),
        (True, ACTIVATIONS, True),  # both: each lane has half a share
    ],
)
def test_half_the_bandwidth_slows_those_who_use_it_twice(forwards, offload, slower):
    """A chip's share of 600 GB/s is 75, of 300 37.5: above a copy's 25, but not when halved."""
    full = seconds(600e9, forwards=forwards, offload=offload)
    half = seconds(300e9, forwards=forwards, offload=offload)
    assert (half > full) == slower
    assert half >= full


@pytest.mark.parametrize(
    ("forwards", "offload"), [(True, Offload()), (False, ACTIVATIONS), (True, ACTIVATIONS)]
)
def test_a_host_that_is_slow_enough_slows_everybody_who_uses_it(forwards, offload):
    full = seconds(600e9, forwards=forwards, offload=offload)
    assert seconds(20e9, forwards=forwards, offload=offload) > full


def apart(cluster: Cluster, offload: Offload) -> Plan:
    """A replica on each pool: only gradients meet."""
    model, job = load_model("llama-2-7b"), Job(sequence_length=2048, global_batch=16)
    plan = uniform_plan(model, cluster, job, Degrees(tp=8, dp=2))
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages
    replicas = tuple(replace(replica, offload=offload) for replica in stage.replicas)
    stages = (replace(stage, replicas=replicas),)
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


@pytest.mark.parametrize(
    ("offload", "slower"), [(ACTIVATIONS, False), (Offload(optimizer=((0, 34),)), True)]
)
def test_gradients_that_are_forwarded_once_do_not_slow_activations(offload, slower):
    """States come and go while gradients do; activations long before."""
    copies = []
    for bandwidth in (800e9, 400e9):  # a share of 100 or 50, of which copies use 50 at most
        cluster = two_pools(bandwidth)
        found = estimate(apart(cluster, offload), None, cluster)
        copies.append(sum(copied_seconds(found)))
    assert (copies[1] > copies[0]) == slower
    assert min(copies) > 0


def copied_seconds(found: Estimate) -> Iterator[float]:
    """Yield the seconds of every copy between a chip and its host."""
    for own, costs in zip(found.schedule.classes, found.priced.costs.classes, strict=True):
        for entry, seconds in zip(own.instructions, costs.seconds, strict=True):
            if entry.op in (Op.OFFLOAD, Op.FETCH):
                yield float(seconds)
