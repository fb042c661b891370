"""Context parallelism of both kinds in the engine, with whole sequences and packed documents."""

from __future__ import annotations

import pytest

from tests.support.any_plan import Draft, level
from tests.support.training import assert_same, in_fp32, train_alone, train_threads
from tutti.plan.check import check_plan
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import ContextKind, Plan, Recompute

FOUR = ((0, 4),)
SELECTIVE = Recompute(selective=((1, 3),))


def plans_of(kind: ContextKind) -> dict[str, Plan]:
    own = {"context_kind": kind}
    return {
        "two ranks": Draft()
        .line((FOUR, [{"cp": 2, "sequences": 2, **own}])).plan(),
        "two ranks, recomputed": Draft()
        .line((FOUR, [{"cp": 2, "recompute": SELECTIVE, **own}])).plan(),
        "three ranks into two with tensor parallelism": Draft(length=48)
        .line((((0, 2),), [{"cp": 3, "sequences": 2, **own}]),
              (((2, 4),), [{"cp": 2, "tp": 2, "sequence_parallel": True, "sequences": 2, **own}]))
        .plan(ScheduleKind.ZERO_BUBBLE, level(2)),
        "experts": Draft(experts_in=(1,))
        .line((FOUR, [{"cp": 2, "sequences": 2, **own}, {"pool": "slow"}])).plan(),
    }  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ContextKind)
@pytest.mark.parametrize("name", plans_of(ContextKind.RING))
def test_one_process_or_a_shared_sequence(name: str, kind: ContextKind, packed: bool) -> None:
    plan = plans_of(kind)[name]
    assert check_plan(plan) == []
    plan = in_fp32(plan, "sgd")
    spec = plan.model.spec
    assert spec is not None
    found = train_threads(plan, spec, steps=2, packed=packed)
    assert_same(found, train_alone(plan, spec, steps=2, packed=packed), "sgd")
