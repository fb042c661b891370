"""The static check rejects lists that were broken by hand, with the right reason."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.support.lines import uniform
from tutti.errors import InputError
from tutti.plan.chips import ChipSet
from tutti.plan.job import ScheduleKind
from tutti.schedule.check import check_schedule, require_valid
from tutti.schedule.instruction import Instruction, Op, What
from tutti.schedule.schedule import build_schedule


def broken(schedule, stage, change):
    classes = list(schedule.classes)
    entries = list(classes[stage].instructions)
    change(entries)
    classes[stage] = replace(classes[stage], instructions=tuple(entries))
    return replace(schedule, classes=tuple(classes))


def find(entries, op, what=What.NOTHING, nth=0):
    return [i for i, e in enumerate(entries) if e.op is op and e.what is what][nth]


def drop(op, what=What.NOTHING):
    def change(entries):
        index = find(entries, op, what)
        entries[index] = Instruction(Op.FETCH, entries[index].micro_batch, what=What.BATCH)

    return change


def repeat(op, what=What.NOTHING):
    def change(entries):
        entries.append(entries[find(entries, op, what)]._replace(after=()))

    return change


def swap(op, what):
    def change(entries):
        first, second = find(entries, op, what), find(entries, op, what, 1)
        entries[first], entries[second] = entries[second], entries[first]

    return change


def forget_to_wait(op):
    def change(entries):
        index = next(i for i, e in enumerate(entries) if e.op is op and e.after)
        entries[index] = entries[index]._replace(after=())

    return change


def wait_for_the_future(entries):
    index = find(entries, Op.FORWARD)
    entries[index] = entries[index]._replace(after=(len(entries) - 1,))


def wrong_unit(entries):
    index = find(entries, Op.FORWARD)
    entries[index] = entries[index]._replace(start=0, stop=1)


def wrong_boundary(entries):
    index = find(entries, Op.RECEIVE, What.ACTIVATIONS)
    entries[index] = entries[index]._replace(start=1, stop=1)


def reverse_reductions(entries):
    places = [i for i, e in enumerate(entries) if e.op is Op.REDUCE_GRADIENTS]
    for a, b in zip(places, reversed(places), strict=True):
        if a < b:
            entries[a], entries[b] = entries[b]._replace(after=()), entries[a]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop(Op.RECEIVE, What.ACTIVATIONS), "is missing"),
        (drop(Op.RECEIVE, What.GRADIENTS), "is missing"),
        (drop(Op.SEND, What.ACTIVATIONS), "is missing"),
        (drop(Op.FORWARD), "too early|never finishes"),
        (drop(Op.BACKWARD_INPUT), "too early|never finishes"),
        (drop(Op.BACKWARD_WEIGHT), "never finishes"),
        (repeat(Op.SEND, What.GRADIENTS), "stands 2 times|does not wait"),
        (repeat(Op.FORWARD), "twice"),
        (repeat(Op.BACKWARD_WEIGHT), "twice"),
        (swap(Op.RECEIVE, What.ACTIVATIONS), "deadlock|does not wait"),
        (swap(Op.SEND, What.GRADIENTS), "does not stand before|deadlock|does not wait"),
        (forget_to_wait(Op.FORWARD), "does not wait"),
        (forget_to_wait(Op.SEND), "does not wait"),
        (wait_for_the_future, "does not stand before"),
        (wrong_unit, "not on this stage"),
        (wrong_boundary, "has no partner"),
        (drop(Op.CLIP_NORM), "ClipNorm stands 0 times"),
        (drop(Op.STEP), "Step of unit"),
        (forget_to_wait(Op.STEP), "does not wait for ClipNorm"),
    ],
    ids=[
        "activations never received",
        "gradients never received",
        "activations never sent",
        "no forward",
        "no input gradient",
        "no weight gradient",
        "gradients sent twice",
        "forward twice",
        "weight gradient twice",
        "receives swapped",
        "sends swapped",
        "forward does not wait",
        "send does not wait",
        "waits for the future",
        "unit of another stage",
        "boundary of another stage",
        "one stage skips the norm",
        "a unit is never updated",
        "the optimizer does not wait",
    ],
)
def test_broken_lists_are_rejected(change, reason):
    schedule = build_schedule(uniform(3, 4, ScheduleKind.ONE_F_ONE_B))
    problems = check_schedule(broken(schedule, 1, change))
    assert problems
    assert re.search(reason, problems[0]), problems[0]


def test_crossed_messages_are_a_deadlock():
    """Each stage receives what the other sends only afterwards; each list alone is in order."""
    schedule = build_schedule(uniform(2, 3, ScheduleKind.ONE_F_ONE_B))
    assert check_schedule(schedule) == []

    def late_second_send(entries):
        """Send micro-batch 1 forward only after the gradient of micro-batch 0 came back."""
        sends = [i for i, e in enumerate(entries) if e.op is Op.SEND and e.what is What.ACTIVATIONS]
        receives = [i for i, e in enumerate(entries) if e.op is Op.RECEIVE]
        first, last = sends[1], receives[-1]
        assert first < last
        moved = entries[first]
        order = [i for i in range(len(entries)) if i != first]
        order.insert(order.index(last) + 1, first)
        place = {old: new for new, old in enumerate(order)}
        entries[:] = [
            entries[i]._replace(after=tuple(place[w] for w in entries[i].after)) for i in order
        ]
        assert moved.key in [e.key for e in entries]

    problems = check_schedule(broken(schedule, 0, late_second_send))
    assert any("deadlock" in problem for problem in problems), problems


def test_a_list_of_another_stage_is_noticed():
    schedule = build_schedule(uniform(3, 4, ScheduleKind.ONE_F_ONE_B))
    classes = list(schedule.classes)
    classes[1] = replace(classes[1], instructions=classes[0].instructions)
    problems = check_schedule(replace(schedule, classes=tuple(classes)))
    assert problems
    assert "not on this stage" in problems[0]


def test_units_out_of_order_are_noticed():
    schedule = build_schedule(uniform(1, 1, ScheduleKind.ONE_F_ONE_B))

    def split_and_swap(entries):
        index = find(entries, Op.FORWARD)
        entry = entries[index]
        low = entry._replace(stop=entry.start + 1)
        high = entry._replace(start=entry.start + 1, after=())
        shifted = [
            e._replace(after=tuple(i + 1 if i > index else i for i in e.after))
            for e in entries[index + 1 :]
        ]
        entries[index:] = [high, low, *shifted]

    problems = check_schedule(broken(schedule, 0, split_and_swap))
    assert any("not in order" in problem for problem in problems), problems


def test_reductions_in_unlike_order_are_a_deadlock():
    plan = uniform(1, 2, ScheduleKind.ONE_F_ONE_B)
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages
    (replica,) = stage.replicas
    two = (
        replace(replica, chips=ChipSet.of("fast/0/0")),
        replace(replica, chips=ChipSet.of("fast/0/1")),
    )
    stage = replace(stage, replicas=two)
    plan = replace(
        plan,
        job=replace(plan.job, global_batch=4),
        pipelines=(replace(pipeline, micro_batch=2, stages=(stage,)),),
    )
    schedule = build_schedule(plan)
    assert check_schedule(schedule) == []
    problems = check_schedule(broken(schedule, 1, reverse_reductions))
    assert any("deadlock" in problem for problem in problems), problems
    with pytest.raises(InputError, match=r"^schedule: "):
        require_valid(broken(schedule, 1, reverse_reductions))
