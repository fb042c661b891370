"""Optimizers by name under any plan: as one process moves the weights, in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.optimization import Adafactor

from tests.support.any_plan import EXPERTS, PLANS
from tests.support.threads import World
from tests.support.training import (
    Trained,
    assert_same,
    batches_of,
    engine_of,
    in_fp32,
    put_together,
    record_gradients,
    settings,
    train_alone,
    train_threads,
)
from tutti.accelerator.reference.optimizer import TensorSettings, orthogonal
from tutti.models.spec import ModelSpec
from tutti.plan.edits import each_replica, with_stage
from tutti.plan.plan import Offload, Plan
from tutti.ranks.single_rank import plan_alone
from tutti.train.engine.engine import Engine
from tutti.train.state.matrices import SCALE

GROUPS = (
    TensorSettings(match=("*norm*",), rate=3.0, weight_decay=0.0),
    TensorSettings(match=("attention.*", "1.*"), rate=0.5, weight_decay=0.4),
)


def is_offloaded(plan: Plan) -> bool:
    """Whether optimizer states lie on the host, where Muon cannot have them in time."""
    places = [replica.offload for _, _, stage in plan.stages() for replica in stage.replicas]
    return any(place.optimizer or place.gradients for place in places)


def alone(plan: Plan, spec: ModelSpec) -> Plan:
    """The same job on one chip."""
    return plan_alone(
        spec, sequence_length=plan.job.sequence_length, micro_batch=1,
        micro_batches=plan.job.global_batch, precision=plan.job.precision,
        optimizer=plan.job.optimizer,
    )  # fmt: skip


def check_against_one(name: str, optimizer: str, **words: object) -> None:
    check_plan_against_one(PLANS[name], optimizer, **words)


def check_plan_against_one(plan: Plan, optimizer: str, **words: object) -> None:
    plan = in_fp32(plan, optimizer)
    spec = plan.model.spec
    assert spec is not None
    given = replace(settings(), **words)

    def trained(plan: Plan) -> Trained:
        def one(links: object) -> Trained:
            engine = engine_of(plan, spec, links)
            found = Trained([], [], [], [])
            record_gradients(engine, found.gradients)
            for step in range(3):
                result = engine.step(batches_of(engine, step), given)
                found.losses.append(result.loss)
            found.weights = engine.weights()
            return found

        return put_together(spec, World(plan.num_ranks).run(one))

    found, expected = trained(plan), trained(alone(plan, spec))
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    if optimizer not in ("muon", "adafactor"):
        return
    # AdamW divides what is near zero by what is near zero; Muon's matrices must agree
    names = matrices_of(spec) if optimizer == "muon" else list(expected.weights)
    for tensor in names:
        if tensor.endswith("attention.key.bias"):
            continue  # softmax does not see it: its gradient is what rounding leaves
        wanted = expected.weights[tensor]
        error = float((found.weights[tensor] - wanted).norm() / wanted.norm())
        assert error < 1e-5, f"{tensor}: {error:.1e} of its norm"


def matrices_of(spec: ModelSpec) -> list[str]:
    found = [(unit, p) for unit in range(spec.num_units) for p in spec.parameters(unit)]
    names = [f"{unit}.{p.name}" for unit, p in found if p.is_matrix]
    assert names
    return names


FEW = ["unequal shares on unlike chips", "experts beside plain tensor parallel"]
SHARDED = "two key-value heads for four ranks, sharded"


@pytest.mark.parametrize("name", [*FEW, SHARDED])
def test_muon(name: str) -> None:
    check_against_one(name, "muon")


@pytest.mark.parametrize("name", [*FEW, SHARDED])
def test_adafactor(name: str) -> None:
    check_against_one(name, "adafactor")


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_a_rank_without_experts_takes_part_in_their_sums(optimizer: str) -> None:
    plan = PLANS["experts shared out unequally"]
    stage = plan.pipelines[0].stages[0]
    (group,) = stage.experts
    every = group.per_chip(EXPERTS)
    held = replace(group, experts=(sum(every), *[0] * (len(every) - 1)))
    check_plan_against_one(with_stage(plan, 0, 0, replace(stage, experts=(held,))), optimizer)


def test_adafactor_with_gradients_on_the_host() -> None:
    """They are read where they lie, and the losses are those of gradients on the chip."""
    plan = in_fp32(PLANS[FEW[0]], "adafactor")
    spec, stage = plan.model.spec, plan.pipelines[0].stages[0]
    assert spec is not None
    away = Offload(optimizer=((0, 4),), gradients=((1, 3),))
    held = with_stage(plan, 0, 0, each_replica(stage, lambda r: replace(r, offload=away)))

    def losses(plan: Plan) -> list[object]:
        def one(links: object) -> list[float]:
            engine = engine_of(plan, spec, links)
            return [engine.step(batches_of(engine, n), settings()).loss for n in range(3)]

        return World(plan.num_ranks).run(one)

    assert losses(held)[0] == pytest.approx(losses(plan)[0], rel=1e-6)


def test_adafactor_is_transformers() -> None:
    """Three steps on one chip beside transformers' own, as its Trainer configures it."""
    plan = in_fp32(PLANS[FEW[1]], "adafactor")
    spec = plan.model.spec
    assert spec is not None
    own = alone(plan, spec)

    def one(links: object) -> list[object]:
        engine = engine_of(own, spec, links, clip=None)
        theirs = {name: torch.nn.Parameter(w.clone()) for name, _, w in engine.weights()}
        parts: list[object] = []
        record_gradients(engine, parts)
        groups = [
            {"params": [p for p in theirs.values() if (p.dim() > 1) == decays], "weight_decay": d}
            for decays, d in ((True, settings().weight_decay), (False, 0.0))
        ]
        beside = Adafactor(
            groups, lr=settings().learning_rate, scale_parameter=False, relative_step=False
        )
        for step in range(3):
            parts.clear()
            engine.step(batches_of(engine, step), settings())
            for name, _, gradient in parts:  # type: ignore[misc]
                theirs[name].grad = gradient.clone()
            beside.step()
        return [{n: (w.clone(), theirs[n].detach()) for n, _, w in engine.weights()}]

    pairs = World(1).run(one)[0][0]
    for name, (found, expected) in pairs.items():  # type: ignore[union-attr]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)


