"""Schedules of random plans are complete and cannot hang; those of equal stages are textbook."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.lines import line, uniform
from tests.support.plans import plans, small_model
from tutti.hardware.cluster import Cluster
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.plan import Order, Pipeline
from tutti.plan.schedules import schedule_record
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.schedule.check import check_schedule
from tutti.schedule.events import stage_events
from tutti.schedule.instruction import Instruction, Lane, Op, What
from tutti.schedule.order import Action, Pass
from tutti.schedule.schedule import build_schedule, peak_in_flight


@given(plans())
def test_schedules_of_random_plans_pass_the_static_check(plan):
    schedule = build_schedule(plan)
    assert check_schedule(schedule) == []
    assert sum(c.num_ranks for c in schedule.classes) == plan.num_ranks


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 7, 16])
def test_1f1b_holds_as_many_micro_batches_as_the_textbook_says(num_stages, micro_batches):
    schedule = build_schedule(uniform(num_stages, micro_batches, ScheduleKind.ONE_F_ONE_B))
    for s, rank_class in enumerate(schedule.classes):
        units = sum(b - a for a, b in schedule.plan.pipelines[0].stages[s].units)
        in_flight = min(num_stages - s, micro_batches)
        assert peak_in_flight(rank_class.instructions) == in_flight * units


@pytest.mark.parametrize("num_stages", [1, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 4, 9])
def test_gpipe_holds_all_micro_batches(num_stages, micro_batches):
    schedule = build_schedule(uniform(num_stages, micro_batches, ScheduleKind.GPIPE))
    for s, rank_class in enumerate(schedule.classes):
        units = sum(b - a for a, b in schedule.plan.pipelines[0].stages[s].units)
        assert peak_in_flight(rank_class.instructions) == micro_batches * units


@pytest.mark.parametrize("kind", list(ScheduleKind))
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 8, 13])
def test_every_shape_runs(kind, num_stages, micro_batches):
    for vpp in (2, 3) if schedule_record(kind).several_ranges else (1,):
        schedule = build_schedule(uniform(num_stages, micro_batches, kind, vpp=vpp))
        assert check_schedule(schedule) == []


def makespan(pipeline: Pipeline, kind: ScheduleKind) -> float:
    """Play the stages' actions as soon as they can start; communication is free."""
    done: dict[Action, float] = {}
    lists = [
        [e for e in events if isinstance(e, Action)] for events in stage_events(pipeline, kind)
    ]
    last = sum(len(stage.units) for stage in pipeline.stages) - 1
    position, clock = [0] * len(lists), [0.0] * len(lists)
    while any(p < len(actions) for p, actions in zip(position, lists, strict=True)):
        for s, actions in enumerate(lists):
            if position[s] == len(actions):
                continue
            action = actions[position[s]]
            kind_, chunk, micro_batch = action
            if kind_ == Pass.FORWARD:
                needs = Action(Pass.FORWARD, chunk - 1, micro_batch) if chunk else None
            elif kind_ == Pass.BACKWARD_INPUT:
                needs = (
                    Action(Pass.FORWARD, chunk, micro_batch)
                    if chunk == last
                    else Action(Pass.BACKWARD_INPUT, chunk + 1, micro_batch)
                )
            else:
                needs = Action(Pass.BACKWARD_INPUT, chunk, micro_batch)
            if needs is not None and needs not in done:
                continue
            order = pipeline.stages[s].order
            own = (order.forward, order.backward_input, order.backward_weight)[kind_]
            start = max(clock[s], done[needs] if needs is not None else 0.0)
            clock[s] = done[action] = start + own / len(pipeline.stages[s].units)
            position[s] += 1
    return max(clock)


@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b_of_equal_stages_has_the_textbook_bubble(num_stages, micro_batches):
    found = makespan(line(num_stages, micro_batches), ScheduleKind.ONE_F_ONE_B)
    # Sending the input gradient before the weight gradient shortens the way back.
    work = 3.0 * micro_batches
    bubble = 2.0 * (num_stages - 1)
    assert found <= work + 3.0 * (num_stages - 1) + 1e-9
    assert found >= work + bubble - 1e-9


