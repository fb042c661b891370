"""Expert groups whose members recompute unlike units would wait for ever: the checker says so."""

from __future__ import annotations

import pytest

from tests.support.any_plan import FOUR, Draft
from tutti.errors import InputError
from tutti.plan.check import check_plan, require_valid
from tutti.plan.expert_meetings import missed_meeting
from tutti.plan.plan import ExpertGroup, Plan, Recompute

AGAIN = Recompute(full=((2, 3),))  # a unit with experts
DENSE = Recompute(full=((1, 2),))  # one without


def made(chips: int, *replicas: dict, count: int = 1) -> Plan:
    groups = {0: (ExpertGroup(chips=chips, count=count),)}
    return Draft(experts_in=(1,)).line((FOUR, list(replicas)), experts=groups).plan()


def codes(plan: Plan) -> list[str]:
    return [problem.code for problem in check_plan(plan)]


def test_a_group_that_recomputes_by_halves_is_refused_with_a_remedy():
    plan = made(2, {"recompute": AGAIN}, {})
    assert codes(plan) == ["meeting"]
    with pytest.raises(InputError, match=r"recomputes unit 2 in full.*on both or on neither"):
        require_valid(plan)


@pytest.mark.parametrize(
    "plan",
    [
        made(2, {"recompute": AGAIN}, {"recompute": AGAIN}),
        made(2, {"recompute": DENSE}, {}),  # exchanges nothing
        made(2, {"recompute": Recompute(selective=((2, 3),))}, {}),  # nor does attention
        made(2, {"recompute": AGAIN, "count": 2}, {"count": 2}, count=2),  # each group is alike
        made(1, {"recompute": AGAIN}, {}, count=2),
    ],
)
def test_groups_whose_members_do_alike_meet(plan):
    assert codes(plan) == []


def test_only_the_group_that_lies_across_two_replicas_counts():
    model = Draft(experts_in=(1,)).model
    holders = [(2, ()), (3, ((2, 3),)), (3, ())]
    even = (ExpertGroup(chips=2), ExpertGroup(chips=3, count=2))
    assert missed_meeting(holders, even, FOUR, model) is None
    uneven = (ExpertGroup(chips=2), ExpertGroup(chips=2), ExpertGroup(chips=4))
    assert missed_meeting(holders, uneven, FOUR, model) == (1, 2, 2)
