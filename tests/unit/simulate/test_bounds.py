"""Closed forms equal the simulated lists; lower bounds are never above them.

That the bound from the lists holds for random plans stands in test_simulate.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.closed_forms import one_f_one_b_seconds, pipeline_lower_bound
from tests.support.lines import uniform
from tests.support.step_bounds import lower_bound
from tutti.plan.job import ScheduleKind
from tutti.schedule.instruction import Instruction, Op
from tutti.schedule.schedule import Schedule, build_schedule
from tutti.simulate import ClassCosts, StepCosts, simulate

times = st.floats(0.01, 10.0)
PASSES = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def stage_costs(
    schedule: Schedule, passes: list[tuple[float, float, float]], send: list[float] | None = None
) -> StepCosts:
    def seconds(stage: int, entry: Instruction) -> float:
        if entry.op in PASSES:
            return passes[stage][PASSES.index(entry.op)]
        if entry.op is Op.SEND and send:
            return send[stage if entry.what == "activations" else stage - 1]
        return 0.0

    return StepCosts(
        classes=tuple(
            ClassCosts.plain(np.array([seconds(c.stage, e) for e in c.instructions]))
            for c in schedule.classes
        )
    )


@given(st.integers(1, 12), st.integers(1, 24), times, times, st.floats(0.0, 10.0))
def test_1f1b_of_equal_stages_equals_the_closed_form(stages, micro_batches, f, g, w):
    schedule = build_schedule(uniform(stages, micro_batches, ScheduleKind.ONE_F_ONE_B))
    found = simulate(schedule, stage_costs(schedule, [(f, g, w)] * stages)).step_seconds
    expected = one_f_one_b_seconds(
        stages, micro_batches, forward=f, backward_input=g, backward_weight=w
    )
    assert found == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 12), st.integers(1, 24), times, times)
def test_with_merged_weights_it_is_the_textbook_form(stages, micro_batches, f, b):
    schedule = build_schedule(uniform(stages, micro_batches, ScheduleKind.ONE_F_ONE_B))
    found = simulate(schedule, stage_costs(schedule, [(f, b, 0.0)] * stages)).step_seconds
    assert found == pytest.approx((micro_batches + stages - 1) * (f + b), rel=1e-9)


@given(st.integers(1, 10), st.integers(1, 20), times, times, times, st.floats(0.0, 0.5))
def test_transfers_that_hide_behind_weights_lengthen_only_the_way(stages, count, f, g, w, part):
    schedule = build_schedule(uniform(stages, count, ScheduleKind.ONE_F_ONE_B))
    send = part * w
    costs = stage_costs(schedule, [(f, g, w)] * stages, [send] * (stages - 1))
    expected = one_f_one_b_seconds(
        stages, count, forward=f, backward_input=g, backward_weight=w, send=send
    )
    assert simulate(schedule, costs).step_seconds == pytest.approx(expected, rel=1e-9)


def test_transfers_that_do_not_hide_have_no_closed_form():
    with pytest.raises(ValueError, match="do not hide behind a weight pass"):
        one_f_one_b_seconds(2, 2, forward=1, backward_input=1, backward_weight=1, send=0.6)


@given(st.data())
def test_the_bound_from_stage_times_is_never_above_any_order_of_the_lists(data):
    kind = data.draw(
        st.sampled_from([ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE])
    )
    stages, count = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 16))
    passes = [tuple(data.draw(times) for _ in PASSES) for _ in range(stages)]
    send = [data.draw(st.floats(0.0, 3.0)) for _ in range(stages - 1)]
    schedule = build_schedule(uniform(stages, count, kind))
    costs = stage_costs(schedule, passes, send)
    found = simulate(schedule, costs).step_seconds
    at_once = kind is not ScheduleKind.ZERO_BUBBLE
    f, g, w = (list(column) for column in zip(*passes, strict=True))
    bound = pipeline_lower_bound(f, g, w, count, send=send, weights_at_once=at_once)
    assert bound <= found * (1 + 1e-12)
    exact = lower_bound(schedule, costs).seconds
    assert bound <= exact * (1 + 1e-12), "the lists tell at least as much as the stage times"


@given(st.integers(1, 10), st.integers(1, 20), times, times, times)
def test_for_equal_stages_the_bounds_are_reached(stages, count, f, g, w):
    schedule = build_schedule(uniform(stages, count, ScheduleKind.ONE_F_ONE_B))
    costs = stage_costs(schedule, [(f, g, w)] * stages)
    found = simulate(schedule, costs).step_seconds
    assert lower_bound(schedule, costs).seconds == pytest.approx(found, rel=1e-9)
    bound = pipeline_lower_bound([f] * stages, [g] * stages, [w] * stages, count)
    assert bound == pytest.approx(found, rel=1e-9)
