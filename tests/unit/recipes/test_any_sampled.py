"""Losses on sampled answers under any plan, and the weights that are handed over.

The formulas are written in `tests.support.sampled` as the papers have them, one answer at a time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.any_plan import PLANS
from tests.support.sampled import plain_sampled, sampled_batch, train_sampled
from tests.support.training import in_fp32
from tutti.models.objective import Objective
from tutti.models.sampling import Sampling

SAMPLING = Sampling(rewards=("rewards.py:one",), clip=0.2, clip_high=0.3)
OBJECTIVES = {
    "grpo": Objective(kind="grpo", beta=0.3, sampling=SAMPLING),
    "rloo": Objective(kind="rloo", beta=0.3, sampling=SAMPLING),
}


def check(name: str, kind: str, *, temperature: float = 1.0) -> None:
    plan = in_fp32(PLANS[name], "sgd")
    length = max(plan.job.sequence_length, 16)
    plan = replace(plan, job=replace(plan.job, sequence_length=length))
    spec, objective = plan.model.spec, OBJECTIVES[kind]
    assert spec is not None
    if spec.num_experts:
        spec = spec.with_training(balance=False)
    batch = sampled_batch(plan, spec, temperature=temperature)
    expected, logps = plain_sampled(plan, spec, objective, batch)
    found = train_sampled(plan, spec, objective, batch)
    assert found.losses[0] == pytest.approx(expected.losses[0], abs=1e-5)
    assert found.losses[1] != found.losses[0]
    torch.testing.assert_close(found.logps, logps, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.again, found.logps, atol=0, rtol=0)
    for tensor, gradient in expected.gradients.items():
        torch.testing.assert_close(
            found.gradients[tensor], gradient, atol=1e-5, rtol=1e-5,
            msg=lambda m, t=tensor: f"{t}: {m}",
        )  # fmt: skip
    trained = {t for t in found.weights if t in found.handed}
    assert len(trained) > 10
    for tensor in trained:
        torch.testing.assert_close(found.handed[tensor], found.weights[tensor], atol=0, rtol=0)


FEW = {
    "context parallel, zero bubble": ("grpo",),
    "norms of heads, plain tensor parallel": ("rloo",),
}


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n, kinds in FEW.items() for k in kinds])
def test_a_few_plans(name: str, kind: str) -> None:
    check(name, kind)


@pytest.mark.slow
def test_a_temperature_divides_logits() -> None:
    check("interleaved, tied apart", "grpo", temperature=0.7)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("name", PLANS)
def test_all_plans(name: str, kind: str) -> None:
    check(name, kind)
