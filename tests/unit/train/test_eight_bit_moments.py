"""AdamW whose moments are codes of 8 bits: the codes, any plan, checkpoints, and their price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.any_plan import FOUR, PLAIN, PLANS, Draft, level
from tests.support.checkpointing import Run, run
from tests.support.threads import World
from tests.support.training import batches_of, engine_of, in_fp32, settings
from tests.unit.train.test_any_optimizer import alone
from tutti.accelerator.reference.moment_codes import code_dtype, decode, encode, num_scales
from tutti.cost.kernels import Kernels
from tutti.cost.memory.instruction_memory import MemoryModel
from tutti.cost.memory.rank_state import RankState
from tutti.plan.job import CODE_BLOCK, PRECISIONS, Job
from tutti.plan.plan import Plan

KINDS = ("mean", "square")


def coded(kind: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.zeros(len(values), dtype=code_dtype(kind))
    scales = torch.zeros(num_scales(len(values), CODE_BLOCK))
    encode(kind, values, codes, scales, CODE_BLOCK)
    return codes, scales


def moments(kind: str, count: int = 1000) -> torch.Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)) * 1e-4
    values[::7] *= 1e-3
    values[5] = 0.0
    return values if kind == "mean" else values.square()


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_near_and_come_back_as_they_were(kind: str) -> None:
    values = moments(kind)
    codes, scales = coded(kind, values)
    found = decode(kind, codes, scales, CODE_BLOCK)
    again = coded(kind, found)
    assert torch.equal(codes, again[0])
    assert torch.equal(scales, again[1])
    # half a step between neighbours: of a mean ≤ 1/127 of its block's largest, of a root likewise
    root = (lambda x: x.sqrt()) if kind == "square" else (lambda x: x)
    error = (root(found) - root(values)).abs()
    assert (
        float((error / root(scales).repeat_interleave(CODE_BLOCK)[: len(values)]).max()) < 1 / 120
    )
    assert found[5] == 0.0
    assert bool(((values == 0) == (found == 0)).all()) or kind == "mean"


def test_a_block_of_zeros_stays_zero() -> None:
    codes, scales = coded("square", torch.zeros(300))
    assert not decode("square", codes, scales, CODE_BLOCK).any()


def losses_of(plan: Plan, steps: int = 6) -> list[float]:
    spec = plan.model.spec
    assert spec is not None

    def one(links: object) -> list[float]:
        engine = engine_of(plan, spec, links)
        return [engine.step(batches_of(engine, n), settings()).loss for n in range(steps)]

    return World(plan.num_ranks).run(one)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_any_plan_has_the_loss_of_one_process(name: str) -> None:
    plan = in_fp32(PLANS[name], "adamw8bit")
    assert plan.model.spec is not None
    expected = losses_of(alone(plan, plan.model.spec))
    assert losses_of(plan) == pytest.approx(expected, rel=0.01)
    wide = alone(in_fp32(PLANS[name], "adamw"), plan.model.spec)
    assert expected == pytest.approx(losses_of(wide), rel=0.01)


def plan_of(optimizer: str, shards: int = 1) -> Plan:
    plan = Draft().line((FOUR, [{"count": 2}])).plan(PLAIN, level(shards))
    job = replace(plan.job, precision=PRECISIONS["bf16"], optimizer=optimizer)
    return replace(plan, job=job)


def whole(one: Run) -> list[float]:
    one.begin()
    one.train(2)
    one.save()
    return one.train(2)


def resumed(one: Run) -> list[float]:
    one.checkpointer.load(one.engine)
    return one.train(2)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    plan = plan_of("adamw8bit")
    assert run(plan, tmp_path, whole) == run(plan, tmp_path, resumed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [plan_of("adamw8bit", 3), plan_of("adamw8bit", 0), plan_of("adamw")]
)
def test_other_plans_and_plain_adamw_read_the_same_numbers(other: Plan, tmp_path: Path) -> None:
    expected = run(plan_of("adamw8bit"), tmp_path, whole)[0]
    assert run(other, tmp_path, resumed)[0] == pytest.approx(expected, rel=0.01)


def test_states_are_priced_as_they_are_allocated() -> None:
    plan = plan_of("adamw8bit")
    spec = plan.model.spec
    assert spec is not None

    def one(links: object) -> float:
        states = engine_of(plan, spec, links).parameters.all_states()
        held = [t for s in states for t in s.optimizer.tensors().values()]
        return float(sum(t.numel() * t.element_size() for t in held))

    allocated = max(World(plan.num_ranks).run(one))
    priced = MemoryModel(RankState(plan, spec, (0, 0, 0), Kernels())).static().optimizer
    # a scale for the begun block of each span and moment
    spans = 2 * (spec.num_units + 1)
    assert allocated - 2 * 4 * spans <= priced <= allocated
    wide = Job(sequence_length=8, global_batch=1)
    narrow = replace(wide, optimizer="adamw8bit")
    assert wide.state_bytes == 12.0
    assert narrow.state_bytes == 4.0 + 2 * (1 + 4 / CODE_BLOCK)
