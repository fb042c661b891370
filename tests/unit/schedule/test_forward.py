"""The forward half of any schedule: complete, and it cannot hang."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.plans import plans
from tutti.plan.plan import Plan
from tutti.schedule.check import check_progress
from tutti.schedule.forward import forward_list, forward_schedule
from tutti.schedule.instruction import Instruction, Op, What
from tutti.schedule.schedule import RankClass, build_schedule


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_every_unit_goes_forward_once_and_nobody_waits_for_ever(plan: Plan) -> None:
    schedule = build_schedule(plan)
    forward = forward_schedule(schedule)
    assert check_progress(forward) == []
    for whole, half in zip(schedule.classes, forward.classes, strict=True):
        passes = Counter(
            (unit, entry.micro_batch)
            for entry in half.instructions
            if entry.op is Op.FORWARD
            for unit in range(entry.start, entry.stop)
        )
        stage = plan.pipelines[half.pipeline].stages[half.stage]
        micro_batches = range(plan.pipelines[half.pipeline].micro_batches)
        units = [unit for span in stage.units for unit in range(*span)]
        assert passes == Counter((unit, m) for unit in units for m in micro_batches)
        assert {e.op for e in half.instructions} <= {
            Op.FORWARD, Op.SEND, Op.RECEIVE, Op.FETCH, Op.GATHER_PARAMETERS, Op.CLIP_NORM,
        }  # fmt: skip
        for entry in half.instructions:
            assert all(0 <= i < len(half.instructions) for i in entry.after)
        once = [e.key for e in whole.instructions if e.micro_batch < 0 and e.op in GATHERS]
        assert once == [e.key for e in half.instructions if e.micro_batch < 0 and e.op in GATHERS]


GATHERS = (Op.GATHER_PARAMETERS,)


def test_what_a_forward_waits_for_is_kept_and_what_it_does_not_is_left_out() -> None:
    entries = [
        Instruction(Op.FETCH, 0, 0, 2, What.BATCH),
        Instruction(Op.GATHER_PARAMETERS, 0, 0, 2, What.DENSE),
        Instruction(Op.FORWARD, 0, 0, 2, after=(0, 1)),
        Instruction(Op.GATHER_PARAMETERS, 0, 0, 2, What.DENSE, after=(2,)),
        Instruction(Op.BACKWARD_INPUT, 0, 0, 2, after=(3,)),
        Instruction(Op.SEND, 0, 2, 2, What.ACTIVATIONS, after=(2,)),
        Instruction(Op.CLIP_NORM, after=(4,)),
    ]
    found = forward_list(entries)
    assert [e.op for e in found] == [
        Op.FETCH, Op.GATHER_PARAMETERS, Op.FORWARD, Op.SEND, Op.CLIP_NORM,
    ]  # fmt: skip
    assert [e.after for e in found] == [(), (), (0, 1), (2,), ()]


@pytest.mark.parametrize("missing", ["send", "receive"])
def test_progress_sees_a_partner_that_never_comes(missing: str) -> None:
    from tests.support.any_plan import PLANS

    schedule = forward_schedule(build_schedule(PLANS["three stages, unlike widths"]))
    gone = Op.SEND if missing == "send" else Op.RECEIVE
    first = next(c for c in schedule.classes if any(e.op is gone for e in c.instructions))
    cut = RankClass(
        first.pipeline, first.stage, first.replica, first.num_ranks,
        tuple(e._replace(after=()) for e in first.instructions if e.op is not gone),
    )  # fmt: skip
    classes = tuple(cut if c is first else c for c in schedule.classes)
    assert check_progress(replace(schedule, classes=classes))
