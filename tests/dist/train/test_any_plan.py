"""Any plan, same training: a process for each rank and the real network, against one process."""

from __future__ import annotations

import pytest

from tests.support.any_plan import PLANS
from tests.support.rank_pool import RankPool
from tests.support.rank_training import train_processes
from tests.support.training import assert_same, in_fp32, train_alone
from tutti.plan.plan import Plan

MOST_RANKS = 8  # of the pool
OPTIMIZERS = ("sgd", "adamw")


def check(pool: RankPool, plan: Plan, optimizers: tuple[str, ...] = OPTIMIZERS) -> None:
    assert plan.model.spec is not None
    for found, optimizer in zip(train_processes(pool, plan, optimizers), optimizers, strict=True):
        expected = train_alone(in_fp32(plan, optimizer), plan.model.spec)
        assert_same(found, expected, optimizer)
        assert found.groups == ()


@pytest.mark.parametrize("name", [n for n, plan in PLANS.items() if plan.num_ranks <= MOST_RANKS])
def test_losses_gradients_and_weights(pool: RankPool, name: str) -> None:
    check(pool, PLANS[name])
