"""What Muon adds to a step and to its memory: products, sums of whole matrices, directions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.any_plan import PLANS
from tutti.cost.plan.matrix_prices import matrices, orthogonal_flops
from tutti.models.load import load_model
from tutti.models.parameter import Parameter, ParameterKind
from tutti.simulate.estimate import estimate

# several ranks keep parts of one matrix in the first two, none in the last
SHARED = ("pipelines that shard inside", "norms of heads, plain tensor parallel")


def test_products_are_those_of_the_shorter_side() -> None:
    wide = Parameter(name="mlp.up.weight", shape=(30, 10), kind=ParameterKind.LINEAR)
    once = 2 * 10 * 10 * 30 + 2 * 10**3 + 2 * 10 * 10 * 30  # x·xᵀ, its square, their sum · x
    assert orthogonal_flops(wide, 1) == 5 * once
    assert orthogonal_flops(replace(wide, shape=(10, 30)), 1) == 5 * once
    experts = replace(wide, name="moe.experts.up.weight", shape=(8, 30, 10))
    assert orthogonal_flops(experts, 4) == 2 * 5 * once
    model = load_model("llama-3-8b")
    assert {p.name.partition(".")[0] for p in matrices(model, 3)} == {"attention", "mlp"}
    assert not list(matrices(model, 0))
    assert not list(matrices(model, model.head_unit))


@pytest.mark.parametrize("name", SHARED)
def test_a_step_and_its_memory_grow(name: str) -> None:
    plan = PLANS[name]
    spec, cluster = plan.model.spec, plan.cluster.cluster
    assert spec is not None
    assert cluster is not None
    found = {
        optimizer: estimate(
            replace(plan, job=replace(plan.job, optimizer=optimizer)), spec, cluster
        )
        for optimizer in ("adamw", "muon")
    }
    assert found["muon"].step_seconds > found["adamw"].step_seconds
    moving = [max(m.moving for m in found[o].memory) for o in ("adamw", "muon")]
    assert moving[1] >= moving[0]
