"""Malformed plan files: refused in one line, or read and then checked without a crash."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import plans
from tutti.errors import InputError
from tutti.plan.check import check_plan
from tutti.plan.files import plan_from_document, plan_to_document
from tutti.schedule.check import check_schedule
from tutti.schedule.schedule import build_schedule

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.sampled_from([10**9, 10**30, -1, 0, 1.5, float("nan"), float("inf"), -1e300]),
    st.sampled_from(["", "x", "fast/0/0", "fast/0-9/0-7", "nowhere/0/0", "1f1b", "[red]", "a\nb"]),
    st.sampled_from([[], {}, [[]], [[0, 1]], [[3, 1]], [{}], {"name": "x"}]),
)


def places(value: Any, trail: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [trail] if trail else []
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(item, (*trail, key))
    return found


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    document = plan_to_document(draw(plans()))
    for reference in ("model", "cluster"):
        if draw(st.booleans()):
            document[reference]["hash"] = ""  # edited by hand: not checked
    for _ in range(draw(st.integers(1, 3))):
        trail = draw(st.sampled_from(places(document)))
        parent = document
        for key in trail[:-1]:
            parent = parent[key]
        match draw(st.sampled_from(["replace", "remove", "rename", "double"])):
            case "replace":
                parent[trail[-1]] = copy.deepcopy(draw(JUNK))
            case "remove":
                del parent[trail[-1]]
            case "rename" if isinstance(parent, dict):
                parent[draw(st.sampled_from(["stage", "tp", "units", "cout"]))] = parent.pop(
                    trail[-1]
                )
            case "double" if isinstance(parent, list):
                parent.append(copy.deepcopy(parent[trail[-1]]))
    return document


@given(mutated())
def test_mutated_plans_are_refused_in_one_line_or_checked(document):
    try:
        plan = plan_from_document(document, "plan.json")
        problems = check_plan(plan)
    except InputError as error:
        said = str(error)
    else:
        said = "\n".join(map(str, problems[:1]))
        if not problems:  # the mutation left a valid plan: its schedule must be valid too
            assert check_schedule(build_schedule(plan)) == []
    assert "\n" not in said
