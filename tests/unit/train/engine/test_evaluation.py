"""Validation losses under any plan: those of one process, and training is not disturbed."""

from __future__ import annotations

import pytest
import torch

from tests.support.any_plan import PLANS
from tests.support.threads import ThreadLinks, World
from tests.support.training import (
    batches_of,
    engine_of,
    in_fp32,
    separate_batches,
    settings,
    train_threads,
    whole_tensors,
)
from tests.unit.train.state.test_state_offload import PLANS as ON_HOST
from tutti.accelerator import open_accelerator
from tutti.models.spec import ModelSpec
from tutti.nn.initialize import initialize
from tutti.nn.model import Model
from tutti.plan.plan import Plan

CASES = {**PLANS, "parameters on the host": ON_HOST["level 3"], "on the host": ON_HOST["stages"]}


def loss_alone(plan: Plan, spec: ModelSpec, step: int) -> float:
    model = Model(spec, open_accelerator("cpu").operators)
    initialize(model, seed=1, deviation=0.1)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for _, batch in separate_batches(plan, spec, step, packed=True):
            total += float(model(None, batch).loss)
            tokens += batch.num_tokens
    return total / tokens


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_one_process_before_and_between_steps(name: str) -> None:
    plan = in_fp32(CASES[name], "sgd")
    spec = plan.model.spec
    assert spec is not None

    def one(links: ThreadLinks) -> tuple[list, list, list]:
        engine = engine_of(plan, spec, links)
        found = [engine.evaluate(batches_of(engine, 7, packed=True))]
        results = []
        for step in range(2):
            results.append(engine.step(batches_of(engine, step), settings()).loss)
            found += [engine.evaluate(batches_of(engine, 7, packed=True)) for _ in range(2)]
        assert engine.step_number == 2
        return found, results, engine.weights()

    ranks = World(plan.num_ranks).run(one)
    found = ranks[0][0]
    assert all(other == found for other, _, _ in ranks)
    assert found[0].loss == pytest.approx(loss_alone(plan, spec, 7), rel=1e-5)
    assert found[0].tokens == plan.job.tokens
    assert found[1] == found[2], "the same weights"
    assert found[1].loss != found[0].loss, "a step was taken"
    undisturbed = train_threads(plan, spec, steps=2)
    assert ranks[0][1] == undisturbed.losses
    weights = whole_tensors(spec, [part for _, _, parts in ranks for part in parts], "weights")
    assert all(torch.equal(weights[key], value) for key, value in undisturbed.weights.items())
