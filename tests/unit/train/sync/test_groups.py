"""Which groups a plan needs: found by each rank alone, the same for all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.support.any_plan import FOUR, PLANS, Draft
from tests.support.plans import plans
from tutti.collective import Operation
from tutti.comm.choice import Named
from tutti.comm.connect import group_number
from tutti.errors import InputError
from tutti.plan.plan import CollectiveChoice, ExpertGroup, Plan, Recompute
from tutti.ranks.rank_places import Seats
from tutti.train.sync.comm_links import PlannedPrograms
from tutti.train.sync.groups import all_groups, groups_of, pools_of, require_meetings


def seats_of(plan: Plan) -> Seats:
    assert plan.model.spec is not None
    return Seats(plan, plan.model.spec)


def check_agreement(plan: Plan) -> None:
    """Every member of a group, and nobody else, finds it; all in one order."""
    seats = seats_of(plan)
    every = all_groups(seats)
    for rank in range(seats.num_ranks):
        assert groups_of(seats, rank) == tuple(g for g in every if rank in g.ranks)
    assert all(tuple(sorted(set(g.ranks))) == g.ranks and len(g.ranks) > 1 for g in every)


@pytest.mark.parametrize("name", PLANS)
def test_members_agree(name):
    check_agreement(PLANS[name])


@settings(max_examples=12)
@given(plans())
def test_members_of_drawn_plans_agree(plan):
    if plan.num_ranks <= 16:
        check_agreement(plan)


def test_the_groups_of_a_plan():
    seats = seats_of(PLANS["experts over tensor and data parallel"])
    found = {(group.ranks, group.use) for group in groups_of(seats, 0)}
    everyone = (0, 1, 2, 3)
    assert found == {
        (everyone, "scalars"),
        ((0, 1), "block"),  # tensor ranks; the first two also share out the experts
        ((0, 1), "boundary"),
        (everyone, "gradients"),  # of what all hold, or hold in slices with a copy
        (everyone, "parameters"),
        ((0, 2), "gradients"),
        ((0, 2), "parameters"),
    }


def test_an_expert_group_that_recomputes_by_halves_is_refused():
    again = Recompute(full=((2, 3),))
    groups = {0: (ExpertGroup(chips=2),)}
    draft = Draft(experts_in=(1,))
    plan = draft.line((FOUR, [{"recompute": again}, {}]), experts=groups).plan()
    for rank in range(2):
        with pytest.raises(InputError, match=r"ranks 0 and 1 .* recomputes unit 2 in full"):
            require_meetings(seats_of(plan), rank)
    dense = Recompute(full=((1, 2),))  # exchanges nothing
    draft = Draft(experts_in=(1,))
    plan = draft.line((FOUR, [{"recompute": dense}, {}]), experts=groups).plan()
    require_meetings(seats_of(plan), 0)


def test_numbers_tell_ranks_names_and_turns_apart():
    numbers = {
        group_number(ranks, name, turn)
        for ranks in ((0, 1), (0, 1, 2), (1, 2), (12,), (1, 2, 3))
        for name in ("", "gradients", "block")
        for turn in (1, 2)
    }
    assert len(numbers) == 30
    assert all(0 <= number < 1 << 63 for number in numbers)


# --- programs ------------------------------------------------------------------------------


def choices(*entries: dict) -> Plan:
    plan = PLANS["unequal shares on unlike chips"]
    return replace(plan, collectives=tuple(CollectiveChoice(**entry) for entry in entries))


def test_a_rule_goes_by_use_pools_and_size():
    ring = {"use": "gradients", "operation": "all_reduce", "algorithm": "ring"}
    plan = choices(
        {**ring, "max_bytes": 1000.0},
        {**ring, "algorithm": "hierarchical", "chunks": 4, "channels": 3},
        {**ring, "algorithm": "tree", "pools": ("fast",)},
    )
    programs = PlannedPrograms(seats_of(plan))
    assert pools_of(seats_of(plan), (0, 1)) == ("fast", "slow")
    rule = programs.rule("gradients", (0, 1), 2)
    assert rule(Operation.ALL_REDUCE, 1000) == Named(algorithm="ring", connections=2)
    wanted = Named(algorithm="hierarchical", chunks=4, connections=3)
    assert rule(Operation.ALL_REDUCE, 1001) == wanted
    assert rule(Operation.REDUCE_SCATTER, 1000) is None
    fast = programs.rule("gradients", (0,), 1)
    assert fast(Operation.ALL_REDUCE, 10) == Named(algorithm="tree")
    for use in ("scalars", "parameters", "block", "boundary"):
        assert programs.rule(use, (0, 1), 1)(Operation.ALL_REDUCE, 10) is None


def test_auto_leaves_the_choice_open():
    plan = choices({"use": "gradients", "operation": "all_reduce", "algorithm": "auto"})
    programs = PlannedPrograms(seats_of(plan))
    assert programs.rule("gradients", (0, 1), 1)(Operation.ALL_REDUCE, 9) is None


def test_what_blocks_exchange_is_recorded_for_experts():
    plan = choices({"use": "experts", "operation": "all_to_all", "algorithm": "rail"})
    programs = PlannedPrograms(seats_of(plan))
    assert programs.tells("experts", Operation.ALL_TO_ALL, (0,))
    assert not programs.tells("experts", Operation.ALL_REDUCE, (0,))
    rule = programs.rule("block", (0,), 1)
    assert rule(Operation.ALL_TO_ALL, 10) == Named(algorithm="rail")
    assert rule(Operation.ALL_REDUCE, 10) is None
