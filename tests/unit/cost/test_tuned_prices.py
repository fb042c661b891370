"""Frozen weights in prices: no gradients, no optimizer states, no weight pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.any_plan import PLANS
from tests.support.tuned_plans import FROZEN, LORA, tuned
from tutti.plan.plan import Plan
from tutti.schedule.instruction import Op
from tutti.simulate.estimate import Estimate, estimate

PLAN = PLANS["activations on the host"]


def priced(plan: Plan) -> Estimate:
    assert plan.model.spec is not None
    assert plan.cluster.cluster is not None
    return estimate(plan, plan.model.spec, plan.cluster.cluster)


@pytest.mark.parametrize("name", ["tied in one place, level 3",
                                  "experts over tensor and data parallel"])  # fmt: skip
@pytest.mark.parametrize("tuning", [LORA, FROZEN], ids=["lora", "frozen"])
def test_less_state_and_less_time(name, tuning):
    whole, less = priced(PLANS[name]), priced(tuned(PLANS[name], tuning)[0])
    for before, after in zip(whole.memory, less.memory, strict=True):
        assert after.optimizer < before.optimizer
        assert after.gradients <= before.gradients
    backward = [sum(e.priced.costs.classes[0].seconds) for e in (whole, less)]
    assert backward[1] < backward[0] or tuning is LORA  # tiny adapters are all launches


def test_a_table_that_is_not_trained_does_not_travel():
    """Its two ends stay as they were loaded; trained ones go there and back."""

    def travels(plan: Plan) -> list[float]:
        found = priced(plan)
        return [
            seconds
            for own, costs in zip(found.schedule.classes, found.priced.costs.classes, strict=True)
            for entry, seconds in zip(own.instructions, costs.seconds.tolist(), strict=True)
            if entry.op is Op.SYNC_TIED
        ]

    apart = PLANS["interleaved, tied apart"]
    assert min(travels(apart)) > 0
    assert set(travels(tuned(apart, LORA)[0])) == {0.0}
    trained = replace(LORA, trained=("token.weight",))
    assert travels(tuned(apart, trained)[0]) == travels(apart)


def test_states_are_those_of_the_adapters_alone():
    plan, spec = tuned(PLAN, LORA)
    found = priced(plan)
    states = sum(memory.optimizer for memory in found.memory)
    assert len(found.memory) == 1  # one class: each of its ranks has a shard
    expected = spec.num_trained * plan.job.state_bytes
    assert states * plan.num_ranks == pytest.approx(expected, rel=0.02)


def test_few_bits_are_priced():
    wide, _ = tuned(PLAN, LORA)
    narrow, spec = tuned(PLAN, replace(LORA, base="nf4"))
    before, after = priced(wide).memory[0].parameters, priced(narrow).memory[0].parameters
    linear = sum(
        p.size
        for unit in range(1, spec.head_unit)
        for p in spec.parameters(unit)
        if p.frozen and len(p.shape) == 2
    )
    assert before - after == pytest.approx(linear * (2 - 0.5625), rel=1e-6)
