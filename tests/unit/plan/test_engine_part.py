"""One engine of a plan as a plan of its own."""

from __future__ import annotations

import pytest

from tests.support.deployments import mixed_plan, separated_plan
from tutti.errors import InputError
from tutti.plan.engine_part import engine_part, num_engines, pipeline_of


def test_equal_engines_have_their_own_chips() -> None:
    plan = mixed_plan()
    assert num_engines(plan) == 3
    parts = [engine_part(plan, number) for number in range(3)]
    assert [str(part.pipelines[0].stages[0].chips) for part in parts] == [
        "h100/0/0", "h100/0/1", "a100/0/0-1",
    ]  # fmt: skip
    assert [part.num_ranks for part in parts] == [1, 1, 2]
    assert [part.pipelines[0].slots for part in parts] == [64, 64, 32]
    assert [pipeline_of(plan, number) for number in range(3)] == [(0, 0), (0, 1), (1, 0)]


def test_routes_are_nobodys_own() -> None:
    assert engine_part(separated_plan(), 2).routes == ()


def test_an_engine_that_is_not_there() -> None:
    with pytest.raises(InputError, match="has 3 engines; there is no engine 3"):
        engine_part(mixed_plan(), 3)
