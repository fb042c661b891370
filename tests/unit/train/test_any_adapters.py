"""Adapters and frozen tensors under any plan: as one process trains them, in float32."""

from __future__ import annotations

import pytest

from tests.support.any_plan import PLANS
from tests.support.every_other import every_other
from tests.support.tuned_plans import TUNINGS, check_tuned, tuned
from tutti.plan.check import check_plan

FEW = {
    "unequal shares on unlike chips": "some",
    "interleaved, tied apart": "lora",
    "norms of heads, plain tensor parallel": "frozen",
    "pipelines that cut differently": "dora",
    "experts beside plain tensor parallel": "lora",
}


@pytest.mark.parametrize("name", every_other(FEW))
def test_a_few_plans(name: str) -> None:
    check_tuned(PLANS[name], TUNINGS[FEW[name]], "sgd")


@pytest.mark.parametrize("kind", TUNINGS)
def test_a_tuned_plan_is_valid(kind: str) -> None:
    plan, spec = tuned(PLANS["experts over tensor and data parallel"], TUNINGS[kind])
    assert check_plan(plan) == []
    assert 0 < spec.num_trained < spec.num_parameters


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", TUNINGS)
@pytest.mark.parametrize("name", PLANS)
def test_all_plans(name: str, kind: str) -> None:
    for optimizer in ("sgd", "adamw"):
        check_tuned(PLANS[name], TUNINGS[kind], optimizer)
