"""Groups and programs are written to JSON and read back, small and strict."""

from __future__ import annotations

import copy
import json

import pytest
from collective_cases import EVERY, groups, programs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tutti.collective import (
    CollectiveProgram,
    Edge,
    Group,
    Island,
    algorithms,
    build,
    check,
    written_out,
)
from tutti.collective.notation import read_numbers, runs, write_numbers
from tutti.document import Place, plain
from tutti.document import build as read
from tutti.errors import InputError
from tutti.files import parse_json

PLACE = Place("program.json")
quick = settings(
    max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def again(kind, value):
    return read(kind, parse_json(json.dumps(plain(value)), "program.json"), PLACE)


@given(st.lists(st.integers(0, 60), max_size=30))
def test_numbers_keep_their_order(numbers):
    assert read_numbers(write_numbers(numbers), PLACE) == tuple(numbers)
    assert [number for run in runs(numbers) for number in run] == numbers


@quick
@given(groups())
def test_groups_round_trip(group):
    assert again(Group, group) == group


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
@quick
@given(data=st.data())
def test_programs_round_trip(operation, algorithm, data):
    program = data.draw(programs(operation, algorithm))
    assert again(CollectiveProgram, program) == program
    assert again(CollectiveProgram, written_out(program)) == written_out(program)


def test_large_programs_are_small_files():
    group = Group.regular(2048, 8)
    assert plain(group) == [{"ranks": "0-7", "times": 2048, "shift": 8}]
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for algorithm in algorithms(operation, group):
            program = build(operation, algorithm, group)
            assert len(json.dumps(plain(program))) < 40_000
            assert again(CollectiveProgram, program) == program


def _paths(value, path=()):
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _paths(item, (*path, index))


JUNK = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        3,
        2.5,
        1e30,
        "",
        "ring",
        "0-",
        "9-0",
        "0-999999999999",
        "1/0",
        "0 @ 1..",
        [],
        {},
        [[]],
        {"a": 1},
    ]
)


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
@settings(parent=quick, max_examples=30)
@given(data=st.data())
def test_malformed_programs_are_answered_in_one_line(operation, algorithm, data):
    program = data.draw(programs(operation, algorithm))
    program = written_out(program) if data.draw(st.booleans()) else program
    document = copy.deepcopy(plain(program))
    path = data.draw(st.sampled_from(list(_paths(document))[1:]))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    if data.draw(st.booleans()):
        inner[path[-1]] = data.draw(JUNK)
    elif isinstance(inner, dict):
        inner["unheard_of"] = inner.pop(path[-1])
    else:
        del inner[path[-1]]
    message = ""
    try:
        check(read(CollectiveProgram, document, PLACE))
    except InputError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "at least one island"),
        ({}, "list of islands"),
        ([{"ranks": "0-3"}, {"ranks": "3-5"}], "rank 3 stands in the group twice"),
        ([{"ranks": "0-3", "rails": "0-1"}], "'rails' has 2 entries for 4 ranks"),
        ([{"ranks": "0-1", "bandwidths": [0, 0]}], "all 0"),
        ([{"ranks": "0-1", "bandwidths": [1, -2]}], "0 or more"),
        ([{"ranks": "4-1"}], "does not reach"),
        ([{"ranks": ""}], "at least one rank"),
        ([{"rank": "0-1"}], "did you mean 'ranks'"),
    ],
)
def test_malformed_groups_are_answered_in_one_line(document, message):
    with pytest.raises(InputError, match=message):
        read(Group, document, PLACE)


def test_what_joins_two_ranks():
    group = Group((Island(ranks=(4, 2)), Island(ranks=(0, 1, 3), rails=(1, 0, 2))))
    seat = group.seat
    assert group.edge(seat(4), seat(2)) is Edge.ISLAND
    assert group.edge(seat(4), seat(1)) is Edge.RAIL
    assert group.edge(seat(4), seat(0)) is Edge.CROSS
    assert [group.ranks[s] for s in group.by_rank] == [0, 1, 2, 3, 4]
    assert group.position_of(seat(3)) == 2
    assert group.seats(1) == range(2, 5)