def test_lion() -> None:
    plan = in_fp32(PLANS[FEW[0]], "lion")
    assert plan.model.spec is not None
    assert_same(train_threads(plan, plan.model.spec), train_alone(plan, plan.model.spec), "lion")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_settings_of_some_tensors(optimizer: str) -> None:
    check_against_one(SHARDED, optimizer, tensors=GROUPS)


def test_settings_of_some_tensors_are_theirs() -> None:
    """One step from the same weights: what is named moves by its own rate."""
    plan = in_fp32(PLANS[SHARDED], "sgd")
    spec = plan.model.spec
    assert spec is not None
    own = alone(plan, spec)

    def moved(**words: object) -> dict[str, torch.Tensor]:
        def one(links: object) -> list[object]:
            engine = engine_of(own, spec, links, clip=None)
            first = {name: value.clone() for name, _, value in engine.weights()}
            given = replace(settings(), weight_decay=0.0, **words)
            engine.step(batches_of(engine, 0), given)
            return [{name: value - first[name] for name, _, value in engine.weights()}]

        return World(1).run(one)[0][0]  # type: ignore[return-value]

    plain, named = moved(), moved(tensors=(TensorSettings(match=("mlp.*",), rate=4.0),))
    for tensor, step in plain.items():
        times = 4.0 if ".mlp." in tensor else 1.0
        torch.testing.assert_close(named[tensor], times * step, atol=1e-6, rtol=1e-3)


def test_muon_is_torchs() -> None:
    """Against `torch.optim.Muon`, whose own iteration runs in bfloat16."""
    plan = in_fp32(PLANS[FEW[0]], "muon")
    spec = plan.model.spec
    assert spec is not None
    own = alone(plan, spec)

    def one(links: object) -> tuple[Engine, dict[str, torch.Tensor], list[object]]:
        engine = engine_of(own, spec, links, clip=None)
        first = {name: value.clone() for name, _, value in engine.weights()}
        parts: list[object] = []
        record_gradients(engine, parts)
        engine.step(batches_of(engine, 0), settings())
        return engine, first, parts

    engine, first, parts = World(1).run(one)[0]
    gradients = {name: value for name, _, value in parts}  # type: ignore[misc]
    found = {name: value for name, _, value in engine.weights()}
    for name in matrices_of(spec):
        weight = torch.nn.Parameter(first[name].clone())
        weight.grad = gradients[name].clone()
        theirs = torch.optim.Muon(
            [weight], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        theirs.step()
        step = 1e-2 * SCALE * max(weight.shape) ** 0.5
        assert (found[name] - weight.data).abs().max() < 0.05 * step, name


def test_orthogonal_brings_singular_values_near_one() -> None:
    x = torch.randn(3, 12, 40, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonal(x))
    assert values.min() > 0.3
    assert values.max() < 1.3
    torch.testing.assert_close(orthogonal(x.mT), orthogonal(x).mT)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PLANS)
def test_adafactor_under_all_plans(name: str) -> None:
    check_against_one(name, "adafactor")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [n for n, plan in PLANS.items() if not is_offloaded(plan)])
def test_muon_under_all_plans(name: str) -> None:
    check_against_one(name, "muon")