@given(st.integers(2, 8), st.integers(1, 3), st.integers(2, 3))
def test_interleaving_divides_the_bubble(num_stages, groups, rounds):
    micro_batches = num_stages * groups
    plain = makespan(line(num_stages, micro_batches), ScheduleKind.ONE_F_ONE_B)
    interleaved = makespan(line(num_stages, micro_batches, rounds), ScheduleKind.INTERLEAVED)
    work = 3.0 * micro_batches
    assert interleaved - work < plain - work


@given(st.integers(2, 8), st.integers(2, 20))
def test_zero_bubble_beats_1f1b_within_the_same_memory(num_stages, micro_batches):
    pipeline = line(num_stages, micro_batches)
    zero = makespan(pipeline, ScheduleKind.ZERO_BUBBLE)
    assert zero <= makespan(pipeline, ScheduleKind.ONE_F_ONE_B) + 1e-9
    # The bubble of ZB-H1, (p − 1)·(F + B − W); few micro-batches cannot fill it.
    ideal = 3.0 * micro_batches + (num_stages - 1)
    assert zero >= ideal - 1e-9
    if micro_batches >= num_stages:
        assert zero == pytest.approx(ideal, abs=1e-9)
    schedule = build_schedule(uniform(num_stages, micro_batches, ScheduleKind.ZERO_BUBBLE))
    deepest = min(num_stages, micro_batches)
    for s, rank_class in enumerate(schedule.classes):
        units = sum(b - a for a, b in schedule.plan.pipelines[0].stages[s].units)
        assert peak_in_flight(rank_class.instructions) <= deepest * units


@given(st.data())
def test_zero_bubble_keeps_the_slowest_of_unequal_stages_busy(data):
    num_stages, micro_batches = data.draw(st.integers(2, 5)), data.draw(st.integers(8, 24))
    times = data.draw(
        st.lists(st.sampled_from([1.0, 1.5, 2.0, 4.0]), min_size=num_stages, max_size=num_stages)
    )
    orders = [Order(forward=t, backward_input=t, backward_weight=t) for t in times]
    found = makespan(line(num_stages, micro_batches, orders=orders), ScheduleKind.ZERO_BUBBLE)
    bound = 3 * micro_batches * max(times)
    assert bound <= found <= bound + 4 * sum(times)


# --- what is in the lists --------------------------------------------------------------------


def test_the_gradient_is_sent_before_the_weights_are_computed():
    schedule = build_schedule(uniform(2, 3, ScheduleKind.ONE_F_ONE_B))
    entries = schedule.classes[1].instructions
    for index, entry in enumerate(entries):
        if entry.op is Op.SEND and entry.what is What.GRADIENTS:
            (source,) = entry.after
            assert entries[source].op is Op.BACKWARD_INPUT
            weights = next(
                i
                for i, other in enumerate(entries)
                if other.op is Op.BACKWARD_WEIGHT and other.micro_batch == entry.micro_batch
            )
            assert index < weights


def test_recomputation_does_not_wait_for_the_gradient():
    plan = uniform(2, 3, ScheduleKind.ONE_F_ONE_B, recompute="full")
    entries = build_schedule(plan).classes[0].instructions
    for entry in entries:
        if entry.op is Op.RECOMPUTE:
            assert not any(entries[i].op is Op.RECEIVE for i in entry.after)


def test_lanes_are_closed():
    assert {Instruction(op).lane for op in Op} == set(Lane)


# --- size ------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", ["", "shard=1,recompute=full,"])
def test_16384_chips_are_a_few_dozen_lists(extra):
    cluster = Cluster.load("H16384")
    model = small_model(128, heads=8)
    job = Job(sequence_length=64, global_batch=16384)
    plan = uniform_plan(model, cluster, job, Degrees.parse(f"{extra}tp=4,pp=64,sp=1"))
    before = time.process_time()
    schedule = build_schedule(plan)
    spent = time.process_time() - before
    assert len(schedule.classes) <= 64 * 3
    assert sum(c.num_ranks for c in schedule.classes) == 16384
    assert spent < 20, "an order of magnitude above what an idle core needs"
