"""What is sent inside blocks: who, how much, when, what it takes, and what the step is then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.simulate.test_fabric_step import cluster, plan
from tutti.collective import Operation
from tutti.fabric.wiring import wire
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.chips import ChipSet
from tutti.plan.edits import each_replica
from tutti.plan.job import Job
from tutti.plan.plan import Plan
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.simulate.estimate import Estimate, estimate
from tutti.simulate.fabric_step import plans_on_fabric, step_with
from tutti.simulate.plan_traffic import plan_traffic
from tutti.simulate.traffic import Traffic

LENGTH, BATCH, HIDDEN, LAYERS = 2048, 32, 4096, 32
HALVES = 2 * LAYERS  # all-reduces of a forward pass


def inside(found: Estimate, on: Cluster, axis: str) -> list[Traffic]:
    return [
        one
        for one in plan_traffic(found, wire(on))
        if one.inside is not None and one.inside.axis == axis
    ]


def moe(on: Cluster, degrees: str) -> Plan:
    job = Job(sequence_length=LENGTH, global_batch=64)
    return uniform_plan(load_model("mixtral-8x7b"), on, job, Degrees.parse(degrees))


def sent_by_each(traffic: Sequence[Traffic]) -> np.ndarray:
    total = np.zeros(64)
    for one in traffic:
        for flight in one.flights:
            np.add.at(total, flight.sources, flight.num_bytes * one.runs)
    return total


def test_tensor_groups_reduce_twice_a_block_each_way_and_once_at_the_ends() -> None:
    on = cluster()
    found = estimate(plan(on))  # tp=8 of 64 chips in two stages: four replicas
    traffic = inside(found, on, "tensor")
    assert {one.operation for one in traffic} == {Operation.ALL_REDUCE}
    assert all((one.ranks, one.groups) == (8, 4) for one in traffic)
    micro_batch = plan(on).pipelines[0].micro_batch // 4
    micro_batches = BATCH // 4 // micro_batch
    runs = sum(one.runs for one in traffic)
    assert runs == micro_batches * (2 * HALVES + 3)  # embedding forward, head both ways
    each = 2 * (7 / 8) * micro_batch * LENGTH * HIDDEN * 2
    first, last = micro_batches * (HALVES + 1), micro_batches * (HALVES + 2)
    assert sent_by_each(traffic) == pytest.approx(
        [each * first] * 32 + [each * last] * 32, rel=1e-9
    )


def test_all_that_runs_again_sends_again() -> None:
    on = cluster()
    one, again = (
        sum(each.runs for each in inside(estimate(plan(on, degrees)), on, "tensor"))
        for degrees in ("shard=1,tp=8,pp=2,sp=1", "shard=1,tp=8,pp=2,sp=1,recompute=full")
    )
    per_pass = HALVES
    micro_batches = one // (2 * HALVES + 3)
    assert again == one + micro_batches * per_pass


def test_experts_get_equal_parts_of_the_rows_and_nothing_leaves_the_group() -> None:
    on = cluster()
    whole = moe(on, "tp=1,pp=2,ep=8,shard=1")
    found = estimate(whole)
    traffic = inside(found, on, "experts")
    stage = whole.pipelines[0].stages[0]
    rows = stage.replicas[0].sequences * LENGTH * 2 * HIDDEN * 2  # two experts a token
    for one in traffic:
        (flight,) = one.flights
        assert one.groups * 8 == stage.num_chips
        assert flight.num_bytes == pytest.approx(np.full(stage.num_chips * 7, rows / 8))
        assert (flight.sources // 8 == flight.targets // 8).all()  # a node is a group


@pytest.mark.parametrize(
    ("oversubscription", "share"),
    [
        (1.0, 1 / 2),  # of a chip's rows, over its NIC: half of the group is on the other node
        # seven eighths of that are for chips on other rails: up from the leaf of the own rail,
        # which has a quarter of what the NICs below it could send
        (4.0, 4 * 7 / 16),
    ],
)
def test_an_exchange_across_nodes_takes_what_the_links_need(
    oversubscription: float, share: float
) -> None:
    on = cluster(oversubscription)
    job = Job(sequence_length=LENGTH, global_batch=128)
    degrees = Degrees.parse("tp=1,pp=2,ep=16,shard=1")
    whole = uniform_plan(load_model("qwen3-30b-a3b"), on, job, degrees)
    found, wiring = estimate(whole), wire(on)
    (alone,) = plans_on_fabric(["one"], [found], [plan_traffic(found, wiring)], wiring)
    stage = whole.pipelines[0].stages[0]
    rows = stage.replicas[0].sequences * LENGTH * 8 * 2048 * 2  # eight experts a token
    nic = on.pools[0].node.nic_bandwidth / 8
    exchanges = [
        one for one in alone.sent if one.traffic.inside and one.traffic.inside.axis == "experts"
    ]
    assert len(exchanges) == 2  # a stage each
    for one in exchanges:
        efficiency = one.traffic.efficiency
        seconds = one.alone_s - efficiency.hop_s - 4e-6  # the spine's latency
        assert seconds == pytest.approx(share * rows / (nic * efficiency.fabric), rel=1e-9)
        assert one.slowest_flow > 0
        assert one.bus_bandwidth == pytest.approx(15 / 16 * rows / one.together_s)


def test_calls_are_spread_over_a_pass_each_at_the_end_of_its_part() -> None:
    on = cluster()
    found = estimate(plan(on))
    one = inside(found, on, "tensor")[0]
    assert one.inside is not None
    start, until = one.windows(found.result, one.inside.priced_s)
    assert len(start) == one.runs
    assert until - start == pytest.approx(np.full(one.runs, one.inside.priced_s))
    at, calls = int(one.first[0]), int(one.inside.calls[0])
    low, high = found.result.start[at], found.result.end[at]
    expected = low + (high - low) * np.arange(1, calls + 1) / calls
    assert until[:calls] == pytest.approx(expected)


def test_longer_calls_make_the_step_as_much_longer_as_their_formula_says() -> None:
    on = cluster()
    found = estimate(plan(on))
    (alone,) = plans_on_fabric(["one"], [found], [plan_traffic(found, wire(on))], wire(on))
    seconds = [one.shared_s for one in alone.sent]
    slower = [
        s + 0.01 * (one.traffic.inside is not None)
        for s, one in zip(seconds, alone.sent, strict=True)
    ]
    before, after = (step_with(found, alone.sent, given) for given in (seconds, slower))
    program = found.result.program
    for number in range(len(found.schedule.classes)):
        low, high = (int(program.offsets[i]) for i in (number, number + 1))
        added = (after.end - after.start - before.end + before.start)[low:high].sum()
        runs = sum(
            one.traffic.runs
            for one in alone.sent
            if one.traffic.inside is not None and number in one.traffic.instructions
        )
        assert added == pytest.approx(0.01 * runs, rel=0.02)  # the host hides nearly nothing


def test_a_context_ring_passes_on_what_the_others_hold() -> None:
    on = cluster()
    whole = plan(on, "shard=1,tp=2,cp=4,pp=2")
    traffic = inside(estimate(whole), on, "context")
    assert all((one.ranks, one.groups) == (4, 8) for one in traffic)  # of 32 chips a stage
    tokens = plan(on).pipelines[0].micro_batch // 4 * LENGTH // 4
    held = 2 * (HIDDEN // 2) * 2 * tokens  # keys and values of half of the heads
    for one in traffic:
        (flight,) = one.flights
        assert flight.num_bytes == pytest.approx(np.full(32, 3 * held))
        assert (flight.targets != flight.sources).all()
        assert one.runs == whole.pipelines[0].micro_batches * 16 * 3  # forward, twice backward


def test_neighbours_of_unlike_placement_have_programs_of_their_own() -> None:
    on = cluster()
    whole = plan(on, "shard=1,tp=4,pp=2,sp=1")
    stage = whole.pipelines[0].stages[0]
    chips = list(stage.chips)
    chips[2], chips[8] = chips[8], chips[2]  # two tensor groups straddle nodes
    moved = each_replica(stage, lambda one: replace(one, chips=ChipSet.from_ids(chips)))
    pipeline = replace(whole.pipelines[0], stages=(moved, whole.pipelines[0].stages[1]))
    found = estimate(replace(whole, pipelines=(pipeline,)))
    forms = [one for one in inside(found, on, "tensor") if one.name.endswith("stage 0")]
    assert sum(one.groups for one in forms) == 8
    assert len(forms) > 1
    sources = np.concatenate([f.sources for one in forms for f in one.flights])
    assert set(sources.tolist()) == {wire(on).chip(chip) for chip in chips}
