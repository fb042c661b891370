"""Losses on answers under any plan: loss and gradients of the published formulas, in float32.

The formulas are written here as TRL writes them, over whole logits and one answer at a time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.any_plan import PLANS
from tests.support.preferred import plain_step, train_answers
from tests.support.training import in_fp32
from tutti.models.objective import Objective

BETA = 0.3
OBJECTIVES = {
    "dpo": Objective(kind="dpo", beta=BETA, label_smoothing=0.1),
    "ipo": Objective(kind="ipo", beta=BETA),
    "hinge": Objective(kind="hinge", beta=BETA),
    "orpo": Objective(kind="orpo", beta=BETA),
    "simpo": Objective(kind="simpo", beta=BETA, margin=0.4),
    "kto": Objective(kind="kto", beta=BETA, desirable_weight=1.5, undesirable_weight=0.7),
    "dpo with the answers' loss": Objective(kind="dpo", beta=BETA, answer_loss=0.5),
}


def written_out(given: Objective) -> object:
    """The formulas, on pairs of neighbours."""

    def losses(logps: Tensor, references: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        ratios = logps - references
        if given.kind == "kto":
            wanted = weights > 0
            good = given.desirable_weight * (1 - F.sigmoid(BETA * (ratios - 0.0)))
            bad = given.undesirable_weight * (1 - F.sigmoid(BETA * (0.0 - ratios)))
            return torch.where(wanted, good, bad) * weights.abs()
        means = logps / counts
        chosen, rejected = means[::2], means[1::2]
        delta = ratios[::2] - ratios[1::2]
        if given.kind == "dpo":
            found = -F.logsigmoid(BETA * delta) * (1 - given.label_smoothing)
            found = found - F.logsigmoid(-BETA * delta) * given.label_smoothing
            found = found - given.own_loss * chosen
        elif given.kind == "hinge":
            found = torch.relu(1 - BETA * delta)
        elif given.kind == "ipo":
            per_token = ratios / counts
            found = (per_token[::2] - per_token[1::2] - 1 / (2 * BETA)) ** 2
        elif given.kind == "orpo":
            less = torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
            found = -chosen - BETA * F.logsigmoid(chosen - rejected - less)
        else:
            found = -F.logsigmoid(BETA * (chosen - rejected - given.margin / BETA))
        return found * weights[::2]

    return losses


def check(name: str, objective: Objective) -> None:
    plan = in_fp32(PLANS[name], "sgd")
    length = max(plan.job.sequence_length, 16)
    plan = replace(plan, job=replace(plan.job, sequence_length=length))
    spec = plan.model.spec
    assert spec is not None
    if spec.num_experts:
        spec = spec.with_training(balance=False)
    expected = plain_step(plan, spec, objective, written_out(objective))
    found = train_answers(plan, spec, objective)
    assert found.losses[0] == pytest.approx(expected.losses[0], abs=1e-5)
    assert found.losses[1] != found.losses[0]
    assert set(expected.gradients) <= set(found.gradients)
    for tensor, gradient in expected.gradients.items():
        torch.testing.assert_close(
            found.gradients[tensor],
            gradient,
            atol=1e-5,
            rtol=1e-5,
            msg=lambda m, t=tensor: f"{t}: {m}",
        )


FEW = {
    "unequal shares on unlike chips": ("dpo",),
    "interleaved, tied apart": ("ipo", "kto"),
    "norms of heads, plain tensor parallel": ("orpo",),
    "pipelines that cut differently": ("simpo",),
    "experts beside plain tensor parallel": ("dpo with the answers' loss", "hinge"),
}


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n, kinds in FEW.items() for k in kinds])
def test_a_few_plans(name: str, kind: str) -> None:
    check(name, OBJECTIVES[kind])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("name", PLANS)
def test_all_plans(name: str, kind: str) -> None:
    check(name, OBJECTIVES[kind])
