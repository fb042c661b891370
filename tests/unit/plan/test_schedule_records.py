"""The records of schedules are what the lists do: how far ahead, how much held, in which shape."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.lines import line
from tests.support.plans import plans
from tutti.errors import InputError
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Pipeline, Plan
from tutti.plan.schedules import StagePlace, kinds_with, schedule_record, warm_up_depth
from tutti.schedule.order import Action, Pass, orders


def most_between(actions: list[Action], first: Pass, second: Pass) -> int:
    """Return how many passes lie between one and another at most."""
    steps = [(action.kind == first) - (action.kind == second) for action in actions]
    return max(itertools.accumulate(steps))


def check(pipeline: Pipeline, kind: ScheduleKind) -> None:
    """Hold every stage's actions against the record."""
    record = schedule_record(kind)
    depths = [warm_up_depth(pipeline, s, kind) for s in range(len(pipeline.stages))]
    for stage, actions in enumerate(orders(pipeline, kind)):
        ahead = most_between(actions, Pass.FORWARD, Pass.BACKWARD_INPUT)
        held = most_between(actions, Pass.FORWARD, Pass.BACKWARD_WEIGHT)
        if record.delays_weights:
            assert ahead <= depths[stage]
            assert held <= max(depths)
        else:
            assert ahead == held == depths[stage]


@given(plans())
def test_stages_of_random_plans_hold_what_their_record_says(plan: Plan) -> None:
    for pipeline in plan.pipelines:
        check(pipeline, plan.job.schedule)


@pytest.mark.parametrize("kind", list(ScheduleKind))
@pytest.mark.parametrize(("depth", "count"), [(1, 1), (1, 5), (2, 3), (4, 2), (4, 11), (7, 21)])
def test_usual_depths_are_those_of_the_record(kind: ScheduleKind, depth: int, count: int) -> None:
    record = schedule_record(kind)
    for ranges in (1, 2, 3) if record.several_ranges else (1,):
        pipeline = line(depth, count, ranges)
        check(pipeline, kind)
        places = [StagePlace(depth, s, count, ranges) for s in range(depth)]
        ahead = [record.passes_ahead(place) for place in places]
        assert ahead == [warm_up_depth(pipeline, s, kind) for s in range(depth)]
        assert ahead == sorted(ahead, reverse=True), "a later stage would wait for ever"
        assert all(1 <= passes <= ranges * count for passes in ahead)
        held = [max(ahead) if record.delays_weights else passes for passes in ahead]
        assert [record.in_flight(place) * ranges for place in places] == pytest.approx(held)


@pytest.mark.parametrize("kind", list(ScheduleKind))
@given(places=st.lists(st.tuples(*[st.integers(1, 40)] * 4), min_size=1, max_size=20))
def test_arrays_give_what_numbers_give(
    kind: ScheduleKind, places: list[tuple[int, int, int, int]]
) -> None:
    record = schedule_record(kind)
    rows = [(d, s % d, m, r if record.several_ranges else 1) for d, s, m, r in places]
    columns = StagePlace(*np.array(rows, dtype=np.float64).T)
    one_by_one = [record.in_flight(StagePlace(*row)) for row in rows]
    assert record.in_flight(columns).tolist() == one_by_one


@pytest.mark.parametrize(
    ("micro_batches", "stage", "flight"),
    [
        (64, 0, (2 * 3 + 2 * 4 + 1) / 3),  # groups of four
        (64, 3, (2 * 4 + 1) / 3),
        (66, 0, (2 * 3 + 2 * 5 + 1) / 3),  # sixteen groups, the longest of five
        (2, 0, 2.0),  # all of them
    ],
)
def test_interleaved_stages_keep_as_much_as_their_groups_are_long(
    micro_batches: int, stage: int, flight: float
) -> None:
    found = schedule_record(ScheduleKind.INTERLEAVED).in_flight(
        StagePlace(4, stage, micro_batches, 3)
    )
    assert found == pytest.approx(flight)


@pytest.mark.parametrize("ask", [schedule_record, lambda kind: orders(line(2, 2), kind)])
def test_a_kind_without_a_record_is_refused(ask) -> None:
    with pytest.raises(InputError, match="schedule 'dualpipe' has no"):
        ask("dualpipe")


def test_every_kind_has_a_record_and_an_order() -> None:
    assert set(kinds_with(lambda record: True)) == set(ScheduleKind)
    for kind in ScheduleKind:
        assert orders(line(1, 1), kind)
