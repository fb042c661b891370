"""A mean of the weights under any plan: sharded as they are, by definition, evaluated with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.any_plan import PLANS
from tests.support.threads import World
from tests.support.training import batches_of, engine_of, in_precision, settings
from tutti.accelerator.reference.optimizer import AverageSettings
from tutti.train.engine.averages import averaged

HOW = AverageSettings(decay=0.6, every=2, start=1)


def check(name: str, policy: str = "bf16", optimizer: str = "adamw") -> None:
    plan = in_precision(PLANS[name], policy, optimizer)
    plan = replace(plan, job=replace(plan.job, average=True))
    spec = plan.model.spec
    assert spec is not None

    def one(links: Any) -> int:
        engine = engine_of(plan, spec, links)
        states = [s for s in engine.parameters.all_states() if not s.span.copied]
        kept = [s.optimizer.average for s in states]
        assert all(a is not None for a in kept)
        expected = [s.read_kept(0, s.num_kept).float().clone() for s in states]
        for step in range(4):
            engine.step(batches_of(engine, step), replace(settings(), average=HOW))
            weights = [s.read_kept(0, s.num_kept).float() for s in states]
            if step == 0:  # until `start` the weights themselves
                expected = [w.clone() for w in weights]
            elif step == 2:  # steps 1 + 2, 1 + 4, …
                expected = [0.6 * e + 0.4 * w for e, w in zip(expected, weights, strict=True)]
            for state, want in zip(states, expected, strict=True):
                state.optimizer.settle()
                assert state.optimizer.average is not None
                found = state.optimizer.average.to(want.device)
                torch.testing.assert_close(found, want, atol=1e-6, rtol=1e-6)
        before = [s.read_kept(0, s.num_kept).clone() for s in states]
        plain = engine.evaluate(batches_of(engine, 9)).loss
        with averaged(engine):
            other = engine.evaluate(batches_of(engine, 9)).loss
        assert other != plain
        assert engine.evaluate(batches_of(engine, 9)).loss == plain
        for state, was in zip(states, before, strict=True):
            assert torch.equal(state.read_kept(0, state.num_kept), was)
        return sum(len(e) for e in expected)

    assert sum(World(plan.num_ranks).run(one)) >= spec.num_parameters


@pytest.mark.parametrize(
    ("name", "policy", "optimizer"),
    [
        ("unequal shares on unlike chips", "bf16", "adamw"),
        ("pipelines that shard inside", "pure_bf16", "lion"),
        ("experts shared out unequally", "fp32", "sgd"),
        ("activations on the host", "bf16", "adamw8bit"),
    ],
)
def test_a_few_plans(name: str, policy: str, optimizer: str) -> None:
    check(name, policy, optimizer)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [n for n in PLANS if "tied" not in n and "cut" not in n])
def test_all_plans(name: str) -> None:
    check(name)
