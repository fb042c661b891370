"""Precision policies: bf16 with masters, pure bf16, fp16 with a loss scale that finds itself."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import pytest
import torch

from tests.support.any_plan import Draft, level
from tests.support.every_other import every_other
from tests.support.threads import ThreadLinks, World
from tests.support.training import (
    batches_of,
    engine_of,
    in_precision,
    settings,
    train_alone,
    train_threads,
    whole_tensors,
)
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.plan.job import PRECISIONS, Job, Precision, ScheduleKind
from tutti.plan.plan import Plan
from tutti.train.engine.engine import Engine
from tutti.train.engine.loss_scaling import FIRST_SCALE, GROWTH_STEPS, SMALLEST_SCALE, LossScaling
from tutti.train.engine.step_totals import StepResult
from tutti.train.state.state import compute_dtype

FOUR = ((0, 4),)
PLANS: dict[str, Plan] = {
    "alone": Draft().line((FOUR, [{"sequences": 2}])).plan(),
    "shards on unlike chips": Draft()
    .line((FOUR, [{"sequences": 2}, {"pool": "slow"}])).plan(ScheduleKind.ONE_F_ONE_B, level(1)),
    "stages, tied apart": Draft(tied=True)
    .line((((0, 2),), [{"count": 2}]), (((2, 4),), [{"tp": 2, "sequences": 2}])).plan(),
    "gathered for each pass": Draft()
    .line((FOUR, [{"count": 2}])).plan(ScheduleKind.ZERO_BUBBLE, level(3)),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["bf16", "pure_bf16"])
@pytest.mark.parametrize("name", every_other(PLANS))
def test_bf16_is_as_good_as_in_one_process(name: str, policy: str) -> None:
    plan = in_precision(PLANS[name], policy)
    spec = plan.model.spec
    assert spec is not None
    found, expected = train_threads(plan, spec), train_alone(plan, spec)
    assert found.losses == pytest.approx(expected.losses, rel=2**-8)
    assert found.norms == pytest.approx(expected.norms, rel=2**-5)


@pytest.mark.parametrize("name", every_other(PLANS, first=1))
def test_fp16_trains_like_fp32(name: str) -> None:
    spec = PLANS[name].model.spec
    assert spec is not None
    found = train_threads(in_precision(PLANS[name], "fp16"), spec)
    expected = train_alone(in_precision(PLANS[name], "fp32"), spec)
    assert found.losses == pytest.approx(expected.losses, rel=2**-9)
    assert found.norms == pytest.approx(expected.norms, rel=2**-7)


def test_masters_add_up_what_bf16_cannot_hold() -> None:
    """A step moves a weight by less than half of bf16's spacing: only masters get anywhere."""
    rate = 2.0**-12

    def moved(policy: str, steps: int) -> float:
        plan = in_precision(PLANS["alone"], policy)
        spec = plan.model.spec
        assert spec is not None

        def one(links: ThreadLinks) -> float:
            engine = engine_of(plan, spec, links)
            norms = [t.view for t in engine.model.logical_tensors() if "norm" in t.name]
            before = [view.clone() for view in norms]
            for _ in range(steps):
                engine.step(batches_of(engine, 0), settings(rate))
            return max(float((a - b).abs().max()) for a, b in zip(norms, before, strict=True))

        return float(World(1).run(one)[0])

    assert moved("bf16", 2) == 0.0, "norms begin at 1: two steps are still rounded away"
    assert moved("bf16", 14) >= 2.0**-9
    assert moved("pure_bf16", 14) == 0.0


def plant_infinity(engine: Engine, at_step: int) -> None:
    """Let one gradient of this rank be infinite in one step."""
    collect = engine.parameters.collect

    def planted(start: int, stop: int, lent: Container[int] = ()) -> None:
        collect(start, stop, lent)
        if engine.step_number == at_step and not getattr(engine, "planted", False):
            engine.planted = True  # type: ignore[attr-defined]
            exchanges = engine.parameters.of_units(range(start, stop))
            states = [state for exchange in exchanges for state in exchange.states if state.adds]
            state = max(states, key=lambda s: s.span.size)  # not norms, which neighbours have, too
            gradient = next(iter(state.loose.values())) if state.loose else state.gradient
            assert gradient is not None
            gradient.view(-1)[0] = float("inf")

    engine.parameters.collect = planted  # type: ignore[method-assign]


