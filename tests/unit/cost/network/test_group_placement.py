"""Groups that straddle islands or nodes are priced over the links they really use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tutti.cost.arrays import Machine
from tutti.cost.constants import Constants
from tutti.cost.memory.rank_state import workload_of
from tutti.cost.network.closed_forms import all_reduce_seconds, ring_pass_seconds
from tutti.cost.network.group_placement import ALIGNED, Placement, Touch, placement_of, span_of
from tutti.cost.plan.pool_prices import PoolPrices
from tutti.document import Place
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.models import load_model
from tutti.plan.chips import ChipSet
from tutti.plan.job import Job
from tutti.plan.plan import Replica
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.simulate.estimate import estimate


def cluster(node: str = "HGX-A800", nodes: int = 2) -> Cluster:
    pools = [{"name": "a", "node": node, "nodes": nodes}]
    return Cluster.from_document({"name": "c", "pools": pools}, Place("c"))


NODE = cluster().pool("a").node
TWO_ISLANDS = cluster("Atlas-16x910B").pool("a").node


def replica(chips: str | tuple[str, ...], **fields: int) -> Replica:
    texts = (chips,) if isinstance(chips, str) else chips
    return Replica(chips=ChipSet.of(*texts), **fields)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (replica("a/0/0-7", tp=8), ALIGNED),
        (replica("a/0-1/0-7", tp=4, count=4), ALIGNED),
        (replica("a/0-1/0-7", tp=16), ALIGNED),  # cannot lie better
        (replica("a/0-1/0-7", tp=2, cp=8), ALIGNED),
    ],
)
def test_what_lies_as_well_as_it_can(given: Replica, expected: Placement) -> None:
    assert placement_of(given, NODE) == expected


def test_a_tensor_group_over_two_nodes_that_would_fit_into_one() -> None:
    found = placement_of(replica(("a/0/6-7", "a/1/0-1"), tp=4), NODE)
    assert found == Placement(tp=Touch(2, 2, 2), first=0)
    thin = placement_of(replica(("a/0/7", "a/1/0-2"), tp=4), NODE)
    assert thin.tp == Touch(2, 2, 1)


def test_the_worst_copy_counts_and_thousands_are_not_walked() -> None:
    # Six-wide copies on eight-wide nodes: slots 0-5, then 6-7 + 0-3, then 4-7 + 0-1, and again.
    many = replica("a/0-2999/0-7", tp=6, count=4000)
    found = placement_of(many, NODE)
    assert found.tp == Touch(2, 2, 2)
    assert found.first == 6


def test_a_context_ring_that_straddles() -> None:
    found = placement_of(replica(("a/0/6-7", "a/1/0-1"), tp=2, cp=2), NODE)
    assert found.tp is None
    assert found.cp == Touch(2, 2, 1)


def test_islands_of_one_node_are_joined_by_its_bridge() -> None:
    found = placement_of(replica("a/0/6-9", tp=4), TWO_ISLANDS)
    assert found.tp == Touch(1, 2, 2)
    machine = Machine.of(cluster("Atlas-16x910B"), cluster("Atlas-16x910B").pools[0], Dtype.BF16)
    span = span_of(found.tp, 4, machine, TWO_ISLANDS)
    assert span is not None
    assert float(span.between) == 2 * TWO_ISLANDS.effective_bridge.bandwidth


def test_closed_form_of_a_straddling_group() -> None:
    machine, constants = Machine.of(cluster(), cluster().pools[0], Dtype.BF16), Constants()
    span = span_of(Touch(2, 2, 2), 4, machine, NODE)
    nic = NODE.nic_bandwidth / 8 * 2
    expected = 4.5e-5 + 2 * 2e-5 + 2e9 / 2 / (0.78 * 200e9) + 2e9 / 2 / (0.8 * nic)
    found = all_reduce_seconds(1e9, 4.0, 1.0, machine, constants, span)
    assert found == pytest.approx(expected)
    ring = ring_pass_seconds(1e9, 4.0, 1.0, machine, constants, span)
    assert ring == pytest.approx(4.5e-5 + 2 * 2e-5 + 1e9 * 3 / 4 / (0.8 * nic))
    assert np.all(found > all_reduce_seconds(1e9, 4.0, 1.0, machine, constants))


def plan_on(chips: tuple[str, ...], **degrees: int):
    model, where = load_model("llama-2-7b"), cluster()
    job = Job(sequence_length=2048, global_batch=4)
    plan = uniform_plan(model, where, job, Degrees(dp=1, **degrees))
    stage = plan.pipelines[0].stages[0]
    moved = replace(stage.replicas[0], chips=ChipSet.of(*chips))
    lines = (replace(plan.pipelines[0], stages=(replace(stage, replicas=(moved,)),)),)
    return replace(plan, pipelines=lines, idle=ChipSet(), spare=ChipSet())


def test_a_plan_that_straddles_is_slower() -> None:
    inside = estimate(plan_on(("a/0/0-3",), tp=4)).step_seconds
    shifted = estimate(plan_on(("a/0/4-7",), tp=4)).step_seconds
    assert inside == shifted
    assert estimate(plan_on(("a/0/6-7", "a/1/0-1"), tp=4)).step_seconds > 1.3 * inside


def test_the_price_of_a_unit_takes_the_placement() -> None:
    plan = plan_on(("a/0/0-3",), tp=4)
    where = cluster()
    prices = PoolPrices(plan, load_model("llama-2-7b"), where, where.pools[0], None)
    stage = plan.pipelines[0].stages[0]
    work = workload_of(plan, stage, stage.replicas[0])
    plain = prices.unit(work, 1, "none")
    apart = prices.unit(work, 1, "none", placement=Placement(tp=Touch(2, 2, 2)))
    assert apart.forward > plain.forward
    assert apart.backward_weight == pytest.approx(plain.backward_weight, rel=1e-2)
