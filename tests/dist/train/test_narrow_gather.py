"""Parameters that come in 8 bits over the real network, a process for each rank."""

from __future__ import annotations

import pytest

from tests.support.any_plan import Draft, level
from tests.support.rank_pool import RankPool
from tests.support.rank_training import train_processes
from tests.support.training import in_precision, train_alone
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Plan

WHOLE = ((0, 4),)
PLANS: dict[str, Plan] = {
    "three shards": Draft().line((WHOLE, [{"count": 3}]))
    .plan(ScheduleKind.ONE_F_ONE_B, level(3)),
    "unlike chips, experts": Draft(experts_in=(1,))
    .line((WHOLE, [{"sequences": 2}, {"pool": "slow"}])).plan(ScheduleKind.ZERO_BUBBLE, level(3)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_training_is_that_of_one_process(pool: RankPool, name: str) -> None:
    plan = PLANS[name]
    spec = plan.model.spec
    assert spec is not None
    (found,) = train_processes(pool, plan, ("adamw",), precision="fp8")
    expected = train_alone(in_precision(plan, "fp8"), spec)
    assert found.losses == pytest.approx(expected.losses, rel=2**-7)
    assert found.norms == pytest.approx(expected.norms, rel=2**-4)
    assert found.groups == (), "groups that nobody foresaw, or that nobody uses"
