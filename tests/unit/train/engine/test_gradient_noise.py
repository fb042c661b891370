"""The gradient's noise scale: found again where it is known, and the same under any plan."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.any_plan import FOUR, PLAIN, PLANS, Draft
from tests.support.threads import World
from tests.support.training import batches_of, engine_of, in_fp32, settings
from tutti.accelerator import open_accelerator
from tutti.plan.plan import Plan
from tutti.ranks.single_rank import plan_alone
from tutti.train.engine import gradient_noise
from tutti.train.engine.engine import Engine
from tutti.train.engine.gradient_noise import moment_sums, noise_scale


@pytest.mark.parametrize("wanted", [0.5, 4.0, 20.0])
@pytest.mark.parametrize("updates", [5, 400])
def test_a_known_noise_is_found(wanted: float, updates: int) -> None:
    """Gradients with a mean of length 1 and noise of variance `wanted`, over many elements."""
    elements, beta1, beta2 = 40_000, 0.9, 0.95
    generator = torch.Generator().manual_seed(3)
    truth = torch.full((elements,), 1.0 / math.sqrt(elements))
    mean, square = torch.zeros(elements), torch.zeros(elements)
    for _ in range(updates):
        noise = torch.randn(elements, generator=generator) * math.sqrt(wanted / elements)
        gradient = truth + noise
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient.square()
    found = noise_scale(
        float(mean.square().sum()), float(square.sum()), updates=updates, beta1=beta1, beta2=beta2
    )
    assert found == pytest.approx(wanted, rel=0.05 if updates > 100 or wanted < 10 else 0.15)


def test_too_little_is_known() -> None:
    assert noise_scale(0.0, 0.0, updates=0, beta1=0.9, beta2=0.95) is None
    assert noise_scale(1.0, 1.0, updates=1, beta1=0.9, beta2=0.95) is None
    assert noise_scale(0.0, 1.0, updates=50, beta1=0.9, beta2=0.95) is None  # noise alone


def sums(plan: Plan) -> list[tuple[float, float]]:
    spec = plan.model.spec
    assert spec is not None

    def one(links: object) -> list[tuple[float, float]]:
        engine = engine_of(plan, spec, links)
        engine.sums_moments = True
        found = [engine.step(batches_of(engine, step), settings()) for step in range(3)]
        return [(result.means, result.squares) for result in found]

    return World(plan.num_ranks).run(one)[0]


@pytest.mark.parametrize(
    "name",
    [
        "unequal shares on unlike chips",
        "interleaved, tied apart",
        "pipelines that cut differently",
        "experts over tensor and data parallel",
    ],
)
def test_every_plan_adds_up_the_same(name: str) -> None:
    plan = in_fp32(PLANS[name], "adamw")
    assert plan.model.spec is not None
    alone = plan_alone(
        plan.model.spec, sequence_length=plan.job.sequence_length, micro_batch=1,
        micro_batches=plan.job.global_batch, precision=plan.job.precision, optimizer="adamw",
    )  # fmt: skip
    found, expected = sums(plan), sums(alone)
    assert found[0] == (0.0, 0.0)
    for own, other in zip(found[1:], expected[1:], strict=True):
        assert own == pytest.approx(other, rel=1e-4)
        assert own[1] > 0


class Widest(TorchDispatchMode):
    """Notes the most elements of any tensor of 64 bits that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype is torch.float64:
            self.elements = max(self.elements, found.numel())
        return found


def test_few_elements_are_widened_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = in_fp32(Draft().line((FOUR, [{}]), micro_batches=2).plan(PLAIN), "adamw")
    assert plan.model.spec is not None
    spec, chip = plan.model.spec, open_accelerator("cpu")

    def one(links: object) -> Engine:
        engine = engine_of(plan, spec, links)
        engine.step(batches_of(engine, 0), settings())
        return engine

    states = World(1).run(one)[0].parameters.all_states()
    expected = {name: float(x) for name, x in moment_sums(states, 0, chip).items()}
    monkeypatch.setattr(gradient_noise, "NORM_ELEMENTS", 500)
    with Widest() as widest:
        found = {name: float(x) for name, x in moment_sums(states, 0, chip).items()}
    assert found == pytest.approx(expected, rel=1e-12)
    assert found["squares"] > 0
    assert widest.elements == 500 < max(state.num_kept for state in states)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PLANS)
def test_all_plans_add_up_the_same(name: str) -> None:
    test_every_plan_adds_up_the_same(name)
