"""Sends and collectives share the NIC of their rank; overlapping never costs time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.closed_forms import one_f_one_b_seconds
from tests.support.lines import uniform
from tests.support.plans import plans
from tutti.cost.plan.simulator_inputs import ClassCosts, StepCosts
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.models.parameters import ParameterClass
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.plan import Plan, Synchronisation
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.schedule.instruction import COLLECTIVES, Op
from tutti.schedule.schedule import build_schedule
from tutti.simulate.contention import _Idle
from tutti.simulate.estimate import estimate
from tutti.simulate.run import simulate

FEW = settings(max_examples=max(10, settings.default.max_examples // 5))


def with_overlap(plan: Plan, overlap: bool) -> Plan:
    """Give every unit a rule, all of them with or without overlap."""
    rules = [replace(rule, overlap=overlap) for rule in plan.synchronisation]
    last = plan.pipelines[0].stages[-1].units[-1][1]
    for kind in ParameterClass:
        covered = {u for r in rules if r.parameter_class is kind for u in range(*r.units)}
        rules += [
            Synchronisation(units=(u, u + 1), parameter_class=kind, overlap=overlap)
            for u in range(last)
            if u not in covered
        ]
    return replace(plan, synchronisation=tuple(rules))


@FEW
@given(plans(), st.sampled_from([1.0, 100.0]))
def test_overlap_never_costs_time(plan, heavier):
    """Also where the network is a hundred times slower than it is."""
    found = []
    for overlap in (True, False):
        priced = estimate(with_overlap(plan, overlap))
        costs = []
        for rank_class, given_costs in zip(
            priced.schedule.classes, priced.priced.costs.classes, strict=True
        ):
            network = [e.op is Op.SEND or e.op in COLLECTIVES for e in rank_class.instructions]
            factor = np.where(network, heavier, 1.0)
            costs.append(replace(given_costs, seconds=given_costs.seconds * factor))
        found.append(simulate(priced.schedule, StepCosts(classes=tuple(costs))).step_seconds)
    assert found[0] <= found[1] * (1 + 1e-9)


def costs_of(schedule, seconds, leaves_node):
    return StepCosts(
        classes=tuple(
            ClassCosts(
                seconds=np.array([seconds.get(e.op, 0.0) for e in c.instructions]),
                allocate_bytes=np.zeros(len(c.instructions)),
                free_bytes=np.zeros(len(c.instructions)),
                leaves_node=np.array(
                    [leaves_node and LEAVES.get(e.op, False) for e in c.instructions]
                ),
            )
            for c in schedule.classes
        )
    )


LEAVES = {Op.SEND: True, Op.GATHER_PARAMETERS: True, Op.REDUCE_GRADIENTS: True}


def test_the_closed_form_of_1f1b_holds_with_shared_nics():
    schedule = build_schedule(uniform(4, 8, ScheduleKind.ONE_F_ONE_B))
    seconds = {Op.FORWARD: 2.0, Op.BACKWARD_INPUT: 3.0, Op.BACKWARD_WEIGHT: 2.5, Op.SEND: 1.25}
    once = costs_of(schedule, seconds, leaves_node=True)
    # Every pass is one instruction here but the last, which is cut by buckets.
    classes = []
    for rank_class, given_costs in zip(schedule.classes, once.classes, strict=True):
        seen: set[object] = set()
        values = given_costs.seconds.copy()
        for index, entry in enumerate(rank_class.instructions):
            key = (entry.op, entry.micro_batch, entry.what)
            values[index] = 0.0 if key in seen else values[index]
            seen.add(key)
        classes.append(replace(given_costs, seconds=values))
    found = simulate(schedule, StepCosts(classes=tuple(classes))).step_seconds
    expected = one_f_one_b_seconds(
        4, 8, forward=2.0, backward_input=3.0, backward_weight=2.5, send=1.25
    )
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_collective_waits_for_the_sends_beside_it():
    """Idle seconds pass only between the sends: 3 s of reduction need 3 s of free NIC."""
    idle = _Idle(np.array([1.0, 4.0]), np.array([2.0, 6.0]))
    for start, needed, expected in (
        (0.0, 0.5, 0.5),
        (0.0, 3.0, 4.0),
        (1.5, 1.0, 1.5),
        (7.0, 3.0, 3.0),
        (2.0, 2.0, 2.0),
        (4.0, 1.0, 3.0),
    ):
        assert idle.seconds(np.array([start]), np.array([needed])) == pytest.approx([expected])
    # Two in a row: the second begins when the first, which lost a second, has ended.
    both = idle.seconds(np.array([0.0, 2.0]), np.array([2.0, 1.5]))
    assert both == pytest.approx([3.0, 3.5])


def test_sharing_a_nic_costs_time_and_an_own_link_does_not():
    """Parameters gathered for every pass, beside long sends."""
    model, where = load_model("llama-2-7b"), Cluster.load("S16")
    job = Job(sequence_length=2048, global_batch=16)
    plan = uniform_plan(model, where, job, Degrees(pp=2, dp=8, shard=3))
    schedule = build_schedule(plan)
    seconds = {
        Op.FORWARD: 1.0,
        Op.BACKWARD_INPUT: 1.0,
        Op.BACKWARD_WEIGHT: 1.0,
        Op.SEND: 20.0,
        Op.GATHER_PARAMETERS: 2.0,
    }
    apart, shared = (
        simulate(schedule, costs_of(schedule, seconds, leaves)).step_seconds
        for leaves in (False, True)
    )
    assert shared > apart


def test_a_pass_lasts_longer_by_a_share_of_the_collectives_beside_it():
    """Gathers of parameters run beside the passes: what overlaps is paid for, nothing else."""
    model, where = load_model("llama-2-7b"), Cluster.load("S16")
    job = Job(sequence_length=2048, global_batch=16)
    schedule = build_schedule(uniform_plan(model, where, job, Degrees(dp=16, shard=3)))
    seconds = {Op.FORWARD: 1.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}
    alone = simulate(schedule, slowed(costs_of(schedule, seconds, leaves_node=False), 0.5))
    unslowed = costs_of(schedule, seconds, leaves_node=False)
    assert np.array_equal(alone.costs.classes[0].seconds, unslowed.classes[0].seconds)
    seconds |= {Op.GATHER_PARAMETERS: 0.4}
    plain = simulate(schedule, costs_of(schedule, seconds, leaves_node=False))
    found = simulate(schedule, slowed(costs_of(schedule, seconds, leaves_node=False), 0.5))
    for index, (before, after) in enumerate(
        zip(plain.costs.classes, found.costs.classes, strict=True)
    ):
        span = plain.program.span(index)
        begins, ends = plain.start[span], plain.end[span]
        ops = [entry.op for entry in schedule.classes[index].instructions]
        gathers = [i for i, op in enumerate(ops) if op is Op.GATHER_PARAMETERS]
        for i, op in enumerate(ops):
            beside = sum(
                max(0.0, min(ends[i], ends[g]) - max(begins[i], begins[g])) for g in gathers
            )
            is_pass = op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
            lost = 0.5 * beside if is_pass else 0.0
            assert after.seconds[i] == pytest.approx(before.seconds[i] + lost)
    assert found.step_seconds > plain.step_seconds


def slowed(costs, share):
    return StepCosts(classes=tuple(replace(c, overlap_slowdown=share) for c in costs.classes))
