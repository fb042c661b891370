"""Any plan, same training: ranks as threads against one process, in float32.

Some plans that name every kind of parallelism between them, and in the slow suite three hundred
drawn ones. `tests/dist/train` runs them over processes.
"""

from __future__ import annotations

import pytest

from tests.support.any_plan import PLANS
from tests.support.every_other import every_other
from tests.support.features import drawn_plans
from tests.support.training import assert_same, in_fp32, train_alone, train_threads
from tutti.plan.check import check_plan
from tutti.plan.plan import Plan

NUM_DRAWN, MOST_RANKS = 300, 8


def check(plan: Plan, optimizer: str) -> None:
    plan = in_fp32(plan, optimizer)
    spec = plan.model.spec
    assert spec is not None
    assert_same(train_threads(plan, spec), train_alone(plan, spec), optimizer)


@pytest.mark.parametrize("name", PLANS)
def test_the_plans_are_valid(name):
    assert check_plan(PLANS[name]) == []


@pytest.mark.parametrize("name", every_other(PLANS))  # ranks of their own run the others
def test_weights_under_sgd_and_losses_under_adamw(name):
    check(PLANS[name], "sgd")
    check(PLANS[name], "adamw")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_three_hundred_drawn_plans() -> None:
    failed: list[str] = []
    for number, plan in enumerate(drawn_plans(NUM_DRAWN, MOST_RANKS)):
        try:
            check(plan, "sgd")
        except Exception as error:
            failed.append(f"plan {number}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
