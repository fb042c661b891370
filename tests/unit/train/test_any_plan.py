"""Any plan, same training: ranks as threads against one process, in float32.

A dozen plans that name every kind of parallelism between them, and in the slow suite a hundred
drawn ones. `tests/dist/train` runs them over processes.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings

from tests.support.any_plan import PLANS
from tests.support.plans import plans
from tests.support.training import assert_same, in_fp32, train_alone, train_threads
from tutti.plan.check import check_plan
from tutti.plan.plan import Plan


def check(plan: Plan, optimizer: str) -> None:
    plan = in_fp32(plan, optimizer)
    spec = plan.model.spec
    assert spec is not None
    assert_same(train_threads(plan, spec), train_alone(plan, spec), optimizer)


@pytest.mark.parametrize("name", PLANS)
def test_the_plans_are_valid(name):
    assert check_plan(PLANS[name]) == []


@pytest.mark.parametrize("name", PLANS)
def test_weights_under_sgd_and_losses_under_adamw(name):
    check(PLANS[name], "sgd")
    check(PLANS[name], "adamw")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_a_hundred_drawn_plans(plan):
    assume(plan.num_ranks <= 10 and plan.job.global_batch <= 24)
    check(plan, "sgd")
