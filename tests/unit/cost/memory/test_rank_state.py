"""Who holds what: tied tables, unequal experts, and the launch overhead of a chip."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.plans import EXPERTS, Allocator, small_model
from tutti.cost.constants import Constants
from tutti.cost.families import nominal_constants
from tutti.cost.kernels import Kernels
from tutti.cost.memory.instruction_memory import MemoryModel
from tutti.cost.memory.rank_state import RankState, workload_of
from tutti.document import Place
from tutti.hardware.library import shipped
from tutti.models.parameters import ParameterClass
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.plan import (
    ExpertGroup,
    Pipeline,
    Plan,
    Replica,
    Stage,
    Synchronisation,
)
from tutti.schedule.instruction import Op
from tutti.schedule.schedule import build_schedule
from tutti.simulate.estimate import estimate

HEAD = 5


def two_stages(owner: int | None, *, split: int = 3) -> Plan:
    chips = Allocator()
    model = small_model(HEAD - 1, tied=True)
    cuts = [(0, split), (split, HEAD + 1)] if split else [(0, HEAD + 1)]
    stages = tuple(
        Stage(units=(cut,), replicas=(Replica(chips=chips.take("fast", 2), count=2),))
        for cut in cuts
    )
    return Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(chips.cluster()),
        job=Job(sequence_length=64, global_batch=8, schedule=ScheduleKind.ONE_F_ONE_B),
        pipelines=(Pipeline(micro_batch=2, micro_batches=4, stages=stages),),
        tied_owner=owner,
    )


def memory_of(plan: Plan, stage: int) -> MemoryModel:
    return MemoryModel(RankState(plan, plan.model.spec, (0, stage, 0), Kernels()))


TABLE = 256 * 64


@pytest.mark.parametrize(("owner", "embedding", "head"), [(0, TABLE, 64), (HEAD, 0, TABLE + 64)])
def test_only_the_owner_of_a_tied_table_updates_it(owner, embedding, head):
    plan = two_stages(owner)
    first, last = memory_of(plan, 0), memory_of(plan, 1)
    assert first.optimizer_parameters(0) == embedding
    assert last.optimizer_parameters(HEAD) == head
    # Both hold the table and its gradients.
    assert first.rank_state.share(0, ParameterClass.DENSE).held == TABLE
    assert last.rank_state.share(HEAD, ParameterClass.DENSE).held == TABLE + 64
    states = [memory.static().optimizer for memory in (first, last)]
    other = [memory_of(two_stages(HEAD - owner), s).static().optimizer for s in (0, 1)]
    moved = TABLE * 12
    sign = 1 if owner == 0 else -1
    assert states[0] - other[0] == pytest.approx(sign * moved)
    assert states[1] - other[1] == pytest.approx(-sign * moved)


def test_a_table_on_one_stage_is_updated_once():
    plan = two_stages(0, split=0)
    memory = memory_of(plan, 0)
    assert memory.optimizer_parameters(0) + memory.optimizer_parameters(HEAD) == TABLE + 64


def test_the_step_of_a_borrowed_table_takes_no_time():
    found = estimate(two_stages(HEAD))
    costs = found.priced.costs.classes[0].seconds
    steps = {
        entry.start: float(costs[i])
        for i, entry in enumerate(found.schedule.classes[0].instructions)
        if entry.op is Op.STEP
    }
    assert steps[0] == 0.0 < steps[1]


def test_each_class_has_the_experts_of_its_own_chips():
    chips = Allocator()
    model = small_model(2, experts_in=(0, 1))
    replicas = tuple(Replica(chips=chips.take("fast", 2), count=2) for _ in range(2))
    stage = Stage(
        units=((0, 4),), replicas=replicas, experts=(ExpertGroup(chips=4, experts=(1, 1, 2, 4)),)
    )
    plan = Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(chips.cluster()),
        job=Job(sequence_length=64, global_batch=4),
        pipelines=(Pipeline(micro_batch=4, micro_batches=1, stages=(stage,)),),
    )
    ways = [workload_of(plan, stage, replica).ep for replica in replicas]
    assert ways == [EXPERTS // 1, EXPERTS // 4]
    elsewhere = replace(replicas[0], count=1)  # a replica that is no part of the stage
    assert workload_of(plan, stage, elsewhere).ep == EXPERTS // 4
    found = estimate(plan)
    assert found.memory[0].parameters < found.memory[1].parameters
    equal = replace(stage, experts=(ExpertGroup(chips=4),))
    assert {workload_of(plan, equal, replica).ep for replica in replicas} == {4}


def test_experts_travel_by_their_own_bucket():
    chips = Allocator()
    model = small_model(6, experts_in=tuple(range(6)))
    replica = Replica(chips=chips.take("fast", 4), count=4)
    stage = Stage(units=((0, 8),), replicas=(replica,), experts=(ExpertGroup(chips=2, count=2),))
    rules = (
        Synchronisation(units=(0, 8), bucket=3),
        Synchronisation(
            units=(0, 8), parameter_class=ParameterClass.EXPERT, bucket=2, shard_level=2
        ),
    )
    plan = Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(chips.cluster()),
        job=Job(sequence_length=64, global_batch=8),
        pipelines=(Pipeline(micro_batch=4, micro_batches=2, stages=(stage,)),),
        synchronisation=rules,
    )
    (only,) = build_schedule(plan).classes
    reduced = {
        kind: sorted(
            {
                (e.start, e.stop)
                for e in only.instructions
                if e.op is Op.REDUCE_GRADIENTS and e.what.value == kind
            }
        )
        for kind in ("dense", "expert")
    }
    assert reduced["dense"] == [(0, 3), (3, 6), (6, 8)]
    assert reduced["expert"] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_the_launch_floor_of_a_chip_that_nobody_measured():
    plain = Constants()
    chip = shipped().chip("A100-80", Place("test"))
    assert (
        nominal_constants(replace(chip, launch_overhead_s=5e-6)).host_layer_s == plain.host_layer_s
    )
    slow = nominal_constants(replace(chip, launch_overhead_s=20e-6))
    assert slow.host_layer_s == pytest.approx(4 * plain.host_layer_s)
    assert slow.gemm_efficiency == plain.gemm_efficiency
