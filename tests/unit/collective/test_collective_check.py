"""The checker refuses broken programs, for the right reason, and never accepts a wrong one."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from collective_cases import EVERY, calls
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tutti.collective import (
    Action,
    Blocks,
    CollectiveProgram,
    Cut,
    Group,
    Owned,
    Pattern,
    Pieces,
    ProgramError,
    Reason,
    Slice,
    Step,
    Team,
    Transfer,
    build,
    check,
    written_out,
)
from tutti.collective.interpret import interpret

GROUP = Group.of([[0, 1, 2], [3, 4]])
HIERARCHICAL = build("all_reduce", "hierarchical", GROUP)
RING = build("all_reduce", "ring", GROUP)
WHOLE = (Slice(range(1)),)


def with_step(program: CollectiveProgram, index: int, **changes) -> CollectiveProgram:
    steps = list(program.steps)
    steps[index] = dataclasses.replace(steps[index], **changes)
    return dataclasses.replace(program, steps=tuple(steps))


def with_team(program: CollectiveProgram, members, parts) -> CollectiveProgram:
    return with_step(program, 0, teams=(Team(tuple(members), parts),))


def exchange(*transfers: Transfer, operation: str = "broadcast") -> CollectiveProgram:
    step = Step(action=Action.EXCHANGE, rounds=(transfers,))
    program = build(operation, "tree", Group.regular(1, 3), root=0)
    return dataclasses.replace(program, steps=(step,))


def send(source, target, start=0, stop=1, *, section=0, reduce=False) -> Transfer:
    piece = Slice(range(section, section + 1), Fraction(start), Fraction(stop))
    return Transfer(source=source, target=target, part=(piece,), reduce=reduce)


HALF = Fraction(1, 2)
BROKEN = {
    "ends": [
        with_team(RING, [0, 1, 2, 3, 9], Cut(WHOLE)),
        with_team(RING, [0, 1, 2, 3, 3], Cut(WHOLE)),
        with_team(RING, [], Cut(WHOLE)),
        exchange(send(0, 1), send(0, 7)),
        exchange(send(0, 0), send(0, 1), send(0, 2)),
    ],
    "parts": [
        with_team(RING, range(5), Cut(WHOLE, (1, 2))),
        with_team(RING, range(5), Pieces((WHOLE,))),
        with_team(RING, range(5), Blocks()),
        with_team(build("all_to_all", "direct", GROUP), range(5), Owned()),
        with_step(RING, 0, rounds=((send(0, 1),),)),
        with_step(RING, 0, action=Action.EXCHANGE),
    ],
    "pattern": [with_step(build("all_gather", "ring", GROUP), 0, pattern=Pattern.TREE)],
    "native": [with_step(RING, 0, pattern=Pattern.NATIVE)],
    "bounds": [
        with_team(RING, range(5), Owned()),  # sections 1…4 of an operation that has one
        exchange(send(0, 1, -1, 1), send(0, 2)),
        exchange(send(0, 1, 0, Fraction(3, 2)), send(0, 2)),
        exchange(send(0, 1, 1, 0), send(0, 2)),
        exchange(send(0, 1, section=4), send(0, 2)),
        with_step(build("barrier", "tree", GROUP), 0, pattern=Pattern.RING),
    ],
    "wait": [
        with_step(HIERARCHICAL, 0, after=(1,)),
        with_step(HIERARCHICAL, 1, after=(1,)),
        with_step(HIERARCHICAL, 1, after=(7,)),
        with_step(HIERARCHICAL, 1, after=(-1,)),
    ],
    "race": [
        with_step(HIERARCHICAL, 1, after=()),
        with_step(HIERARCHICAL, 2, after=(0,)),
        with_step(RING, 0, teams=RING.steps[0].teams * 2),
        exchange(send(0, 1), send(0, 1), send(0, 2)),
    ],
    "missing": [
        exchange(send(1, 2)),
        exchange(send(0, 1, reduce=True), send(0, 2)),
        dataclasses.replace(
            build("all_gather", "leader", GROUP),
            steps=(dataclasses.replace(build("all_gather", "leader", GROUP).steps[1], after=()),),
        ),
    ],
    "twice": [
        dataclasses.replace(
            RING, steps=(*RING.steps, dataclasses.replace(RING.steps[0], after=(0,)))
        )
    ],
    "result": [
        dataclasses.replace(HIERARCHICAL, steps=()),
        dataclasses.replace(HIERARCHICAL, steps=HIERARCHICAL.steps[:1]),
        dataclasses.replace(HIERARCHICAL, steps=HIERARCHICAL.steps[:2]),
        with_team(RING, range(4), Cut(WHOLE)),
        with_team(RING, range(5), Cut((Slice(range(1), Fraction(0), HALF),))),
        exchange(send(0, 1), send(0, 2, 0, HALF)),
        with_step(build("all_gather", "ring", GROUP), 0, action=Action.REDUCE_SCATTER, teams=()),
    ],
}
CASES = [(reason, i) for reason, found in BROKEN.items() for i in range(len(found))]


@pytest.mark.parametrize(("reason", "index"), CASES)
def test_broken_programs_are_refused_for_the_right_reason(reason, index):
    with pytest.raises(ProgramError) as caught:
        check(BROKEN[reason][index])
    assert caught.value.reason is Reason(reason), str(caught.value)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broadcast_from_the_wrong_root_is_refused():
    program = build("broadcast", "tree", GROUP, root=0)
    with pytest.raises(ProgramError, match="does not hold it"):
        check(dataclasses.replace(program, root=1))


def test_sums_in_different_orders_are_refused():
    """Three ranks that all send to all add up in three orders."""
    group = Group.regular(1, 3)
    everyone = tuple(
        send((target + shift) % 3, target, reduce=True) for target in range(3) for shift in (1, 2)
    )
    program = CollectiveProgram(
        operation=RING.operation,
        algorithm="own",
        group=group,
        steps=(Step(action=Action.EXCHANGE, rounds=(everyone,)),),
    )
    with pytest.raises(ProgramError, match="another order"):
        check(program)


def test_overwriting_what_is_being_sent_is_a_race():
    program = exchange(send(0, 1), send(0, 2))
    both = Step(action=Action.EXCHANGE, rounds=((send(0, 1), send(1, 0)),), after=(0,))
    with pytest.raises(ProgramError, match="overwritten while in use"):
        check(dataclasses.replace(program, steps=(*program.steps, both)))


MINIMAL = [
    e for e in EVERY if e[1] in ("ring", "tree", "binary", "doubling", "direct", "native", "rail")
]


def _pick(program: CollectiveProgram, data: st.DataObject) -> tuple[int, int, int]:
    places = [
        (i, j, k)
        for i, step in enumerate(program.steps)
        for j, one in enumerate(step.rounds)
        for k, transfer in enumerate(one)
        if any(piece.sections and piece.stop > piece.start for piece in transfer.part)
    ]
    assume(places)
    return data.draw(st.sampled_from(places))


def _changed(
    program: CollectiveProgram, place: tuple[int, int, int], new: tuple[Transfer, ...]
) -> CollectiveProgram:
    i, j, k = place
    rounds = list(program.steps[i].rounds)
    rounds[j] = rounds[j][:k] + new + rounds[j][k + 1 :]
    return with_step(program, i, rounds=tuple(rounds))


several = settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@pytest.mark.parametrize(("operation", "algorithm"), MINIMAL)
@several
@given(data=st.data())
def test_no_transfer_of_a_minimal_algorithm_can_be_left_out(operation, algorithm, data):
    program = written_out(data.draw(calls(operation, algorithm)).program)
    place = _pick(program, data)
    with pytest.raises(ProgramError) as caught:
        check(_changed(program, place, ()))
    assert caught.value.reason in (Reason.MISSING, Reason.RESULT)


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
@several
@given(data=st.data())
def test_what_the_checker_accepts_is_right(operation, algorithm, data):
    """Programs broken at random are refused, or still give the plain result."""
    call = data.draw(calls(operation, algorithm))
    program = written_out(call.program)
    place = _pick(program, data)
    i, j, k = place
    old = program.steps[i].rounds[j][k]
    seats = st.integers(0, program.group.size)
    change = data.draw(st.sampled_from(["drop", "flip", "source", "target", "twice", "rounds"]))
    match change:
        case "drop":
            broken = _changed(program, place, ())
        case "flip":
            new = dataclasses.replace(old, reduce=not old.reduce)
            broken = _changed(program, place, (new,))
        case "source" | "target":
            new = dataclasses.replace(old, **{change: data.draw(seats)})
            broken = _changed(program, place, (new,))
        case "twice":
            broken = _changed(program, place, (old, old))
        case _:
            order = data.draw(st.permutations(program.steps[i].rounds))
            broken = with_step(program, i, rounds=tuple(order))
    try:
        check(broken)
    except ProgramError:
        return
    inputs = call.inputs()
    outputs = interpret(broken, inputs, call.counts).outputs
    for rank, values in call.expected(inputs).items():
        np.testing.assert_array_equal(outputs[rank], values)
