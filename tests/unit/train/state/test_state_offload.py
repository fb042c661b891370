"""State on the host: the same numbers, bit by bit, and less memory on the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.any_plan import Draft, level
from tests.support.threads import ThreadLinks, World
from tests.support.training import (
    batches_of,
    engine_of,
    in_precision,
    settings,
    train_threads,
    whole_tensors,
)
from tutti.accelerator.devices.emulated import EmulatedAccelerator
from tutti.models.parameters import ParameterClass
from tutti.plan.check import check_plan
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import ExpertGroup, Offload, Plan, Synchronisation
from tutti.train.engine.engine import Engine

FOUR = ((0, 4),)
MIDDLE = ((1, 3),)
OPTIMIZER = Offload(optimizer=FOUR)
EVERYTHING = Offload(optimizer=FOUR, parameters=FOUR, gradients=FOUR, activations=MIDDLE)
NO_PARAMETERS = Offload(optimizer=FOUR, gradients=FOUR)
PLAIN, ZERO = ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE


def pair(away: Offload, *rules: Synchronisation, kind: ScheduleKind = PLAIN) -> Plan:
    return (
        Draft()
        .line((FOUR, [{"sequences": 2, "offload": away}, {"pool": "slow"}]), micro_batches=3)
        .plan(kind, *rules)
    )


PLANS: dict[str, Plan] = {
    "alone": Draft().line((FOUR, [{"offload": EVERYTHING}]), micro_batches=3).plan(),
    "one micro-batch": Draft().line((FOUR, [{"offload": EVERYTHING}]), micro_batches=1).plan(),
    "level 0": pair(EVERYTHING),
    "level 0, reduced at the end": pair(EVERYTHING, level(0, overlap=False)),
    "level 1": pair(NO_PARAMETERS, level(1)),
    "level 2": pair(NO_PARAMETERS, level(2), kind=ZERO),
    "level 3": pair(EVERYTHING, level(3, bucket=2)),
    "level 3, optimizer only": pair(OPTIMIZER, level(3), kind=ZERO),
    "tied apart": Draft(tied=True)
    .line((((0, 2),), [{"count": 2, "offload": Offload(optimizer=((0, 2),))}]),
          (((2, 4),), [{"tp": 2, "sequences": 2, "offload": Offload(optimizer=((2, 4),))}]))
    .plan(PLAIN, level(1, (0, 2)), level(3, (2, 4))),
    "pipelines that shard inside": Draft()
    .line((FOUR, [{"count": 2, "offload": NO_PARAMETERS}]))
    .line((FOUR, [{"tp": 2, "sequences": 1, "offload": EVERYTHING}]), micro_batches=3)
    .plan(PLAIN, level(3)),
    "stages": Draft()
    .line((((0, 2),), [{"offload": Offload(parameters=((0, 2),), gradients=((1, 2),))}]),
          (((2, 4),), [{"offload": Offload(optimizer=((2, 3),), gradients=((3, 4),))}]),
          micro_batches=3)
    .plan(ZERO),
    "experts": Draft(experts_in=(1,))
    .line((FOUR, [{"count": 2, "tp": 2, "sequence_parallel": True, "offload": NO_PARAMETERS}]),
          experts={0: (ExpertGroup(chips=2, count=2),)})
    .plan(PLAIN, level(2), level(0, parameter_class=ParameterClass.EXPERT)),
}  # fmt: skip


def without_offload(plan: Plan) -> Plan:
    """The same plan, with everything on the chip but activations."""
    lines = tuple(
        replace(line, stages=tuple(
            replace(stage, replicas=tuple(
                replace(replica, offload=Offload(activations=replica.offload.activations))
                for replica in stage.replicas
            ))
            for stage in line.stages
        ))
        for line in plan.pipelines
    )  # fmt: skip
    return replace(plan, pipelines=lines)


@pytest.mark.parametrize(
    ("name", "policy"), [*((name, "bf16") for name in PLANS), ("level 3", "fp16")]
)
def test_offload_changes_no_bit(name: str, policy: str) -> None:
    plan = in_precision(PLANS[name], policy)
    assert check_plan(plan) == []
    spec = plan.model.spec
    assert spec is not None
    found, expected = (train_threads(p, spec, 2, 0.5) for p in (plan, without_offload(plan)))
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    for key, value in expected.weights.items():
        assert torch.equal(found.weights[key], value), key


# --- memory ----------------------------------------------------------------------------------


def trained_within(plan: Plan, limit: int, steps: int = 2) -> tuple[int, int]:
    """Train a plan of one rank on a chip with so much memory; return peak and use at rest."""
    spec = plan.model.spec
    assert spec is not None

    def one(links: ThreadLinks) -> tuple[int, int]:
        chip = EmulatedAccelerator(chip="A800", mode="dilated", memory_bytes=limit)
        try:
            engine = engine_of(plan, spec, links, accelerator=chip)
            chip.reset_peak()
            for step in range(steps):
                engine.step(batches_of(engine, step), settings())
            return chip.memory().peak, chip.memory().allocated
        finally:
            chip.limit_memory(None)

    found: tuple[int, int] = World(1).run(one)[0]
    return found


def one_rank(away: Offload) -> Plan:
    plan = Draft(layers=4).line((((0, 6),), [{"offload": away}]), micro_batches=2).plan()
    return in_precision(plan, "bf16")


def num_parameters(plan: Plan) -> int:
    spec = plan.model.spec
    assert spec is not None
    return sum(p.size for unit in range(spec.num_units) for p in spec.parameters(unit))


ALL = ((0, 6),)
PLENTY = 1 << 34


def test_a_model_whose_optimizer_state_does_not_fit_trains_from_the_host() -> None:
    resident, away = one_rank(Offload()), one_rank(Offload(optimizer=ALL))
    state = 12 * num_parameters(resident)  # master and two moments in fp32
    peak, at_rest = trained_within(away, PLENTY)
    full_peak, full_at_rest = trained_within(resident, PLENTY)
    assert full_at_rest - at_rest == pytest.approx(state, rel=0.01)
    limit = (peak + full_peak) // 2
    trained_within(away, limit)
    with pytest.raises(torch.OutOfMemoryError, match="would pass the limit"):
        trained_within(resident, limit)


@pytest.mark.parametrize(
    ("away", "bytes_each"),
    [(Offload(parameters=ALL), 2), (Offload(optimizer=ALL, parameters=ALL, gradients=ALL), 14)],
)
def test_what_is_at_rest_on_the_host_takes_no_memory_of_the_device(
    away: Offload, bytes_each: int
) -> None:
    _, at_rest = trained_within(one_rank(away), PLENTY)
    _, full_at_rest = trained_within(one_rank(Offload()), PLENTY)
    freed = bytes_each * num_parameters(one_rank(Offload()))
    assert full_at_rest - at_rest == pytest.approx(freed, rel=0.01)


def test_gradients_on_the_host_leave_room_while_passes_run() -> None:
    """Between a bucket's weight passes its gradients are away: of six buckets one or two stay."""
    peaks = [trained_within(one_rank(o), PLENTY)[0] for o in (Offload(), Offload(gradients=ALL))]
    assert peaks[1] < peaks[0] - num_parameters(one_rank(Offload()))


def test_weights_and_checkpoints_read_what_lies_on_the_host() -> None:
    plan = in_precision(PLANS["level 3"], "bf16")
    spec = plan.model.spec
    assert spec is not None

    def one(links: ThreadLinks) -> tuple[list, list, list]:
        engine = engine_of(plan, spec, links)
        engine.step(batches_of(engine, 0), settings())
        saved = [
            {name: tensor.clone() for name, tensor in state.optimizer.tensors().items()}
            for state in engine.parameters.all_states()
        ]
        before = engine.weights()
        first = engine.step(batches_of(engine, 1), settings())
        restore(engine, saved)
        return before, engine.weights(), [first, engine.step(batches_of(engine, 1), settings())]

    def restore(engine: Engine, saved: list[dict[str, torch.Tensor]]) -> None:
        for state, values in zip(engine.parameters.all_states(), saved, strict=True):
            for name, tensor in state.optimizer.tensors().items():
                tensor.copy_(values[name])
        engine.follow_masters()
        engine.step_number = 1

    found = World(plan.num_ranks).run(one)
    for before, after, (first, again) in found:
        assert first == again
        for (_, _, a), (_, _, b) in zip(before, after, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
    whole_tensors(spec, [part for before, _, _ in found for part in before], "weights")
