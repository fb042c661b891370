"""Random plans: exact JSON round trips, and a checker that tells valid from broken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plans import plans
from tests.unit.plan.mutations import MUTATIONS
from tutti.errors import InputError
from tutti.files import parse_json, pretty_json
from tutti.plan.check import check_plan, require_valid
from tutti.plan.files import load_plan, plan_from_document, plan_to_document, save_plan
from tutti.plan.plan import RankMap

FEW = settings(max_examples=max(10, settings.default.max_examples // 10))


@given(plans())
def test_valid_plans_are_accepted_and_read_back_exactly(plan):
    assert check_plan(plan) == []
    text = pretty_json(plan_to_document(plan))
    again = plan_from_document(parse_json(text, "plan.json"), "plan.json")
    assert again == plan
    assert pretty_json(plan_to_document(again)) == text


@pytest.mark.parametrize("mutation", list(MUTATIONS), ids=lambda m: m.__name__)
@FEW
@given(data=st.data())
def test_broken_plans_are_rejected_with_the_right_reason(mutation, data):
    plan = data.draw(plans())
    broken = mutation(plan, lambda n: data.draw(st.integers(0, n - 1)))
    problems = check_plan(broken)
    assert MUTATIONS[mutation] in {problem.code for problem in problems}
    for problem in problems:
        assert "\n" not in str(problem)
        assert problem.message
    with pytest.raises(InputError, match=r"^plan: "):
        require_valid(broken)


@FEW
@given(plans())
def test_ranks_enumerate_the_chips_once_in_plan_order(plan):
    ranks = RankMap(plan)
    places = [ranks.place(rank) for rank in range(ranks.num_ranks)]
    assert ranks.num_ranks == plan.num_ranks
    assert [place.chip for place in places] == [
        chip for _, _, stage in plan.stages() for chip in stage.chips
    ]
    assert len({place[:6] for place in places}) == len(places)
    for rank, place in enumerate(places):
        first = ranks.first_rank(place.pipeline, place.stage)
        assert first <= rank < first + plan.pipelines[place.pipeline].stages[place.stage].num_chips
    with pytest.raises(IndexError):
        ranks.place(ranks.num_ranks)


@FEW
@given(plans())
def test_files_read_back(plan):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(plan, path)
        assert load_plan(path) == plan
        assert [p.name for p in Path(folder).iterdir()] == ["plan.json"]
