"""The best uniform plan, held against all of them simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.search.test_planner import problem
from tutti.plan.job import ScheduleKind
from tutti.search import uniform
from tutti.search.settle import Settler
from tutti.search.space import Space
from tutti.search.tables import Tables

SPACES = {
    "all": Space(),
    "no schedule but one": Space(schedules=(ScheduleKind.ONE_F_ONE_B,)),
    "tensor parallel": Space(tp=(2, 4)),
}


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("batch", [16, 64])
def test_no_uniform_plan_is_faster_by_more_than_prices_err(space, batch):
    asked = problem(space=space)
    asked = replace(asked, job=replace(asked.job, global_batch=batch))
    tables = Tables(asked)
    settler = Settler(tables)
    found = uniform.best_uniform(tables, settler)
    assert not isinstance(found, str)
    plans = [uniform._plan(tables, candidate) for candidate in uniform._candidates(tables)]
    every = [settler.price(plan) for plan in plans if plan is not None]
    fitting = [estimate.step_seconds for estimate in every if estimate.fits]
    assert len(fitting) > 3
    assert found[1].step_seconds <= 1.002 * min(fitting)
