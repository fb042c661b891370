"""Host memory shared by forwarding and offload."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.job import Job
from tutti.plan.plan import Offload, Plan
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.simulate.estimate import estimate


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
