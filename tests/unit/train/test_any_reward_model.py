"""Reward models under any plan: loss and gradients of TRL's formula, packed as if each alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.any_plan import PLANS
from tests.support.preferred import train_answers
from tests.support.scored import plain_scores_step
from tests.support.training import in_fp32
from tutti.models.objective import Objective
from tutti.plan.files import refer_to_model

PLAIN, CENTRED = Objective(kind="reward"), Objective(kind="reward", centre=0.05)


def check(name: str, objective: Objective) -> None:
    plan = in_fp32(PLANS[name], "sgd")
    length = max(plan.job.sequence_length, 16)
    assert plan.model.spec is not None
    spec = plan.model.spec.with_scores()
    if spec.num_experts:
        spec = spec.with_training(balance=False)
    plan = replace(
        plan,
        job=replace(plan.job, sequence_length=length),
        model=replace(plan.model, spec=spec, hash=refer_to_model(spec).hash),
    )
    expected = plain_scores_step(plan, spec, objective)
    found = train_answers(plan, spec, objective)
    assert found.losses[0] == pytest.approx(expected.losses[0], abs=1e-5)
    assert found.losses[1] != found.losses[0]
    assert set(expected.gradients) <= set(found.gradients)
    assert f"{spec.head_unit}.score.weight" in found.gradients
    for tensor, gradient in expected.gradients.items():
        torch.testing.assert_close(
            found.gradients[tensor],
            gradient,
            atol=1e-5,
            rtol=1e-5,
            msg=lambda m, t=tensor: f"{t}: {m}",
        )


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("unequal shares on unlike chips", PLAIN),
        ("interleaved, tied apart", CENTRED),
        ("norms of heads, plain tensor parallel", CENTRED),
        ("pipelines that cut differently", PLAIN),
        ("experts beside plain tensor parallel", CENTRED),
    ],
)
def test_a_few_plans(name: str, objective: Objective) -> None:
    check(name, objective)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PLANS)
def test_all_plans(name: str) -> None:
    check(name, CENTRED)
