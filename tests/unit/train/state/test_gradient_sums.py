"""Products go straight onto the sums of a step's micro-batches, and the sums are what steps."""

from __future__ import annotations

from collections.abc import Container

import pytest
import torch

from tests.support.any_plan import Draft, level
from tests.support.threads import ThreadLinks, World
from tests.support.training import batches_of, engine_of, settings
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Plan
from tutti.train.state.gradient_sums import Sums

ALL = ((0, 4),)
PLANS: dict[str, Plan] = {
    "one micro-batch": Draft().line((ALL, [{}]), micro_batches=1).plan(),
    "several": Draft().line((ALL, [{}]), micro_batches=3).plan(),
    "replicas": Draft().line((ALL, [{"count": 2}])).plan(),
    "shards": Draft().line((ALL, [{"count": 2}])).plan(ScheduleKind.ONE_F_ONE_B, level(3)),
    "slices": Draft().line((ALL, [{"count": 2, "tp": 2}])).plan(),
}


def left_with_weights(plan: Plan) -> set[str]:
    """Return the parameters of rank 0 that a weight pass left a gradient with."""
    spec = plan.model.spec
    assert spec is not None

    def one(links: ThreadLinks) -> set[str]:
        engine = engine_of(plan, spec, links)
        collect, found = engine.parameters.collect, set()

        def seen(start: int, stop: int, lent: Container[int] = ()) -> None:
            found.update(n for n, p in engine.model.named_parameters() if p.grad is not None)
            collect(start, stop, lent)

        engine.parameters.collect = seen  # type: ignore[method-assign]
        engine.step(batches_of(engine, 0), settings())
        return {name for name in found if "norm" not in name}

    first: set[str] = World(plan.num_ranks).run(one)[0]
    return first


@pytest.mark.parametrize("name", ["several", "replicas", "shards", "slices"])
def test_only_small_gradients_pass_by_their_weights(name: str) -> None:
    assert left_with_weights(PLANS[name]) == {"units.3.logits.weight"}


def test_one_micro_batch_needs_no_sum() -> None:
    assert "units.1.mlp.down.weight" in left_with_weights(PLANS["one micro-batch"])


def test_tensors_of_one_parameter_have_parts_of_one_sum() -> None:
    plan = PLANS["one micro-batch"]
    spec = plan.model.spec
    assert spec is not None

    def one(links: ThreadLinks) -> None:
        engine = engine_of(plan, spec, links)
        sums = Sums(engine.parameters.all_states(), several=True)
        owner = next(p for n, p in engine.model.named_parameters() if "1.attention.qkv" in n)
        total = sums.of(owner)
        assert total is not None
        assert (total.shape, total.dtype) == (owner.shape, torch.float32)
        assert sums.of(owner) is total
        total += torch.arange(total.numel()).view_as(total)
        parts = {
            block.name: part
            for state in engine.parameters.all_states()
            for block, part in state.gradient_parts()
        }
        rows = [parts[f"attention.{name}.weight"] for name in ("query", "key", "value")]
        assert torch.equal(torch.cat(rows), total)

    World(1).run(one)
