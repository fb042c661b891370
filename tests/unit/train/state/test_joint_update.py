"""One call for all buckets moves every weight as a call for each of them does, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from tests.support.any_plan import FOUR, Draft, level
from tests.support.threads import ThreadLinks, World
from tests.support.training import batches_of, engine_of, settings
from tutti.accelerator.reference.optimizer import AdamSettings, TensorSettings
from tutti.plan.job import PRECISIONS, ScheduleKind
from tutti.plan.plan import Plan
from tutti.train.engine.engine import Engine
from tutti.train.state.joint_update import is_plain, update_jointly, waiting

ALONE = Draft().line((FOUR, [{"sequences": 2}])).plan()
SHARDED = Draft().line((FOUR, [{"sequences": 2}, {}])).plan(ScheduleKind.ONE_F_ONE_B, level(1))
RATES = (
    settings(),
    replace(settings(), decay_vectors=True),
    replace(settings(), tensors=(TensorSettings(match=("1.*",), rate=0.5, weight_decay=0.0),)),
)


def engine_on(plan: Plan, links: ThreadLinks) -> Engine:
    assert plan.model.spec is not None
    return engine_of(plan, plan.model.spec, links)


def of(plan: Plan, **words: Any) -> Plan:
    return replace(plan, job=replace(plan.job, **words))


def moved(plan: Plan, own: AdamSettings, *, jointly: bool) -> list[Tensor]:
    """Return what optimizers and modules of all ranks hold after two steps."""

    def one(links: ThreadLinks) -> list[Tensor]:
        engine = engine_on(plan, links)
        if jointly:
            let_all_be_joint(engine)
        for step in range(2):
            engine.step(batches_of(engine, step), own)
        held = [p.detach().clone() for p in engine.model.parameters()]
        for state in engine.parameters.all_states():
            each = (state.optimizer.master, state.optimizer.mean, state.optimizer.square)
            held += [own.clone() for own in each if own is not None]
        return held

    return [tensor for rank in World(plan.num_ranks).run(one) for tensor in rank]


def let_all_be_joint(engine: Engine) -> None:
    """Let the first update of a step be all of them, as where blocks run as graphs."""
    states = engine.parameters.all_states()
    assert all(is_plain(state) for state in states)
    calls = 0

    def step(*args: Any, **words: Any) -> None:
        nonlocal calls
        calls += 1
        assert len(waiting(states)) == len(states), "the first one moves all of them"
        update_jointly(waiting(states), *args, **words)
        assert not waiting(states)

    for state in states:
        state.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("own", RATES, ids=["plain", "vectors decay", "one unit is slower"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
@pytest.mark.parametrize("plan", [ALONE, SHARDED], ids=["alone", "sharded"])
def test_joint_is_bucket_by_bucket(plan: Plan, precision: str, own: AdamSettings) -> None:
    chosen = of(plan, precision=PRECISIONS[precision])
    apart, jointly = (moved(chosen, own, jointly=joint) for joint in (False, True))
    assert len(apart) == len(jointly)
    for one, other in zip(apart, jointly, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("optimizer", ["lion", "sgd", "adamw8bit", "muon", "adafactor"])
def test_other_rules_stay_apart(optimizer: str) -> None:
    plan = of(ALONE, optimizer=optimizer)

    def one(links: ThreadLinks) -> list[bool]:
        engine = engine_on(plan, links)
        return [is_plain(state) for state in engine.parameters.all_states()]

    assert not any(World(1).run(one)[0])
