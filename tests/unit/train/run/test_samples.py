"""Every plan computes every sample of a step once, and the same samples as every other plan."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.any_plan import PLANS
from tests.support.plans import plans
from tutti.plan.plan import Plan
from tutti.ranks.rank_places import Seats
from tutti.train.engine.samples import sample_indices


def computed(plan: Plan, step: int) -> Counter[int]:
    """Count who computes what on the first stage of each pipeline; of a tp or cp group, once."""
    model = plan.model.spec
    assert model is not None
    seats = Seats(plan, model)
    found: Counter[int] = Counter()
    for rank in range(plan.num_ranks):
        seat = seats[rank]
        place = seat.place
        if place.stage or place.cp or place.tp:
            continue
        for micro_batch in range(plan.pipelines[place.pipeline].micro_batches):
            found.update(sample_indices(plan, seat, step, micro_batch))
    return found


def assert_covered(plan: Plan, step: int) -> None:
    batch = plan.job.global_batch
    assert computed(plan, step) == Counter(range(step * batch, (step + 1) * batch))


@pytest.mark.parametrize("name", PLANS)
def test_known_plans(name: str) -> None:
    for step in (0, 1, 7):
        assert_covered(PLANS[name], step)


@settings(max_examples=30)
@given(plan=plans(), step=st.integers(0, 10**6))
def test_any_plan(plan: Plan, step: int) -> None:
    assert_covered(plan, step)


@pytest.mark.parametrize("name", PLANS)
def test_the_chips_of_a_group_and_the_stages_see_the_same(name: str) -> None:
    """What a later stage computes of a micro-batch is what the first one sent it."""
    plan = PLANS[name]
    model = plan.model.spec
    assert model is not None
    seats = Seats(plan, model)
    by_stage: dict[tuple[int, int, int], set[int]] = {}
    for rank in range(plan.num_ranks):
        place = seats[rank].place
        for micro_batch in range(plan.pipelines[place.pipeline].micro_batches):
            key = (place.pipeline, place.stage, micro_batch)
            by_stage.setdefault(key, set()).update(
                sample_indices(plan, seats[rank], 3, micro_batch)
            )
    for (pipeline, _, micro_batch), found in by_stage.items():
        assert found == by_stage[pipeline, 0, micro_batch]
