"""The plans of `any_plan` with parts of their model, or adapters, trained."""

from __future__ import annotations

from dataclasses import replace

from tests.support.training import Trained, assert_same, in_fp32, train_alone, train_threads
from tutti.models.spec import ModelSpec
from tutti.models.tuning import AdapterSpec, Tuning
from tutti.plan.files import refer_to_model
from tutti.plan.plan import Plan

LORA = Tuning(adapter=AdapterSpec(rank=4, alpha=8.0))
DORA = Tuning(
    adapter=AdapterSpec(method="dora", rank=4, alpha=8.0, targets=("attention.*", "mlp.*"))
)
SOME = Tuning(
    adapter=AdapterSpec(
        rank=3, alpha=8.0, targets=("attention.query", "attention.value", "1.*.down")
    ),
    trained=("*norm*",),
)
FROZEN = Tuning(frozen=("token.weight", "1.*", "attention.key.*"))
TUNINGS = {"lora": LORA, "dora": DORA, "some": SOME, "frozen": FROZEN}


def tuned(plan: Plan, tuning: Tuning) -> tuple[Plan, ModelSpec]:
    """Return a plan for a model of which only some tensors are trained."""
    assert plan.model.spec is not None
    spec = plan.model.spec.with_tuning(tuning)
    return replace(plan, model=refer_to_model(spec)), spec


def check_tuned(plan: Plan, tuning: Tuning, optimizer: str) -> None:
    """Raise unless a plan trains its adapters as one process does."""
    plan, spec = tuned(in_fp32(plan, optimizer), tuning)
    expected = train_alone(plan, spec)
    names = {
        f"{unit}.{p.name}"
        for unit in range(spec.num_units)
        for p in spec.parameters(unit)
        if p.trainable
    }
    owned = {name: value for name, value in expected.weights.items() if name in names}
    gradients = {name: value for name, value in expected.gradients.items() if name in names}
    kept = Trained(expected.losses, expected.norms, owned, gradients, expected.routing)
    assert_same(train_threads(plan, spec), kept, optimizer)