@pytest.mark.parametrize("name", every_other(PLANS))
def test_one_overflow_skips_the_step_everywhere(name: str) -> None:
    plan = in_precision(PLANS[name], "fp16")
    spec = plan.model.spec
    assert spec is not None

    def one(links: ThreadLinks) -> tuple[list[StepResult], list, list[float]]:
        engine = engine_of(plan, spec, links)
        if links.rank == plan.num_ranks - 1:
            plant_infinity(engine, at_step=1)
        results, weights, scales = [], [], []
        for step in (0, 1, 1, 2):  # the step that is skipped comes again
            results.append(engine.step(batches_of(engine, step), settings()))
            weights.append([(n, s, v.clone()) for n, s, v in engine.weights()])
            scales.append(engine.scaling.scale)
        assert engine.step_number == 3
        return results, weights, scales

    found = World(plan.num_ranks).run(one)
    after = [
        whole_tensors(spec, [part for _, parts, _ in found for part in parts[i]], "weights")
        for i in range(4)
    ]
    for results, _, scales in found:
        assert [r.skipped for r in results] == [False, True, False, False]
        assert all(results[i] == found[0][0][i] for i in (0, 2, 3))
        assert scales == [FIRST_SCALE, *[FIRST_SCALE / 2] * 3]
    assert all(torch.equal(after[0][key], after[1][key]) for key in after[0])
    assert not all(torch.equal(after[1][key], after[2][key]) for key in after[0])
    undisturbed = train_threads(plan, spec)
    losses = [found[0][0][i].loss for i in (0, 2, 3)]
    assert losses == pytest.approx(undisturbed.losses, rel=2**-9)
    for key, value in undisturbed.weights.items():
        torch.testing.assert_close(after[3][key], value, rtol=2**-7, atol=2**-7)


def test_a_scale_far_too_large_comes_down_by_itself() -> None:
    plan = in_precision(PLANS["shards on unlike chips"], "fp16")
    spec = plan.model.spec
    assert spec is not None

    def one(links: ThreadLinks) -> list[bool]:
        engine = engine_of(plan, spec, links)
        engine.scaling.load_state_dict({"scale": 2.0**34, "good_steps": 3.0})
        skipped = [engine.step(batches_of(engine, 0), settings()).skipped for _ in range(20)]
        assert engine.step_number == skipped.count(False)
        return skipped

    found = World(plan.num_ranks).run(one)
    assert found[0] == found[1]
    first_good = found[0].index(False)
    assert 0 < first_good < 19
    assert not any(found[0][first_good:])


def scaling(policy: str = "fp16") -> LossScaling:
    job = Job(sequence_length=96, global_batch=10, precision=PRECISIONS[policy])
    return LossScaling(job)


def test_the_scale_grows_after_many_good_steps() -> None:
    own = scaling()
    assert own.factor == FIRST_SCALE / 512, "960 tokens: the power of two below"
    for _ in range(GROWTH_STEPS - 1):
        own.end_step(skipped=False)
    assert own.scale == FIRST_SCALE
    restored = scaling()
    restored.load_state_dict(own.state_dict())
    restored.end_step(skipped=False)
    assert restored.scale == 2 * FIRST_SCALE
    restored.end_step(skipped=True)
    assert restored.scale == FIRST_SCALE


def test_a_scale_that_never_helps_is_an_error() -> None:
    own = scaling()
    own.load_state_dict({"scale": SMALLEST_SCALE, "good_steps": 0.0})
    with pytest.raises(RuntimeError, match="not finite at any scale"):
        own.end_step(skipped=True)


def test_without_scaling_nothing_changes() -> None:
    own = scaling("bf16")
    own.end_step(skipped=True)
    own.load_state_dict({"scale": 8.0, "good_steps": 1.0})
    assert own.factor == own.scale == 1.0


def test_formats_that_nothing_here_computes_in() -> None:
    for wrong in (
        Precision(compute=Dtype.INT8),
        Precision(compute=Dtype.FP8, parameters=Dtype.FP32),
    ):
        with pytest.raises(InputError, match=r"computing in .* on parameters in .* is not trained"):
            compute_dtype(wrong)


@pytest.mark.parametrize("name", every_other(PLANS, first=1))
def test_fp8_trains_alike_under_every_plan(name: str) -> None:
    spec = PLANS[name].model.spec
    assert spec is not None
    found = train_threads(in_precision(PLANS[name], "fp8"), spec)
    expected = train_alone(in_precision(PLANS[name], "fp8"), spec)
    wide = train_alone(in_precision(PLANS[name], "bf16"), spec)
    assert found.losses == pytest.approx(expected.losses, rel=2**-7)
    assert expected.losses == pytest.approx(wide.losses, rel=0.02)
    assert expected.norms != wide.norms, "products were made in 8 bits"


@pytest.mark.parametrize("name", every_other(PLANS, 1))
def test_some_blocks_of_fp8_stay_wide_under_every_plan(name: str) -> None:
    spec = PLANS[name].model.spec
    assert spec is not None

    def with_wide(*ranges: tuple[int, int]) -> Plan:
        plan = in_precision(PLANS[name], "fp8")
        return replace(plan, job=replace(plan.job, wide_units=ranges))

    mixed, narrow = with_wide((2, 3)), train_alone(with_wide(), spec)
    found, expected = train_threads(mixed, spec), train_alone(mixed, spec)
    assert found.losses == pytest.approx(expected.losses, rel=2**-7)
    bf16 = train_alone(in_precision(PLANS[name], "bf16"), spec)
    assert expected.norms != bf16.norms
    assert expected.norms != narrow.norms
    every = train_alone(with_wide((1, spec.head_unit)), spec)
    assert every.losses == bf16.losses
    assert every.norms == bf16.norms
