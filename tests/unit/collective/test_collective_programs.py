"""Every operation by every algorithm on any group gives the plain result."""

from __future__ import annotations

import numpy as np
import pytest
from collective_cases import EVERY, calls, programs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tutti.collective import (
    Group,
    Operation,
    algorithms,
    build,
    check,
    rounds,
    seat_rounds,
    stripes,
    written_out,
)
from tutti.collective.interpret import interpret
from tutti.errors import InputError

every = pytest.mark.parametrize(("operation", "algorithm"), EVERY)
quick = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@every
@quick
@given(data=st.data())
def test_the_interpreter_equals_the_plain_result(operation, algorithm, data):
    call = data.draw(calls(operation, algorithm))
    inputs = call.inputs()
    outputs = interpret(call.program, inputs, call.counts).outputs
    expected = call.expected(inputs)
    assert outputs.keys() == expected.keys()
    for rank, values in expected.items():
        np.testing.assert_array_equal(outputs[rank], values)


@every
@quick
@given(data=st.data())
def test_the_checker_accepts_what_the_builder_makes(operation, algorithm, data):
    check(data.draw(programs(operation, algorithm)))


@pytest.mark.parametrize(("operation", "algorithm"), [e for e in EVERY if e[0].reduces])
@settings(parent=quick, max_examples=10)
@given(data=st.data())
def test_floats_are_added_in_one_order(operation, algorithm, data):
    call = data.draw(calls(operation, algorithm))
    inputs = call.inputs(np.float32)
    first = interpret(call.program, inputs, call.counts).outputs
    again = interpret(call.program, inputs, call.counts).outputs
    expected = call.expected(call.inputs(np.float64))
    for rank, values in first.items():
        assert values.tobytes() == again[rank].tobytes()
        scale = float(1 << 40)
        np.testing.assert_allclose(values, expected[rank], rtol=1e-5, atol=1e-4 * scale)
    if operation is Operation.ALL_REDUCE:
        assert len({values.tobytes() for values in first.values()}) == 1


@every
@settings(parent=quick, max_examples=10)
@given(data=st.data())
def test_what_each_rank_sees_is_the_whole(operation, algorithm, data):
    """`seat_rounds`, which costs little, tells each rank exactly its lines of `rounds`."""
    program = data.draw(programs(operation, algorithm))
    for step in program.steps:
        together = [t for one in rounds(program, step) for t in one]
        seen = [
            [local for team in seat_rounds(program, step, seat) for local in team]
            for seat in range(program.group.size)
        ]
        for end, side in (("source", "sends"), ("target", "receives")):
            for seat, locals_ in enumerate(seen):
                listed = [t for local in locals_ for t in getattr(local, side)]
                meant = [t for t in together if getattr(t, end) == seat]
                assert sorted(map(repr, listed)) == sorted(map(repr, meant))


@every
@settings(parent=quick, max_examples=5)
@given(data=st.data())
def test_written_out_it_is_the_same_program(operation, algorithm, data):
    call = data.draw(calls(operation, algorithm))
    inputs = call.inputs()
    short = interpret(call.program, inputs, call.counts)
    long = interpret(written_out(call.program), inputs, call.counts)
    assert short.traffic.pairs == long.traffic.pairs
    for rank, values in short.outputs.items():
        np.testing.assert_array_equal(values, long.outputs[rank])


@pytest.mark.parametrize("operation", list(Operation))
def test_every_root_and_every_listed_algorithm(operation):
    for group in (Group.of([[4, 1, 2], [0, 3]]), Group.regular(2, 2), Group.of([[3, 1, 2]])):
        for algorithm in algorithms(operation, group):
            for root in group.ranks if operation.has_root else [None]:
                check(build(operation, algorithm, group, root=root))


def test_which_algorithms_apply():
    one, flat, nested = Group.regular(1, 4), Group.regular(4, 1), Group.regular(2, 4)
    assert "native" in algorithms("all_reduce", one)
    assert "hierarchical" not in algorithms("all_reduce", one)
    assert not {"native", "hierarchical", "leader"} & set(algorithms("all_reduce", flat))
    assert {"hierarchical", "leader", "proportional", "ring"} <= set(
        algorithms("all_reduce", nested)
    )
    assert algorithms("all_to_all", nested) == ("direct", "rail")


def test_a_maximum_reduces_too():
    group = Group.of([[0, 1], [2]])
    program = build("all_reduce", "hierarchical", group)
    inputs = {rank: np.array([rank, -rank, 7]) for rank in group.ranks}
    outputs = interpret(program, inputs, 3, reduction=np.maximum).outputs
    assert all(values.tolist() == [2, 0, 7] for values in outputs.values())


def test_stripes_tile_a_message():
    program = build("all_reduce", "ring", Group.regular(2, 2), connections=3)
    (transfer, *_), *_ = rounds(program, program.steps[0])
    found = stripes(transfer.part, 3)
    bounds = [piece.bounds(101) for (piece,) in found]
    assert bounds[0][0] == transfer.part[0].bounds(101)[0]
    assert bounds[-1][1] == transfer.part[0].bounds(101)[1]
    assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduc", "ring"), "did you mean 'all_reduce'"),
        (("all_reduce", "rings"), "did you mean 'ring'"),
        (("broadcast", "tree"), "needs a root"),
        (("all_reduce", "native"), "one island"),
    ],
)
def test_bad_requests_say_what_to_do(arguments, message):
    with pytest.raises(InputError, match=message):
        build(*arguments, Group.regular(2, 2))


def test_bad_options_say_what_to_do():
    group = Group.regular(2, 2)
    for options, message in [
        ({"root": 0}, "has no root"),
        ({"chunks": 0}, "at least 1"),
        ({"across": "native"}, "between islands has ring"),
        ({"across": "rng"}, "did you mean 'ring'"),
        ({"order": [0, 1, 2]}, "each of the group's 4 ranks once"),
    ]:
        with pytest.raises(InputError, match=message):
            build("all_reduce", "hierarchical", group, **options)
    with pytest.raises(InputError, match="rank 9 is not in the group"):
        build("broadcast", "tree", group, root=9)
    with pytest.raises(InputError, match="not divided"):
        build("barrier", "leader", group, across="ring")


def test_inputs_of_the_wrong_length_are_refused():
    program = build("all_gather", "ring", Group.regular(1, 2))
    with pytest.raises(InputError, match="rank 1 brings 3 elements"):
        interpret(program, {0: np.zeros(2), 1: np.zeros(3)}, 2)
    with pytest.raises(InputError, match="3 counts for 2 sections"):
        interpret(program, {0: np.zeros(2), 1: np.zeros(2)}, [1, 2, 3])
