"""Distillation under any plan: loss and gradients of a plain loop, from all logits and the most."""

from __future__ import annotations

import pytest
import torch

from tests.support.any_plan import PLANS
from tests.support.taught import plain_taught_step, train_taught
from tests.support.training import in_fp32
from tutti.models.distillation import Distillation

KINDS = {
    "forward": Distillation(teacher="t", temperature=2.0, share=0.7),
    "reverse": Distillation(teacher="t", divergence="reverse"),
    "js": Distillation(teacher="t", divergence="js", mixture=0.3, temperature=1.5, share=0.5),
    "forward, most": Distillation(teacher="t", temperature=0.7, top_k=5, share=0.9),
    "reverse, most": Distillation(teacher="t", divergence="reverse", top_k=7, stored=True),
    "js, most": Distillation(teacher="t", divergence="js", top_k=3, temperature=2.0, stored=True),
}


def check(name: str, how: Distillation) -> None:
    plan = in_fp32(PLANS[name], "sgd")
    assert plan.model.spec is not None
    spec = plan.model.spec
    if spec.num_experts:
        spec = spec.with_training(balance=False)
    expected = plain_taught_step(plan, spec, how)
    found = train_taught(plan, spec, how)
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("unequal shares on unlike chips", "forward"),
        ("interleaved, tied apart", "reverse"),
        ("norms of heads, plain tensor parallel", "js"),
        ("norms of heads, plain tensor parallel", "forward, most"),
        ("pipelines that cut differently", "js, most"),
        ("experts beside plain tensor parallel", "reverse, most"),
    ],
)
def test_a_few_plans(name: str, kind: str) -> None:
    check(name, KINDS[kind])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLANS)
def test_all_plans(name: str, kind: str) -> None:
    if "prediction" in name:
        pytest.skip("extra prediction heads are refused beside a teacher")
    check(name, KINDS[kind])


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"teacher": ""}, "name a model folder"),
        ({"teacher": "t", "stored": True}, "say how many with top_k"),
        ({"teacher": "t", "share": 0.0}, "would teach nothing"),
        ({"teacher": "t", "divergence": "js", "mixture": 1.0}, "take forward"),
    ],
)
def test_what_means_nothing_is_refused(given: dict[str, object], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Distillation(**given)  # type: ignore[arg-type]
