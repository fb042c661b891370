"""Any plan, same training: a process for each rank and the real network, against one process."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.support import features
from tests.support.any_plan import PLANS
from tests.support.every_other import every_other
from tests.support.features import drawn_plans
from tests.support.rank_pool import RankPool
from tests.support.rank_training import train_processes
from tests.support.routing import Token
from tests.support.training import assert_same, in_fp32, train_alone
from tutti.plan.plan import Plan

MOST_RANKS = 8  # of the pool
NUM_DRAWN = 100
OPTIMIZERS = ("sgd", "adamw")


def check(pool: RankPool, plan: Plan) -> dict[Token, float]:
    """Train with both optimizers; return the tokens whose experts hung on rounding."""
    assert plan.model.spec is not None
    moved: dict[Token, float] = {}
    for found, optimizer in zip(train_processes(pool, plan, OPTIMIZERS), OPTIMIZERS, strict=True):
        expected = train_alone(in_fp32(plan, optimizer), plan.model.spec)
        moved |= assert_same(found, expected, optimizer)
        assert found.groups == (), "groups that nobody foresaw, or that nobody uses"
    return moved


@pytest.mark.parametrize("name", every_other(PLANS, first=1))  # threads run the others
def test_losses_gradients_and_weights(pool: RankPool, name: str) -> None:
    assert check(pool, PLANS[name]) == {}


def covered(plans: Iterable[Plan]) -> set[str]:
    return set().union(*(features.features(plan) for plan in plans))


def test_the_handmade_plans_leave_no_kind_of_parallelism_out() -> None:
    due = (
        features.PARALLEL
        | features.OVERLAP
        | features.SCHEDULES
        | features.UNLIKE
        | features.MODELS
    )
    due |= {"equal shares", "unequal shares", "ragged shards", "unequal experts"}
    due |= features.RECOMPUTE - {"recompute hybrid"} | {"offload activations"}
    due |= {f"dense level {level}" for level in range(4)} | {"expert level 1"}
    assert due - covered(PLANS.values()) == set()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_drawn_plans_leave_nothing_out() -> None:
    drawn = drawn_plans(NUM_DRAWN, MOST_RANKS)
    assert len(drawn) >= NUM_DRAWN
    assert features.EVERYTHING - covered(drawn) == set()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_drawn_plans(pool: RankPool) -> None:
    failed: list[str] = []
    for number, plan in enumerate(drawn_plans(NUM_DRAWN, MOST_RANKS)):
        try:
            moved = check(pool, plan)
            note = f"near-ties {moved}" if moved else "same"
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
            failed.append(f"plan {number}: {note}")
        print(f"plan {number}, {plan.num_ranks} ranks: {note}", flush=True)
    assert not failed, "\n".join(failed)
